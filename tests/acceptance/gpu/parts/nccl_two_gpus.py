"""Part 13: the trials of part 7 with two ranks that have a GPU each."""

from __future__ import annotations

from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import nccl_pair


def run(pen: Pen, setting: Setting) -> None:
    """Run the whole part."""
    nccl_pair.run(pen, setting, [nccl_pair.TWO_GPUS])

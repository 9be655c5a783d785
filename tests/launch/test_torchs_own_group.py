"""Tests of scripts that begin torch's own process group from the environment, as for torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import fft

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
seen = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(seen)
print("world", dist.get_world_size(), "sum", seen.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.multiprocess
def test_each_group_is_a_world_of_its_ranks(tmp_path: Path) -> None:
    """The store at MASTER_PORT is the supervisor's; rank 0 must not serve a second one there."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["run", "--groups", "2", "--ranks", "2", "--no-progress", "--max-restarts", "0"]
    command += ["--trace-dir", str(tmp_path / "t"), str(script)]
    done = fft(*command, folder=tmp_path, within=200)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [log.read_text() for log in (tmp_path / "t" / "logs").iterdir()]
    assert [log.count("world 2 sum 3.0") for log in logs] == [1] * 4, logs

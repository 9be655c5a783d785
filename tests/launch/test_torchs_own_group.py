"""Scripts that begin torch's own process group from the environment, as for torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    """The store at MASTER_PORT is the supervisor's; rank 0 must not serve another one there."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "fft.cli", "run", "--groups", "2", "--ranks", "2"]
    command += ["--no-progress", "--max-restarts", "0", "--trace-dir", str(tmp_path / "t")]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [log.read_text() for log in (tmp_path / "t" / "logs").iterdir()]
    assert [log.count("world 2 sum 3.0") for log in logs] == [1] * 4, logs

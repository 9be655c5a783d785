"""Tests that a signal ends the workers that a trainer forks, as they do not inherit its
handlers."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_script

FORKS = """
import multiprocessing, os, signal, sys
from datetime import timedelta
import torch
from torch import nn
from torchft import ProcessGroupGloo
import fft

fork = multiprocessing.get_context("fork")


def ended_by(number):
    here, there = fork.Pipe()

    def work():
        there.send("up")
        here.close()
        signal.pause()

    process = fork.Process(target=work)
    process.start()
    assert here.recv() == "up"
    os.kill(process.pid, number)
    process.join(20)
    process.kill()
    process.join()
    return process.exitcode


manager = fft.ManagerFFT(pg=ProcessGroupGloo(timeout=timedelta(seconds=60)), load_state_dict=None,
                         state_dict=None, min_replica_size=1, init_sync=False)
manager.drain(on=signal.SIGTERM)
model = nn.Linear(4, 1)
manager.register(model, torch.optim.SGD(model.parameters(), lr=1e-2))
manager.sync_gradients(model)
loader = fft.CursorLoader(torch.randn(64, 4), batch_size=4, seed=5)
for txn in manager.transactions(loader, max_steps=2):
    with txn:
        print(txn.step, ended_by(signal.SIGTERM), ended_by(signal.SIGUSR2), flush=True)
        model(txn.batch).square().mean().backward()
assert manager._parts.job.local.role != "terminal" or manager.current_step() == 2
manager.shutdown()
"""


@pytest.mark.long
@pytest.mark.multiprocess
def test_sigterm_and_sigusr2_end_a_forked_worker(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    output = run_script(tmp_path / "forks.py", log=tmp_path / "log", within=180)
    assert [line for line in output.splitlines() if line[:1].isdigit()] == [
        "0 -15 -12",
        "1 -15 -12",
    ]

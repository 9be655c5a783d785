"""Tests of aborts that a user adds: their order and thread, and the end of a process that hangs."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch
import torchft
from forked import Forked

import fft
from fft.errors import ConfigError
from fft.trace.audit import read_lines
from fft.train.aborts import ABORT_HANGS


def manager_of_one(traces: Path) -> fft.ManagerFFT:
    return fft.ManagerFFT(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        trace_dir=traces,
    )


def train(manager: fft.ManagerFFT, steps: int) -> int:
    """Train some steps, of which the first one fails once; return the number of attempts."""
    model = torch.nn.Linear(1, 1)
    manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.sync_gradients(model)
    attempts = 0
    for txn in manager.transactions([torch.ones(2, 1)] * steps, max_steps=steps):
        with txn:
            attempts += 1
            model(txn.batch).mean().backward()
            if attempts == 1:
                raise ValueError("once")
    return attempts


def test_aborts_run_in_order_on_the_engines_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager, calls = manager_of_one(tmp_path), list[tuple[str, str]]()

    def first() -> None:
        calls.append(("first", threading.current_thread().name))
        raise RuntimeError("nothing to release")

    manager.on_abort(first)
    manager.on_abort(lambda: calls.append(("second", threading.current_thread().name)))
    with pytest.raises(ConfigError, match="limit_s=0"):
        manager.on_abort(first, limit_s=0)
    assert train(manager, steps=2) == 3
    names = [name for name, _ in calls]
    during = names[:2]
    manager.shutdown()
    assert during == ["first", "second"] and "MainThread" not in {thread for _, thread in calls[:2]}
    assert "first(), added by on_abort, has failed" in caplog.text


def hang(traces: str) -> None:
    manager = manager_of_one(Path(traces))
    manager.on_abort(threading.Event().wait, limit_s=0.2)
    train(manager, steps=2)


@pytest.mark.multiprocess
def test_abort_that_hangs_is_named_and_ends_the_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Forked(hang, str(tmp_path / "traces"), log=log)
    assert process.wait(30) == -signal.SIGKILL
    assert "Event.wait(), added by on_abort, has not ended within 0.2 s" in log.read_text()
    (note,) = read_lines(tmp_path / "traces", lambda line: line.get("note") == ABORT_HANGS)
    assert note["data"] == {"abort": "Event.wait()", "limit_s": 0.2}

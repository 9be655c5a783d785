"""Tests of the hooks that a user adds to the manager: order, failures, and limits."""

from __future__ import annotations

import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchft
from forked import Forked
from forked_run import fft as run_fft
from torch.distributed import HashStore, ProcessGroupGloo

import fft
from fft.errors import ConfigError, HookFailed
from fft.trace.audit import read_lines
from fft.train.step.rollback_hooks import HOOK_FAILED, HOOK_HANGS


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
    manager.on_abort(lambda: sys.exit(1))
    manager.on_abort(lambda: calls.append(("second", threading.current_thread().name)))
    for limit_s in (0, float("inf")):
        with pytest.raises(ConfigError, match=f"limit_s={limit_s}"):
            manager.on_abort(first, limit_s=limit_s)
    assert train(manager, steps=2) == 3
    names = [name for name, _ in calls]
    during = names[:2]
    manager.shutdown()
    assert during == ["first", "second"] and "MainThread" not in {thread for _, thread in calls[:2]}
    assert "first(), added by on_abort, has failed" in caplog.text


def note_hooks(manager: fft.ManagerFFT) -> list[str]:
    """Add a hook of each kind, in no particular order; return the list of the calls."""
    calls: list[str] = []
    for kind in ("on_leave", "health_check", "on_complete", "on_unwound", "on_join", "on_abort"):
        getattr(manager, kind)(partial(calls.append, kind))
    return calls


def test_hooks_run_in_the_order_of_an_attempt(tmp_path: Path) -> None:
    manager = manager_of_one(tmp_path)
    calls = note_hooks(manager)
    assert train(manager, steps=2) == 3
    attempt = ["on_join", "health_check"]
    assert calls == [*attempt, "on_abort", "on_unwound", *attempt, "on_complete"]
    manager.shutdown()
    assert "on_leave" not in calls


def test_manager_that_began_no_attempt_calls_no_hook(tmp_path: Path) -> None:
    manager = manager_of_one(tmp_path)
    calls = note_hooks(manager)
    manager.shutdown()
    assert calls == []


def test_hook_that_fails_makes_the_rank_leave_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of_one(tmp_path)

    def reset() -> None:
        raise OSError("busy")

    manager.on_unwound(reset)
    manager.on_leave(reset)
    calls = note_hooks(manager)
    with pytest.raises(HookFailed, match=r"its on_unwound .*reset\(\) failed: OSError: busy"):
        train(manager, steps=2)
    manager.shutdown()
    manager.shutdown()
    assert calls.count("health_check") == 1 and calls.count("on_leave") == 1
    assert "on_complete" not in calls and "reset(), added by on_leave, has failed" in caplog.text
    (note,) = read_lines(tmp_path, lambda line: line.get("note") == HOOK_FAILED)
    assert note["data"]["added_by"] == "on_unwound" and note["data"]["error"] == "OSError: busy"


def pair_of_gloo() -> list[Any]:
    """Return both ends of a gloo group of two ranks within this process."""
    store, limit = HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: ProcessGroupGloo(store, rank, 2, limit), range(2)))


def hang(traces: str) -> None:
    manager, ends = manager_of_one(Path(traces)), pair_of_gloo()

    def leave_library() -> None:  # as a library does whose shutdown is collective
        ends[0].barrier().wait()

    manager.on_abort(leave_library, limit_s=0.2)
    train(manager, steps=2)


@pytest.mark.multiprocess
def test_abort_that_hangs_is_named_and_ends_the_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Forked(hang, str(tmp_path / "traces"), log=log)
    assert process.wait(30) == -signal.SIGKILL
    assert "leave_library(), added by on_abort, did not return within 0.2 s" in log.read_text()
    (note,) = read_lines(tmp_path / "traces", lambda line: line.get("note") == HOOK_HANGS)
    assert note["data"] == {"hook": "hang.<locals>.leave_library()", "limit_s": 0.2}


def test_ready_made_aborts_refuse_unsupported_groups(tmp_path: Path) -> None:
    for missing in (fft.abort.transformer_engine, fft.abort.nvshmem):
        with pytest.raises(ConfigError, match="is not installed in this environment"):
            missing()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="of backend 'gloo', only groups of NCCL"):
            fft.abort.process_groups(dist.group.WORLD)
        fft.abort.process_groups()()
        dist.barrier()  # the abort has left the group of gloo alone
    finally:
        dist.destroy_process_group()


def write_script(script: Path) -> None:
    """Write a script of two groups, in which the second one turns out to be unhealthy."""
    script.write_text(
        "import os, torch, torchft, fft\n"
        "manager = fft.ManagerFFT(pg=torchft.ProcessGroupGloo(), load_state_dict=None,\n"
        "    state_dict=None, min_replica_size=1)\n"
        "mark, group, checked = os.environ['MARK'], manager.me.group, []\n"
        "def memory():\n"
        "    checked.append(group)\n"
        "    if group == '1' and os.path.exists(mark):\n"
        "        raise OSError('bad memory')\n"
        "manager.health_check(memory)\n"
        "model = torch.nn.Linear(1, 1)\n"
        "manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "manager.sync_gradients(model)\n"
        "for txn in manager.transactions([torch.ones(2, 1)] * 40, max_steps=8):\n"
        "    with txn:\n"
        "        model(txn.batch).mean().backward()\n"
        "        if group == '0' and txn.step == 3 and not os.path.exists(mark):\n"
        "            open(mark, 'w').close()\n"
        "            raise ValueError('once')\n"
        "print(group, 'checked', len(checked), flush=True)\n"
    )


@pytest.mark.multiprocess
def test_failed_health_check_excludes_the_rank_and_names_the_reason(tmp_path: Path) -> None:
    script, traces = tmp_path / "script.py", tmp_path / "run"
    write_script(script)
    done = run_fft(
        *("run", "--groups", "2", "--trace-dir", str(traces), str(script)),
        folder=tmp_path,
        env={"MARK": str(tmp_path / "mark")},
        within=120,
    )
    logs = {log.name: log.read_text() for log in (traces / "logs").iterdir()}
    # before it joined, and after each rollback: that of the error, and that of the other's leaving
    (checked,) = re.findall(r"^0 checked (\d+)$", logs["g0r0-1.log"], re.M)
    assert int(checked) >= 2
    why = "rank 1/0#1 leaves the job: its health check memory() failed: OSError: bad memory"
    assert why in logs["g1r0-1.log"]
    assert "HealthCheckFailed" in done.stdout + done.stderr
    (note, *_) = read_lines(traces, lambda line: line.get("note") == HOOK_FAILED)
    assert note["data"] == {
        "added_by": "health_check",
        "hook": "memory()",
        "error": "OSError: bad memory",
    }

"""Tests that a script without a launcher is its own job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchft import ProcessGroupGloo

import fft
from fft.errors import FftError, StepRetriesExceeded
from fft.trace.audit import audit_dir

EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp_char_lm.py"
SET_BY_LAUNCHERS = ("FFT_BUS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SET_BY_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def manager_of(**settings: Any) -> fft.ManagerFFT:
    return fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        **{"min_replica_size": 2, **settings},
    )


def train(manager: fft.ManagerFFT, fails: bool) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    manager.register(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    manager.sync_gradients(model)
    loader = fft.CursorLoader(torch.randn(64, 4), batch_size=4, seed=5)
    for txn in manager.transactions(loader, max_steps=4):
        with txn:
            if fails and txn.step == 1:
                raise ZeroDivisionError("to be debugged")
            model(txn.batch).square().mean().backward()
    return model


def test_single_process_trains_logs_it_and_leaves_no_resources(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(trace_dir=tmp_path)
    try:
        train(manager, fails=False)
        assert manager.current_step() == 4
        assert manager._parts.watchers.monitor is None, "a breakpoint would be taken for a hang"
        place = ("127.0.0.1", manager._store.port)
        socket.create_connection(place, 5).close()
    finally:
        manager.shutdown()
    (output,) = [r.getMessage() for r in caplog.records if "a job of one process" in r.getMessage()]
    assert "min_replica_size is 1, not 2" in output and "fft run" in output
    assert audit_dir(tmp_path).ok
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place, 5)


def test_error_of_the_body_is_raised_from_a_single_process() -> None:
    manager = manager_of()
    try:
        with pytest.raises(StepRetriesExceeded) as caught:
            train(manager, fails=True)
    finally:
        manager.shutdown()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("launched", ["RANK", "MASTER_ADDR", "WORLD_SIZE"])
def test_launched_process_without_a_bus_gets_an_error(
    monkeypatch: pytest.MonkeyPatch, launched: str
) -> None:
    monkeypatch.setenv(launched, "1")
    with pytest.raises(FftError, match="no bus: pass bus=, or set FFT_BUS"):
        manager_of()
    monkeypatch.delenv(launched)
    with pytest.raises(FftError, match="no bus: pass bus=, or set FFT_BUS"):
        manager_of(store_addr="127.0.0.1", store_port=1, rank=0, world_size=1)


def test_bus_without_launcher_variables_names_the_missing_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FFT_BUS", "memory://told")
    with pytest.raises(FftError, match="set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT or pass"):
        manager_of()
    with pytest.raises(FftError, match="set MASTER_ADDR or pass store_addr="):
        manager_of(store_port=1, rank=0, world_size=1)


def test_under_fft_run_the_script_cannot_choose_another_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor would restart it repeatedly, and see no live rank."""
    monkeypatch.setenv("FFT_BUS", "memory://served")
    monkeypatch.setenv("FFT_SUPERVISOR_FD", "9")
    with pytest.raises(FftError, match="bus='memory://mine', but `fft run` supervises this job on"):
        manager_of(bus="memory://mine")
    with pytest.raises(FftError, match="the rank or the store"):  # the same one may be named
        manager_of(bus="memory://served")


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_example_runs_by_plain_python() -> None:
    env = {name: value for name, value in os.environ.items() if name not in SET_BY_LAUNCHERS}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=200,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert "a job of one process" in done.stderr


def test_replica_group_id_names_the_group_without_replica_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REPLICA_GROUP_ID", "7")
    for given, expected in (({}, "7"), ({"replica_id": "mine"}, "mine")):
        manager = manager_of(**given)
        try:
            assert manager._parts.job.peer.group == expected
        finally:
            manager.shutdown()

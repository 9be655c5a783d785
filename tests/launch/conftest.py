"""Fixtures of the supervisor's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from supervisor_stage import Job, Stage, running

from fft.messages.fault_plans import FaultPlan


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    # its own directory, because the path of a Unix socket is limited to 107 bytes
    with tempfile.TemporaryDirectory() as directory:
        made = Stage(Path(directory))
        monkeypatch.setenv("STAGE", str(made.path))
        yield made
        made.close()


@pytest.fixture
def run_job(stage: Stage, tmp_path: Path) -> Callable[..., AbstractContextManager[Job]]:
    def start(plan: FaultPlan | None = None, **settings: Any) -> AbstractContextManager[Job]:
        return running(stage, tmp_path / "run", plan or FaultPlan(faults=[]), **settings)

    return start

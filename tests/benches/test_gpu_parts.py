"""Tests of the parts of `make gpu` without a GPU: their verdicts and their deadlines.

Replacements for NCCL groups behave as broken ones would.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from waiting import wait_until

from tests.acceptance.gpu import part, runner
from tests.acceptance.gpu.findings import Pen, read
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import costs, jobs, nccl_abort, nccl_pair, nccl_rebuild, nets

FAR_S = 600.0


class Ring:
    """A group of one rank. From the round ``stale`` on, a reduction returns the previous result."""

    def __init__(self, stale: int | None = None) -> None:
        self.stale = stale
        self.calls: list[str] = []
        self.kept: torch.Tensor | None = None

    def build(self, record: int) -> None:
        self.record, self.fresh = record, True
        self.calls.append("build")

    def reduce(self, tensor: torch.Tensor) -> Any:
        self.calls.append("reduce")
        if self.stale is not None and self.fresh:
            if self.record < self.stale or self.kept is None:
                self.kept = tensor.clone()
            tensor.copy_(self.kept)
        self.fresh = False
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: False)

    def abort(self) -> None:
        self.calls.append("abort")

    def quiet(self) -> None:
        self.calls.append("quiet")

    def close(self) -> None:
        self.calls.append("close")


def setting(folder: Path, seconds: float = FAR_S) -> Setting:
    return Setting("cpu", True, folder, time.monotonic() + seconds)


def rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ring: Ring, seconds: float = FAR_S
) -> dict[str, dict[str, Any]]:
    """Return the findings of part 6 with this ring, by name."""
    monkeypatch.setattr(nccl_rebuild, "RINGS", {"cpu": {"it": lambda *_: ring}})
    nccl_rebuild.run(Pen(tmp_path / "found", "nccl_rebuild"), setting(tmp_path, seconds))
    return {found["what"]: found for found in read(tmp_path / "found")}


def test_a_group_is_aborted_in_the_middle_and_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring()
    found = rebuilt(tmp_path, monkeypatch, ring)
    rounds = nccl_rebuild.WARM + 20
    assert ring.calls == ["build", "reduce", "reduce", "abort", "quiet"] * rounds + ["close"]
    assert found["by it: every group reduces"]["status"] == "ok"
    assert found["by it"]["in_flight"] == rounds, "how much was under way is told"


def test_a_reduction_that_brings_an_earlier_rounds_numbers_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rebuilt(tmp_path, monkeypatch, Ring(stale=5))
    assert found["by it: every group reduces"]["status"] == "failed"
    assert found["by it: every group reduces"]["right"] == 5
    values = {nccl_rebuild.value_of(n, rank) for n in range(300) for rank in range(8)}
    assert len(values) == 8 * 300, "no other round, and no other rank, has it"


def test_timeout_reports_the_stage_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by a second per round."""
    ring, now = Ring(), [time.monotonic()]
    build = ring.build

    def slow(record: int) -> None:
        now[0] += 1.0
        build(record)

    ring.build = slow  # type: ignore[method-assign]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(nccl_rebuild, "time", clock)
    monkeypatch.setattr(part, "time", clock)
    monkeypatch.setattr(nccl_rebuild, "RINGS", {"cpu": {"it": lambda *_: ring}})
    monkeypatch.setattr(nccl_rebuild, "TOLD_EVERY", 5)
    there = Setting("cpu", True, tmp_path, now[0] + 22.5)
    nccl_rebuild.run(Pen(tmp_path / "found", "nccl_rebuild"), there)
    found = {each["what"]: each for each in read(tmp_path / "found")}
    reached = found["by it: every group reduces"]
    assert (reached["status"], reached["groups"]) == ("ok", 23)
    assert reached["text"] == "the time was over after 23 rounds of 30"
    assert found["by it: so far"]["rounds"] == 20, "told before the end, too"


def test_too_few_rounds_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rebuilt(tmp_path, monkeypatch, Ring(), 0.0)
    assert found["by it: enough rounds to judge"]["status"] == "failed"


def test_ranks_that_hang_have_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first rank has used all of the time, the second is not waited for any longer."""
    waits: list[float] = []

    class Process(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            waits.append(-1.0 if timeout is None else timeout)
            return super().wait(timeout)

    monkeypatch.setattr(nccl_pair.subprocess, "Popen", Process)
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    logs, limit_s = [tmp_path / "0", tmp_path / "1"], 1.0
    assert nccl_pair.run_ranks([sleeps, sleeps], [{}, {}], logs, limit_s) == [None, None]
    assert 0 < waits[0] <= limit_s
    assert waits[1] == 0.0


def test_a_rank_that_hangs_hides_no_other(tmp_path: Path) -> None:
    ends = [sys.executable, "-c", "raise SystemExit(5)"]
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    logs = [tmp_path / "0", tmp_path / "1"]
    assert nccl_pair.run_ranks([sleeps, ends], [{}, {}], logs, 3.0) == [None, 5]


OK = {"status": "ok", "what": "it is freed", "text": ""}
REFUSED = "exit codes [1, 1]: ncclInvalidUsage: Duplicate GPU detected"


@pytest.mark.parametrize(
    ("connects", "tried", "status", "expected"),
    [
        (REFUSED, [], "skipped", "connects them in no way that is known"),
        ("exit codes [1, 1]: AttributeError", [], "failed", ""),
        ("not over after 15.0 s; exit codes [None, None]", [], "failed", ""),
        ("", [], "failed", ""),
        ("", [OK], "ok", ""),
        (
            "",
            [{"status": "not here", "what": "FSDP2", "text": "torch is older"}],
            "skipped",
            "FSDP2",
        ),
    ],
)
def test_two_ranks_that_have_tried_nothing_are_not_well(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    connects: str,
    tried: list[dict[str, Any]],
    status: str,
    expected: str,
) -> None:
    def ended(setting: Setting, way: str, trial: str, ring: str) -> nccl_pair.Ended:
        if trial == "connects":
            return nccl_pair.Ended([0, 0], [], connects, connects == REFUSED)
        return nccl_pair.Ended([0, 0], tried, "", False)

    monkeypatch.setattr(nccl_pair, "_run", ended)
    nccl_pair.run(Pen(tmp_path / "found", "nccl_pair"), setting(tmp_path))
    judged, why = runner._judge(0, FAR_S, read(tmp_path / "found"))
    assert judged == status
    assert expected in why


# --- how much of the device's work is in flight --------------------------------------------------


def test_how_long_the_device_is_busy_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device runs 3 million cycles per millisecond, and its kernels start with a delay."""
    asked: list[int] = []
    queued, now = [0.0], [0.0]

    def sleep(cycles: int) -> None:
        asked.append(cycles)
        queued[0] += 0.00001 + cycles / 3e9

    def synchronize() -> None:
        now[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(torch.cuda, "_sleep", sleep, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(nets, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    nets._cycles_per_ms.cache_clear()
    try:
        nets.keep_busy("cuda", 10.0)
        assert asked[-1] == pytest.approx(3e7, rel=0.01)
        measured = len(asked)
        nets.keep_busy("cuda", 2.0)
        assert len(asked) == measured + 1, "measured once"
        nets.keep_busy("cpu", 2.0)
        assert len(asked) == measured + 1
    finally:
        nets._cycles_per_ms.cache_clear()


@pytest.mark.parametrize(("in_flight", "status"), [([2, 1], "ok"), ([0, 0], "failed")])
def test_faults_that_meet_no_work_of_the_device_show_nothing(
    tmp_path: Path, in_flight: list[int], status: str
) -> None:
    words = [{"failed": 3, "in_flight": count} for count in in_flight]
    ended = jobs.Ended(0, "", words, 0, "")
    on_device = Setting("cuda", True, tmp_path, time.monotonic() + FAR_S)
    jobs.overlap(Pen(tmp_path / "found", "p"), on_device, "an exception", ended, True)
    (found,) = read(tmp_path / "found")
    assert found["status"] == status
    assert (found["failed"], found["in_flight"]) == (6, sum(in_flight))


# --- what an abort, and a pass over the parameters, take -----------------------------------------


def test_threads_of_an_abort_are_sampled_by_name_and_system_call() -> None:
    seen, (reads, writes) = Counter[str](), os.pipe()
    name = "named-thread"

    def wait() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        os.read(reads, 1)

    waiter = threading.Thread(target=wait)
    with nccl_abort.sampled(seen):
        waiter.start()
        wait_until(
            lambda: any(f"{name} in system call 0" in each for each in list(seen)),  # read(2)
            "the sampler sees it",
            FAR_S,
        )
        os.write(writes, b"x")
        waiter.join()
    os.close(reads)
    os.close(writes)


def test_passes_over_parameters_are_measured(tmp_path: Path) -> None:
    costs.run(Pen(tmp_path / "found", "costs"), setting(tmp_path))
    found = {each["what"]: each for each in read(tmp_path / "found")}
    assert {each["status"] for each in found.values()} == {"ok", "measured"}
    figures = found["passes (ms)"]
    assert figures["fingerprint of the parameters"] > 0
    assert figures["NaN pass: norm of the gradients"] > 0

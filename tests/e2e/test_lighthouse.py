"""Tests of torchft's lighthouse: beside a job, in charge of it, restarted, gone, and absent.

Every group is a separate process, without supervisor and monitor; so is the lighthouse.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from forked import Forked, as_main
from stage import aborts, epochs, notes, records
from waiting import wait_until
from way import Way

from fft.bus import serve_tcp
from fft.trace.audit import audit_dir

HERE = Path(__file__).parent
LIMIT_S = 200.0
QUICK_MS, DEFAULT_MS = 2000, 5000
"""Heartbeat timeouts; the second is torchft's default. Its 60 s for missing groups stay."""

pytestmark = pytest.mark.multiprocess


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A child, its output, and its end."""

    def __init__(self, *command: str, log: Path) -> None:
        env: dict[str, str | None] = {"FFT_MONITOR": "0", "OMP_NUM_THREADS": "1"}
        env |= {"TORCHFT_LIGHTHOUSE": None}
        self.log = log
        self.child = Forked(as_main, *command, env=env, log=log, talks=True)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.child.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def line(self) -> str:
        """Return the next line of its output."""
        line = self._lines.get(timeout=LIMIT_S)
        assert line is not None, self.log.read_text()[-3000:]
        return line

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Read its output until a line satisfies ``holds``."""
        while not holds(json.loads(self.line())):
            pass

    def at(self, step: int) -> None:
        """Wait until it has committed ``step`` steps."""
        self.until(lambda output: output.get("step", 0) >= step)

    def end(self) -> int:
        """Wait for its end, and return its exit code."""
        return self.child.wait(LIMIT_S)

    def kill(self) -> None:
        """Kill it."""
        self.child.end()
        self._reader.join(LIMIT_S)
        self.child.close()


class Lighthouse:
    """torchft's lighthouse at one port; it may be killed and started again there."""

    def __init__(self, log: Path, **options: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._options, self._log = {"min_replicas": 1, **options}, log
        self.process: Process | None = None

    def start(self) -> Lighthouse:
        """Start it, and wait until it listens."""
        script = str(HERE / "lighthouse_child.py")
        options = json.dumps(self._options)
        self.process = Process(script, str(self.port), options, log=self._log)
        assert int(self.process.line()) == self.port
        return self

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def status(self) -> str:
        """Return its dashboard."""
        with urllib.request.urlopen(f"{self.url}/status", timeout=LIMIT_S) as page:
            return str(page.read().decode())

    def press_kill(self, group: str) -> None:
        """Press the dashboard's button; the group's server never answers, because its process is
        gone."""
        (replica,) = set(re.findall(rf"/replica/({group}:[0-9a-f-]+)/kill", self.status()))
        request = urllib.request.Request(f"{self.url}/replica/{replica}/kill", method="POST")
        with suppress(OSError):
            urllib.request.urlopen(request, timeout=LIMIT_S).close()


class LighthouseJob:
    """Groups, a bus, and optionally a lighthouse."""

    def __init__(
        self, root: Path, groups: int, heartbeat_ms: int = QUICK_MS, **config: Any
    ) -> None:
        self.traces = root / "traces"
        self.traces.mkdir(parents=True)
        self._root, self._bus = root, serve_tcp()
        self.config = {**config, "groups": groups, "bus": self._bus.url, "traces": str(self.traces)}
        self.lighthouse = Lighthouse(root / "lighthouse.log", heartbeat_timeout_ms=heartbeat_ms)
        self.groups: dict[str, Process] = {}

    def start(self, lighthouse: bool = True) -> None:
        """Start the groups, with or without the address of the lighthouse."""
        if lighthouse:
            self.config["lighthouse"] = self.lighthouse.url
        (self._root / "config.json").write_text(json.dumps(self.config))
        for number in range(self.config["groups"]):
            script = [str(HERE / "lighthouse_worker.py"), str(self._root / "config.json")]
            group = str(number)
            log = self._root / f"g{group}.log"
            self.groups[group] = Process(*script, group, log=log)

    def stop(self) -> None:
        """Ask all groups to leave with the next commit."""
        for process in self.groups.values():
            process.child.signal(signal.SIGTERM)

    def ends(self, *groups: str) -> dict[str, dict[str, Any]]:
        """Return the final states of these groups, which must have ended well."""
        for group in groups:
            log = self.groups[group].log
            assert self.groups[group].end() == 0, log.read_text()[-3000:]
        return {g: json.loads((self.traces / f"end-{g}.json").read_text()) for g in groups}

    def audit(self) -> None:
        """Audit the job and check that there are no findings."""
        report = audit_dir(self.traces)
        assert report.ok, report.render()

    def close(self) -> None:
        """End all processes."""
        for process in self.groups.values():
            process.kill()
        self.lighthouse.kill()
        self._bus.close()


@contextmanager
def job(root: Path, groups: int, **config: Any) -> Iterator[LighthouseJob]:
    """Yield a job; all its processes are ended in any case."""
    made = LighthouseJob(root, groups, **config)
    try:
        yield made
    finally:
        made.close()


# --- the register decides -------------------------------------------------------------------------


def gaps_ms(traces: Path, since: float) -> tuple[float, float]:
    """Return the median of the gaps between commits of group 0, and the longest that ended after
    ``since``."""
    walls = [n["wall"] for n in notes(traces, "consumed") if n["group"] == "0"]
    gaps = [(b - a, b) for a, b in pairwise(walls)]
    longest = max(gap for gap, end in gaps if end > since)
    return statistics.median(gap for gap, _ in gaps) * 1e3, longest * 1e3


@pytest.mark.long
def test_lighthouse_killed_for_good_costs_no_bit_and_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is compared with a run without a lighthouse, which has no thread for it either."""
    with job(tmp_path / "without", 2, steps=150) as plain:
        plain.start(lighthouse=False)
        wanted = plain.ends("0", "1")
        plain.audit()
    with job(tmp_path / "killed", 2, steps=150) as killed:
        killed.lighthouse.start()
        killed.start()
        for process in killed.groups.values():
            process.at(10)
        at = time.time()
        killed.lighthouse.kill()
        found = killed.ends("0", "1")
        killed.audit()
        with capsys.disabled():
            median, longest = gaps_ms(killed.traces, at)
            print(f"\n  step {median:.0f} ms; longest after the kill {longest:.0f} ms")
        assert aborts(killed.traces) == [] and epochs(killed.traces) == 1
    for group in ("0", "1"):
        for what in ("steps", "weights", "parameters"):
            assert found[group][what] == wanted[group][what], what
        assert not any("torchft" in name for name in wanted[group]["native"])
        ours = {"fft-lighthouse", "fft-quorum"}
        assert not ours & {*wanted[group]["threads"]}
        assert ours & {*found[group]["threads"]} == {"fft-lighthouse"}, (
            "it tries to send heartbeats"
        )


@pytest.mark.long
def test_a_lighthouse_that_is_down_at_the_start_costs_a_warning(tmp_path: Path) -> None:
    with job(tmp_path, 2) as made:
        made.start()
        for process in made.groups.values():
            process.at(3)
            output = process.log.read_text()
            assert output.count("gets no heartbeats until it can be reached") == 1, output
        made.lighthouse.start()
        beats = re.compile(r"\b[01]:[0-9a-f-]{36}: seen")
        wait_until(lambda: len(set(beats.findall(made.lighthouse.status()))) == 2, "heartbeats")
        made.stop()
        made.ends("0", "1")
        assert aborts(made.traces) == []
        made.audit()


# --- the lighthouse has its say -------------------------------------------------------------------


def members(record: dict[str, Any]) -> list[str]:
    return [entry["group"] for entry in record["members"]]


@pytest.fixture(scope="module")
def ruled(tmp_path_factory: pytest.TempPathFactory) -> LighthouseJob:
    """The lighthouse starts late and is restarted; then some of the three groups are killed."""
    root = tmp_path_factory.mktemp("ruled")
    patient = {"heartbeat_ms": DEFAULT_MS, "quorum_timeout": 150, "lighthouse_window": 10.0}
    with job(root, 3, membership="lighthouse", **patient) as made:
        made.start()
        for process in made.groups.values():
            process.until(lambda output: "begun" in output)
        assert not records(made.traces)[1:], "nothing is committed without a quorum"
        made.lighthouse.start()
        last = made.groups["0"]
        last.at(10)
        made.lighthouse.kill()
        made.lighthouse.start()
        last.at(records(made.traces)[-1]["step"] + 10)
        assert [members(r) for r in records(made.traces) if r["members"]] == [["0", "1", "2"]]
        assert notes(made.traces, "lighthouse") == [], "who knows nobody makes no suspects"
        made.groups["2"].child.end()
        last.at(records(made.traces)[-1]["step"] + 10)
        made.lighthouse.press_kill("1")
        assert made.groups["1"].end() != 0, "torchft ends it in the middle of everything"
        last.at(records(made.traces)[-1]["step"] + 10)
        made.stop()
        made.ends("0")
    return made


@pytest.mark.long
def test_late_lighthouse_is_awaited_and_killed_groups_are_excluded(
    ruled: LighthouseJob,
) -> None:
    ruled.audit()
    formed = [members(r) for r in records(ruled.traces) if r["members"]]
    assert formed[0] == ["0", "1", "2"] and ["0", "1"] in formed and formed[-1] == ["0"]
    assert all(len(a) >= len(b) for a, b in pairwise(formed))


def test_group_missing_from_the_quorum_is_excluded(tmp_path: Path) -> None:
    """Group 2 is killed while the others are in no collective; only its heartbeats are missed."""
    config = {"membership": "lighthouse", "hold_at": 6, "dies_at": {"2": 6}, "steps": 12}
    with job(tmp_path, 3, **config) as made:
        made.lighthouse.start()
        made.start()
        ends = made.ends("0", "1")
        assert ends["0"]["parameters"] == ends["1"]["parameters"]
        made.audit()
        (cause,) = [r["cause"] for r in aborts(made.traces)]
        assert "2/0#1" in cause and "(seen by lighthouse)" in cause
        assert [members(r) for r in records(made.traces) if r["members"]][1:] == [["0", "1"]]


@pytest.mark.long
def test_group_cut_off_from_the_lighthouse_ends_and_others_continue(
    tmp_path: Path,
) -> None:
    """It is healthy and comes back each time, but each time later, and not for ever."""
    with job(tmp_path, 3, membership="lighthouse", max_body_failures=2) as made:
        made.lighthouse.start()
        way = Way(made.lighthouse.port)
        try:
            made.config["lighthouses"] = {"2": f"http://127.0.0.1:{way.port}"}
            made.start()
            made.groups["2"].at(3)
            way.close()
            assert made.groups["2"].end() == 1
            output = made.groups["2"].log.read_text()
            assert "NoLighthouseQuorum: torchft's lighthouse did not answer in 2 attempts" in output
        finally:
            way.close()
        made.groups["0"].at(records(made.traces)[-1]["step"] + 10)
        made.stop()
        made.ends("0", "1")
        made.audit()
        seen = [r["cause"] for r in aborts(made.traces) if "seen by lighthouse" in r["cause"]]
        assert len(seen) == 2 and all("2/0#1" in cause for cause in seen), seen


@pytest.mark.long
def test_without_a_quorum_the_step_fails_and_in_the_end_the_process(tmp_path: Path) -> None:
    config = {"membership": "lighthouse", "quorum_timeout": 2, "max_body_failures": 2}
    with job(tmp_path, 2, **config) as made:
        made.lighthouse.start()
        made.start()
        for process in made.groups.values():
            process.at(3)
        made.lighthouse.kill()
        begun = time.monotonic()
        for process in made.groups.values():
            assert process.end() == 1
            assert (
                "NoLighthouseQuorum: torchft's lighthouse did not answer" in process.log.read_text()
            )
        assert time.monotonic() - begun > 4, "two attempts, each as long as quorum_timeout"
        causes = [r["cause"] for r in records(made.traces) if r["kind"] == "abort"]
        assert any("no quorum of the lighthouse in 2 s" in cause for cause in causes), causes
        made.audit()


PLAN = """
faults:
  - {name: exception, kind: exception, step: 4, group: 1, rank: 1, phase: backward}
  - {name: one-rank, kind: kill, step: 8, group: 1, rank: 1, phase: backward}
"""


def run_job(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run 2 groups x 2 FSDP2 ranks under ``fft run``, with the lighthouse in charge."""
    (root / "plan.yaml").write_text(PLAN)
    command = [sys.executable, "-m", "fft.cli", "run", "--groups", "2", "--ranks", "2"]
    command += ["--faults", str(root / "plan.yaml"), "--trace-dir", str(root / "traces")]
    command += ["--stop-after-plan", "5", "--timeout", "220", *options]
    return subprocess.run(
        [*command, str(HERE / "kill_script.py"), "lighthouse"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 40,
        env=os.environ,
    )


@pytest.mark.long
def test_groups_of_several_ranks_ask_by_their_first_rank(tmp_path: Path) -> None:
    """Rank 1 of a group fails, then is killed; neither rank 0 nor the lighthouse noticed that."""
    done = run_job(tmp_path, "--lighthouse")
    assert done.returncode == 0, done.stdout + done.stderr
    traces = tmp_path / "traces"
    report = audit_dir(traces)
    assert report.ok, report.render()
    formed = [members(r) for r in records(traces) if r["members"]]
    assert formed == [["0", "1"], ["0", "1"], ["0"], ["0", "1"]]
    failed, killed = (r["cause"] for r in aborts(traces))
    assert "1/1#1" in failed and "1/1#1 died" in killed


@pytest.mark.long
def test_groups_of_several_ranks_need_the_lighthouse_too(tmp_path: Path) -> None:
    """This is the control of the test above: the groups do depend on the lighthouse."""
    done = run_job(tmp_path, "--no-lighthouse", "--max-restarts", "0")
    assert done.returncode != 0
    logs = "".join(path.read_text() for path in (tmp_path / "traces").glob("**/*.log"))
    assert "membership='lighthouse' needs torchft's lighthouse" in logs + done.stdout + done.stderr

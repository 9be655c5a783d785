"""Tests of a host that vanishes silently, or loses the bus: the others continue, and it comes back.

A "host" here is an `fft run --join` with everything that it has started, each in its own session.
All of it is stopped at once (SIGSTOP): no connection ends and no message is sent, which is what a
host without power or network looks like to the others. A host that is cut off from the bus reaches
it through a proxy that the test can interrupt.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from urllib.parse import urlsplit

import psutil
import pytest
from forked_run import FftRun, running
from stage import events, notes, records, slices
from waiting import wait_until
from way import Way

from fft.trace.audit import audit_dir

pytestmark = pytest.mark.timeout(600)
SCRIPT = Path(__file__).with_name("fault_script.py")
LIMIT_S = 500.0
LONG_S = 120.0
GOES_ON_S = 40.0
"""A time far above `host_limit`, for busy machines, and below the limits that otherwise end the
wait for a silent peer: the vote window and the process groups' own timeout, a minute each."""
MORE = 5


@contextmanager
def fft(folder: Path, *arguments: str, **env: str) -> Iterator[FftRun]:
    """Run a command of `fft`; it and all that it has started are ended when the block is left."""
    with running(*arguments, folder=folder, env=env) as process:
        limit = Timer(LIMIT_S, process.end)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            for one in everything(process):
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def everything(process: FftRun) -> list[psutil.Process]:
    """Return the process and everything that it has started, if it is alive."""
    try:
        top = psutil.Process(process.pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Host:
    """One `fft run --join` with one group."""

    def __init__(self, process: FftRun, traces: Path, group: int) -> None:
        self.process, self.traces, self.group = process, traces, group

    def committed(self, start: str = "1") -> int:
        """Return the steps that rank 0 of the group has committed since its first start, or since
        ``start``."""
        found = self.traces.glob(f"g{self.group}r0i{start}.jsonl")
        return sum(path.read_text().count('"consumed"') for path in found)

    def trains(self, steps: int, within: float = LONG_S) -> None:
        """Wait until it has committed ``steps`` more."""
        goal = self.committed() + steps
        wait_until(lambda: self.committed() >= goal, f"group {self.group} trains", within)

    def stop(self) -> list[psutil.Process]:
        """Stop all processes at once, as a loss of power would."""
        stopped = everything(self.process)
        for one in stopped:
            with suppress(psutil.NoSuchProcess):
                one.suspend()
        return stopped

    def end(self) -> None:
        """Drain it."""
        self.process.signal(signal.SIGTERM)
        assert self.process.wait(LONG_S) == 75, self.process.tail()


@contextmanager
def two_hosts(
    directory: Path,
    ranks: int,
    *more: str,
    second_bus: Callable[[str], str] = str,
    second: Sequence[str] = (),
    script: Sequence[str] = (),
) -> Iterator[tuple[Host, Host]]:
    """Start a job of two hosts, each with one group. ``more``: options of `fft run`.

    ``second_bus``: the address at which the second host finds the bus of the first. ``second``: its
    own options. ``script``: those of the script.
    """
    with fft(directory, "serve") as services:
        wait_until(lambda: "\n" in services.stdout_text, "where it serves", LONG_S)
        reach = dict(word.split("=", 1) for word in services.stdout_text.split())
        # a host that is killed as a whole leaves its temporary files
        reach["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "compiled")
        made = []
        hosts: list[FftRun] = []
        for group in (0, 1):
            if group == 1:
                reach["FFT_BUS"] = second_bus(reach["FFT_BUS"])
            traces = directory / f"host{group}"
            arguments = ["run", "--join", "--first-group", str(group), "--all-groups", "2"]
            arguments += ["--ranks", str(ranks), "--no-progress", "--trace-dir", str(traces)]
            arguments += [*more, *(second if group == 1 else ())]
            made.append(fft(directory, *arguments, str(SCRIPT), *script, **reach))
        with made[0] as first, made[1] as second:
            hosts = [first, second]
            found = [Host(p, directory / f"host{n}", n) for n, p in enumerate(hosts)]
            for host in found:
                host.trains(MORE, within=LIMIT_S)
            yield found[0], found[1]


def audited(directory: Path, *by_design: str) -> Path:
    """Put the traces of both hosts in one folder, and audit them; only these properties may be
    violated."""
    together = directory / "traces"
    together.mkdir()
    for path in directory.glob("host*/g*.jsonl"):
        shutil.copy(path, together)
    report = audit_dir(together)
    broken = {finding.name for finding in report.findings if finding.violation}
    assert broken <= set(by_design), report.render()
    return together


def assert_the_same_processes(traces: Path, ranks: int) -> None:
    """Check that no process was restarted."""
    expected = {f"g{group}r{rank}i1" for group in (0, 1) for rank in range(ranks)}
    assert {path.stem for path in traces.glob("g*.jsonl")} == expected


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.parametrize("vanishing", [0, 1])
def test_job_continues_without_a_vanished_host_until_the_host_returns(
    tmp_path: Path, vanishing: int
) -> None:
    """If group 0 vanishes, so does the store at which the process groups of the epoch have met."""
    with two_hosts(tmp_path, ranks=2) as hosts:
        gone, stays = hosts[vanishing], hosts[1 - vanishing]
        since = time.monotonic()
        stopped = gone.stop()
        stays.trains(MORE, within=GOES_ON_S)
        for one in stopped:
            one.resume()
        gone.trains(MORE)
        stays.trains(MORE)
        gone.end()
        stays.end()
    traces = audited(tmp_path)
    assert_the_same_processes(traces, ranks=2)
    suspicions = [line for line in events(stays.traces, "suspect") if line["rank"] == 0]
    suspects = [line["event"] for line in suspicions]
    assert {(s["group"], s["rank"]) for s in suspects} == {(str(vanishing), 0), (str(vanishing), 1)}
    assert all("nothing was heard from host" in s["cause"] for s in suspects)
    reported_at = suspicions[0]["mono"]
    commits = [
        line["mono"] for line in notes(stays.traces, "consumed") if line["mono"] > reported_at
    ]
    print(
        f"\ngroup {vanishing}: reported {reported_at - since:.2f} s after it had vanished, "
        f"the next commit {min(commits) - reported_at:.3f} s later; {suspects[0]['cause']}"
    )


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "least"),
    [
        ("killed", 1),
        pytest.param("killed", 2, marks=pytest.mark.long),
        pytest.param("stopped", 1, marks=pytest.mark.long),
    ],
)
def test_spares_of_another_host_take_over_the_group_of_a_lost_host(
    tmp_path: Path, how: str, least: int
) -> None:
    """A host that was only stopped is not admitted again when it resumes.

    If the job needs both groups, no epoch forms without the lost one, which is how the loss is
    detected.
    """
    script = [f"least={least}"]
    with two_hosts(tmp_path, 2, second=("--spares", "2"), script=script) as (gone, stays):
        ready = [stays.traces / "logs" / f"spare-{n}.log" for n in (1, 2)]
        wait_until(lambda: all(path.exists() for path in ready), "spares were started")
        since, lost = time.monotonic(), gone.stop()
        if how == "killed":
            for one in lost:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        taken = Host(stays.process, stays.traces, gone.group)
        wait_until(lambda: taken.committed("*") >= MORE, "the spares train", LONG_S)
        took = time.monotonic() - since
        if how == "stopped":
            for one in lost:
                one.resume()
            assert gone.process.wait(LONG_S) == 0, gone.process.tail()
            assert "group 0 was taken over by fft run with pid" in gone.process.stderr_text
            now = taken.committed("*")
            wait_until(lambda: taken.committed("*") >= now + MORE, "it is disturbed", LONG_S)
        stays.end()
        assert "group 0 was taken over: its host was lost" in stays.process.stderr_text
    traces = audited(tmp_path)
    names = {path.stem for path in traces.glob("g*.jsonl")}
    assert names == {"g0r0i1", "g0r1i1", "g1r0i1", "g1r1i1", "g0r0i2", "g0r1i2"}
    logs = stays.traces / "logs"
    assert (logs / "g0r0-1.log").exists() and not (logs / "g1r0-2.log").exists()
    cursor = max(record["cursor"] for record in records(traces))
    for consumed in slices(traces).values():
        assert len(consumed) == len(set(consumed)), "consumed twice"
        # a process that was killed or stopped after its vote has traced no commit
        assert len(set(range(cursor)) - set(consumed)) <= 1
    print(f"\n{how}: group 0 had committed {MORE} steps {took:.1f} s after its host was lost")


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_supervisor_that_is_stopped_alone_costs_nothing(tmp_path: Path) -> None:
    """Its beats stop, but its trainer votes."""
    with two_hosts(tmp_path, ranks=1) as (first, second):
        second.process.signal(signal.SIGSTOP)
        until = time.monotonic() + 12.0  # more than twice the limit: this is the silence itself
        while time.monotonic() < until:
            first.trains(1)
        second.process.signal(signal.SIGCONT)
        second.trains(MORE)
        second.end()
        first.end()
    traces = audited(tmp_path)
    assert events(traces, "suspect") == []
    assert_the_same_processes(traces, ranks=1)


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_false_alarm_is_cheap_and_changes_no_bit(tmp_path: Path) -> None:
    """With the supervisor stops the store at which its ranks vote, so no commit vouches for them
    until they give the store up after `connect_timeout`, 3 s in this script."""
    with two_hosts(tmp_path, 2, "--host-limit", "2") as (first, second):
        second.process.signal(signal.SIGSTOP)
        wait_until(lambda: events(first.traces, "suspect") != [], "it is suspected", LONG_S)
        first.trains(MORE, within=GOES_ON_S)
        second.process.signal(signal.SIGCONT)
        second.trains(MORE)
        first.trains(MORE)
        second.end()
        first.end()
    assert_the_same_processes(audited(tmp_path), ranks=2)


@pytest.mark.long
@pytest.mark.multiprocess
def test_only_the_partition_side_with_the_bus_continues(tmp_path: Path) -> None:
    """The other side's processes end in doubt, and that side returns when it can reach the bus
    again."""
    ways: list[Way] = []

    def by_a_way(url: str) -> str:
        port = urlsplit(url).port
        assert port is not None
        ways.append(Way(port))
        return url.replace(f":{port}/", f":{ways[0].port}/")

    try:
        with two_hosts(tmp_path, 1, "--max-restarts", "100", second_bus=by_a_way) as hosts:
            here, there = hosts
            ways[0].lose()
            here.trains(1, within=GOES_ON_S)
            stood = there.committed()
            here.trains(MORE)
            log = there.traces / "logs" / "g1r0-1.log"
            wait_until(lambda: "InDoubt" in log.read_text(), "it stops", LONG_S)
            assert there.committed() == stood, "it has committed what the others have not"
            here.trains(MORE)
            ways[0].find()
            wait_until(lambda: there.committed("[!1]*") > 0, "it is back", LONG_S)
            here.trains(MORE)
            there.end()
            here.end()
    finally:
        for way in ways:
            way.close()
    audited(tmp_path, "decided")  # it was stopped after it had voted

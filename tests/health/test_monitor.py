"""Tests of the monitor: its decision from readings alone, and the process beside a real trainer."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from fft.bus import open_bus, serve_tcp
from fft.health.death_mutex import supported
from fft.health.detectors.base import Level
from fft.health.detectors.trainer import Look, Monitor, MonitorConfig, Pulse, Reading
from fft.health.hosts import ROLL, beat_name
from fft.health.monitor import Charge, CoreWaits, MonitorError, MonitorProcess
from fft.messages.protocol import BusMessage, Death, Suspect, decode

LIMIT_S = 60.0
CHILD = Path(__file__).with_name("trainer_child.py")

LIMITS = MonitorConfig(max_s=2.0, grace_s=0.6, min_s=0.5, interval_s=0.05, term_s=0.2)

# --- the decision ---

AT_WORK = Reading(beat=10.0, moved=10.0, marked=10.0, begun=10.0, step=5, in_txn=True)


def watched(
    reading: Reading, until: float, monitor: Monitor | None = None, since: float = 10.0
) -> tuple[Monitor, Level]:
    """Return a monitor that saw only ``reading`` every 50 ms, and its verdict."""
    monitor = monitor or Monitor(LIMITS)
    for tick in range(round((until - since) * 20) + 1):
        monitor.observe(Look(since + tick / 20, reading))
    return monitor, monitor.verdict(until).level


def test_stalled_rank_becomes_suspect_and_then_is_given_up() -> None:
    assert watched(AT_WORK, 11.9)[1] is Level.GREEN
    assert watched(AT_WORK, 12.1)[1] is Level.YELLOW
    assert watched(AT_WORK, 12.7)[1] is Level.RED


def test_waiting_rank_is_judged_by_its_beats() -> None:
    waits = replace(AT_WORK, waiting=True)
    monitor = Monitor(LIMITS)
    for tick in range(200):  # ten seconds of beats
        now = 10.0 + tick / 20
        monitor.observe(Look(now, replace(waits, beat=now)))
        assert monitor.verdict(now).level is Level.GREEN
    last = replace(waits, beat=now)
    assert watched(last, now + 0.45, monitor, now)[1] is Level.GREEN
    monitor, level = watched(last, now + 0.55, monitor, now + 0.45)
    assert level is Level.YELLOW
    assert "whose main thread waits" in monitor.verdict(now + 0.6).reason


def test_leaving_rank_may_stand_still() -> None:
    assert watched(replace(AT_WORK, left=True), 100.0)[1] is Level.GREEN


def test_a_monitor_that_was_away_holds_nothing_against_the_trainer() -> None:
    monitor, _ = watched(AT_WORK, 10.5)
    monitor.observe(Look(1000.0, AT_WORK))
    assert monitor.verdict(1000.0).level is Level.GREEN
    assert watched(AT_WORK, 1001.3, monitor, 1000.0)[1] is Level.GREEN
    assert watched(AT_WORK, 1001.6, monitor, 1001.3)[1] is Level.YELLOW


def test_three_quarters_of_a_silence_are_excused_by_waits_for_a_core() -> None:
    """Without them the limit is two seconds. The kernel counts a wait when it ends."""
    for reading in (AT_WORK, replace(AT_WORK, waiting=True)):
        monitor, level = watched(reading, 11.8)
        assert level is Level.GREEN
        monitor.observe(Look(11.9, reading, starved=1.0))
        assert watched(reading, 12.9, monitor, 11.95)[1] is Level.GREEN
        assert watched(reading, 13.1, monitor, 12.95)[1] is Level.YELLOW
        monitor.observe(Look(13.15, reading, starved=1000.0))
        assert watched(reading, 17.9, monitor, 13.2)[1] is Level.GREEN
        assert watched(reading, 18.1, monitor, 17.95)[1] is Level.YELLOW


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs schedstat")
def test_wait_for_a_core_is_read_from_the_kernel() -> None:
    spin = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nwhile True: 0"
    rivals = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    idle = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert idle.stdin is not None and idle.stdout is not None
    try:
        busy, calm, waited = CoreWaits(rivals[0].pid), CoreWaits(idle.pid), [0.0]

        def has_waited() -> bool:
            waited[0] += busy.take(True)
            return waited[0] > 0.3

        wait_until(has_waited, "two processes on one core wait for each other", LIMIT_S)
        busy.take(False)
        assert busy.take(True) == 0.0, "a row of calls begins with 0"
        idle.stdout.readline()
        wait_until(lambda: calm.take(True) == calm.take(True) == 0.0, "it sleeps", LIMIT_S)
    finally:
        for process in (*rivals, idle):
            process.kill()
            process.wait()
        idle.stdin.close()
        idle.stdout.close()
    assert busy.take(True) == 0.0


def test_an_alarm_that_the_rollback_answers_doubles_the_threshold() -> None:
    """Three steps of 0.3 s give a threshold of 1.5 s; the fourth stalls for longer, twice."""
    monitor, reading = Monitor(replace(LIMITS, max_s=10.0)), AT_WORK
    for number in range(1, 4):
        now = 10.0 + 0.3 * number
        done = replace(reading, ended=now, took=0.3, commits=number, marked=now)
        reading = replace(done, begun=now, step=5 + number)
        watched(reading, now, monitor, now)
    limits = []
    for _ in range(2):
        began = now
        while monitor.verdict(now).level is Level.GREEN:
            now += 0.05
            monitor.observe(Look(now, reading))
        limits.append(now - began)
        reading = replace(reading, ended=now, begun=now + 0.01, marked=now + 0.01)
        now += 0.05
        watched(reading, now, monitor, now)
    assert limits == [pytest.approx(1.5, abs=0.1), pytest.approx(3.0, abs=0.1)]


def test_monitor_reports_a_rank_that_cannot_report_itself() -> None:
    """None of its threads has beaten since, so its engine cannot report it either."""
    for reading in (AT_WORK, replace(AT_WORK, waiting=True)):
        monitor, level = watched(reading, 11.9)
        assert level is Level.GREEN and not monitor.concerns_others(11.9)
        monitor, level = watched(reading, 12.1)
        assert level is Level.YELLOW and monitor.concerns_others(12.1)


def test_stopped_rank_is_suspected_until_it_continues() -> None:
    for reading in (
        replace(AT_WORK, in_txn=False),
        replace(AT_WORK, in_txn=False, waiting=True),
        replace(AT_WORK, atomic=True),
    ):
        monitor = Monitor(replace(LIMITS, max_s=600.0))
        monitor.observe(Look(10.0, replace(reading, beat=10.0)))
        for tick in range(100):
            now = 10.0 + tick / 20
            monitor.observe(Look(now, reading, stopped=now >= 12.0))
            level = monitor.verdict(now).level
            assert level is not Level.GREEN or now < 12.55
            if now < 12.45:
                assert level is Level.GREEN
        assert monitor.concerns_others(now)
        now += 0.05
        monitor.observe(Look(now, replace(reading, beat=now)))
        assert monitor.verdict(now).level is Level.GREEN and not monitor.concerns_others(now)


def test_hang_that_outlasts_its_own_rollback_is_reported_to_others() -> None:
    monitor = Monitor(LIMITS)
    reported = []
    for tick in range(60):
        now = 10.0 + tick / 20
        monitor.observe(Look(now, replace(AT_WORK, beat=now)))
        if monitor.concerns_others(now):
            reported.append(now)
    assert reported[0] == pytest.approx(10.0 + LIMITS.max_s + LIMITS.min_s, abs=0.1)
    back = replace(AT_WORK, beat=now, ended=now, begun=now, marked=now)
    monitor.observe(Look(now, back))
    assert not monitor.concerns_others(now)


def test_limits_that_cannot_be_kept_are_refused() -> None:
    for bad in ({"interval_s": 0.0}, {"term_s": -1.0}, {"max_s": 0.1}):
        with pytest.raises(ValueError, match="need"):
            MonitorConfig(**bad)


def test_a_charge_is_handed_over_whole() -> None:
    for supervisor in (None, 6):
        charge = Charge(3, 4, None, supervisor, 5, "1", 0, "tcp://h:1/j", LIMITS)
        assert Charge.from_json(charge.to_json()) == charge
    for text in ("", "[]", "{}", '{"config": {"max_s": -1}}', '{"config": 3}'):
        with pytest.raises(MonitorError, match="not by hand"):
            Charge.from_json(text)


def test_monitor_started_by_hand_prints_its_usage() -> None:
    for arguments in ([], ["x"]):
        command = [sys.executable, "-m", "fft.health.monitor", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 1
        assert "trainers" in done.stderr


# --- beside a real trainer ---


class Lines:
    """Lines from a pipe, each waited for within a bound; ``None`` at its end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def next(self) -> str | None:
        while b"\n" not in self._rest:
            assert select.select([self._fd], [], [], LIMIT_S)[0], f"no line; so far {self._rest!r}"
            if not (more := os.read(self._fd, 65536)):
                assert self._rest == b""
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def json(self) -> dict[str, Any]:
        line = self.next()
        assert line is not None
        found: dict[str, Any] = json.loads(line)
        return found


class Trainer:
    """The child, and the output of its monitor."""

    def __init__(self, process: subprocess.Popen[bytes], out: int) -> None:
        self.process = process
        self.lines = Lines(out)
        assert process.stdout is not None
        self._said = Lines(process.stdout.fileno())

    def go(self) -> float:
        """Let it begin its task; return the time at which it did."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        return self.said()

    def said(self) -> float:
        """Return the next time that it prints."""
        return float(self._said.next() or "nan")

    def verdict(self, since: float) -> dict[str, Any]:
        """Return the next verdict after ``since``; a busy machine may have caused earlier ones."""
        while (line := self.lines.json())["at"] <= since:
            assert line["level"] == "yellow"
        return line

    def ended_with(self) -> int:
        return self.process.wait(LIMIT_S)


@contextmanager
def trainer(mode: str, bus_url: str = "", supervisor: int | None = None) -> Iterator[Trainer]:
    out, into = os.pipe()
    own_end = [] if supervisor is None else [supervisor]
    process = subprocess.Popen(
        [sys.executable, str(CHILD), mode, str(into), bus_url, *map(str, own_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(into, *own_end),
    )
    os.close(into)
    try:
        child = Trainer(process, out)
        watching = child.lines.json()
        assert watching["type"] == "watching"
        assert watching["pid"] == process.pid
        yield child
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        os.close(out)


def expect(child: Trainer, level: str, since: float, mode: str) -> dict[str, Any]:
    """Check that the next verdict after ``since`` is this one; print its delay after ``since``."""
    line = child.verdict(since)
    print(f"{mode}: {level} {line['at'] - since:.2f} s after it began: {line['reason']}")
    assert (line["type"], line["level"]) == ("verdict", level)
    assert (line["group"], line["rank"], line["pid"]) == ("1", 2, child.process.pid)
    return line


def expect_death(child: Trainer, cause: str) -> None:
    line = child.lines.json()
    death = decode(json.dumps(line).encode())
    assert isinstance(death, Death)
    assert (death.group, death.rank, death.pid) == ("1", 2, child.process.pid)
    assert death.by == "monitor"
    assert death.cause.startswith(cause)
    assert child.lines.next() is None  # and the monitor has ended


@pytest.mark.parametrize(
    ("mode", "ended_by"),
    [
        ("stop", signal.SIGTERM),
        pytest.param("stop_in_a_wait", signal.SIGTERM, marks=pytest.mark.long),
        ("keep_the_lock", signal.SIGKILL),
        pytest.param("block", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_hang_is_noticed_and_ended(mode: str, ended_by: signal.Signals) -> None:
    with trainer(mode) as child:
        since = child.go()
        expect(child, "yellow", since, mode)
        expect(child, "red", since, mode)
        expect_death(child, f"{ended_by.name} by the monitor: ")
        assert child.ended_with() == -ended_by


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["stop_between_txns", "stop_in_an_atomic_section"])
def test_stopped_process_outside_a_txn_is_detected_as_inside(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_S", "600")
    with trainer(mode) as child:
        since = child.go()
        line = expect(child, "yellow", since, mode)
        assert line["reason"].startswith("no progress: the process has been stopped for")
        expect(child, "red", since, mode)
        expect_death(child, "SIGTERM by the monitor: ")
        assert child.ended_with() == -signal.SIGTERM


@pytest.mark.parametrize("mode", ["stop", "keep_the_lock"])
def test_supervisor_is_notified_of_a_rank_that_cannot_report_its_hang(mode: str) -> None:
    received, into = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with received, into, trainer(mode, supervisor=into.fileno()) as child:
        received.settimeout(LIMIT_S)
        since = child.go()
        word = decode(received.recv(65536))
        print(f"{mode}: told {time.monotonic() - since:.2f} s after it began")
        expect_word(child, word)
        assert child.verdict(since)["level"] == "yellow"


def test_hang_without_a_supervisor_is_broadcast_on_the_bus() -> None:
    with serve_tcp() as server, open_bus(server.url) as bus:
        received: queue.Queue[bytes] = queue.Queue()
        bus.subscribe(received.put, lambda error: received.put(str(error).encode()))
        with trainer("stop", server.url) as child:
            child.go()
            expect_word(child, decode(received.get(timeout=LIMIT_S)))
            assert isinstance(decode(received.get(timeout=LIMIT_S)), Death)


def expect_word(child: Trainer, word: BusMessage) -> None:
    assert isinstance(word, Suspect)
    assert (word.group, word.rank, word.pid) == ("1", 2, child.process.pid)
    assert (word.host, word.by) == (socket.gethostname(), "monitor")
    assert word.cause.startswith("no progress for")


def test_endless_loop_in_bytecode_is_detected() -> None:
    with trainer("spin") as child:
        line = expect(child, "yellow", child.go(), "spin")
        assert line["reason"].startswith("the interpreter runs")


def test_wait_for_a_child_process_that_does_nothing_is_a_hang() -> None:
    with trainer("wait_for_an_idle_child") as child:
        expect(child, "yellow", child.go(), "wait_for_an_idle_child")


@pytest.mark.parametrize(
    "mode",
    [
        "wait_then_stop",
        pytest.param("save_then_stop", marks=pytest.mark.long),
        pytest.param("compile_then_stop", marks=pytest.mark.long),
    ],
)
def test_declared_long_work_is_excused_and_a_later_hang_is_not(mode: str) -> None:
    """Cases: a wait longer than every limit; a critical section that keeps the lock for long; a
    child process that computes, such as a compiler."""
    with trainer(mode) as child:
        line = child.verdict(child.go())
        stopped = child.said()
        late = line["at"] - stopped
        print(f"{mode}: {line['level']} {late:.2f} s after the end of it: {line['reason']}")
        assert line["at"] > stopped
        assert line["level"] == "yellow"


def test_death_is_broadcast_on_the_bus() -> None:
    with serve_tcp() as server, open_bus(server.url) as bus:
        received: queue.Queue[bytes] = queue.Queue()
        bus.subscribe(received.put, lambda error: received.put(str(error).encode()))
        with trainer("die", server.url) as child:
            since = child.go()
            death = decode(received.get(timeout=LIMIT_S))
            print(f"die: heard on the bus {time.monotonic() - since:.3f} s after it")
            assert isinstance(death, Death)
            assert death.pid == child.process.pid
            expect_death(child, "ended without leaving the job")
            assert child.ended_with() == -signal.SIGKILL


@pytest.mark.skipif(not supported(), reason="no robust mutexes here")
def test_death_without_supervisor_is_broadcast_before_process_is_gone() -> None:
    with serve_tcp() as server, trainer("die_slowly", server.url) as child:
        child.go()
        expect_death(child, "ended without leaving the job")
        assert child.process.poll() is None


def test_leaving_rank_is_not_reported() -> None:
    with trainer("leave") as child:
        child.go()
        assert child.lines.next() is None
        assert child.ended_with() == 0


def test_monitor_without_a_supervisor_beats_until_its_trainer_leaves() -> None:
    with serve_tcp() as server, open_bus(server.url) as bus:
        with trainer("leave", server.url) as child:
            deadline = time.monotonic() + LIMIT_S
            while not (senders := json.loads(bus.read(ROLL) or b'{"senders":[]}')["senders"]):
                assert time.monotonic() < deadline, "it has not come to the roll"
                time.sleep(0.01)
            beat = json.loads(bus.read(beat_name(senders[0])) or b"{}")
            assert beat["processes"] == [["1", 2, child.process.pid]]
            child.go()
            assert child.lines.next() is None
        assert json.loads(bus.read(ROLL) or b"{}")["senders"] == []
        assert bus.read(beat_name(senders[0])) is None


def test_monitor_passes_lines_to_a_callback_until_closed() -> None:
    pulse, received = Pulse(time.monotonic), queue.Queue[dict[str, Any]]()
    config = replace(LIMITS, max_s=0.5, grace_s=3600.0)
    monitor = MonitorProcess(pulse, config, group="0", rank=0, on_line=received.put)
    try:
        assert received.get(timeout=LIMIT_S)["type"] == "watching"
        pulse.begin(4)  # without further beats this is a hang of 0.5 s
        verdict = received.get(timeout=LIMIT_S)
        assert (verdict["level"], verdict["step"], verdict["pid"]) == ("yellow", 4, os.getpid())
        assert "torch" not in _mapped(monitor.pid)
    finally:
        monitor.close()
        monitor.close()
        pulse.close()
    assert received.empty()
    assert not any(thread.name == "fft-monitor" for thread in threading.enumerate())
    with pytest.raises(ProcessLookupError):
        os.kill(monitor.pid, 0)


def _mapped(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_password_of_a_bus_is_in_no_command_line() -> None:
    pulse = Pulse(time.monotonic)
    url = "nats://somebody:secret@127.0.0.1:9/job"
    monitor = MonitorProcess(pulse, LIMITS, group="0", rank=0, bus_url=url)
    try:
        cmdline = Path(f"/proc/{monitor.pid}/cmdline")
        while not (line := cmdline.read_bytes()):  # between fork and exec; pytest bounds it
            time.sleep(0.001)
        assert b"fft.health.monitor" in line and b"secret" not in line
    finally:
        monitor.close()
        pulse.close()

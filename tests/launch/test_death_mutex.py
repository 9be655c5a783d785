"""Tests of the robust mutex between a trainer and its supervisor, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fft.health.death_mutex import DeathMutex, hold, supported
from fft.launch.supervisor.children import Child
from fft.launch.supervisor.script import Script

pytestmark = pytest.mark.skipif(not supported(), reason="no robust mutexes here")

LIMIT_S = 30.0
CHILD = """
import os, sys, threading
from fft.health.death_mutex import hold
mine = hold(os.environ["FFT_DEATH_MUTEX_FD"])
assert mine is not None
print("held", flush=True)
word = sys.stdin.readline().strip()
if word == "release":
    mine.release()
    print("released", flush=True)
    sys.stdin.readline()
elif word == "again":
    assert hold(os.environ["FFT_DEATH_MUTEX_FD"]) is None, "held already"
    mine.release()
    while (mine := hold(os.environ["FFT_DEATH_MUTEX_FD"])) is None:
        pass
    print("held again", flush=True)
    sys.stdin.readline()
elif word == "elsewhere":
    other = threading.Thread(target=mine.release)
    other.start()
    other.join()
    os._exit(0)
elif word == "leave":
    sys.exit(3)
elif word in ("fork", "fork and exit"):
    if os.fork() == 0:
        os._exit(0) if word == "fork" else sys.exit(0)  # which runs what atexit has
    os.wait()
    print("waited", flush=True)
    sys.stdin.readline()
"""


class Held:
    """A child that holds its mutex, and the observer that is notified of its death."""

    def __init__(self) -> None:
        self.line, self.died = DeathMutex(), threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "FFT_DEATH_MUTEX_FD": str(self.line.fd)},
            pass_fds=[self.line.fd],
            text=True,
        )
        self.line.watch(self.died.set)
        assert self.hears() == "held"

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.kill()
        self.process.wait(LIMIT_S)
        self.line.close()


@pytest.fixture
def child() -> Iterator[Held]:
    made = Held()
    try:
        yield made
    finally:
        made.end()
        assert not [t for t in threading.enumerate() if t.name == "fft-death-mutex"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_killed_child_is_reported(child: Held, number: signal.Signals) -> None:
    child.process.send_signal(number)
    assert child.died.wait(LIMIT_S)


@pytest.mark.parametrize("word", ["release", "leave"])
def test_an_end_in_good_order_is_no_death(child: Held, word: str) -> None:
    child.say(word)
    if word == "release":
        assert child.hears() == "released"
        child.process.kill()
    child.process.wait(LIMIT_S)
    child.line.close()
    assert not child.died.is_set()


@pytest.mark.parametrize(
    ("word", "answer"),
    [("again", "held again"), ("fork", "waited"), ("fork and exit", "waited")],
)
def test_death_is_reported_after_retaking_or_a_forks_end(
    child: Held, word: str, answer: str
) -> None:
    child.say(word)
    assert child.hears() == answer
    assert not child.died.is_set()
    child.process.kill()
    assert child.died.wait(LIMIT_S)


def test_death_mutex_is_not_released_by_another_thread(child: Held) -> None:
    child.say("elsewhere")
    assert child.died.wait(LIMIT_S), "it ended by os._exit without having left"


def test_child_that_never_holds_the_mutex_ends_silently() -> None:
    line, reported = DeathMutex(), threading.Event()
    line.watch(reported.set)
    line.close()
    assert not reported.is_set()
    assert not [t for t in threading.enumerate() if t.name == "fft-death-mutex"]


@pytest.mark.parametrize("setting", [None, "", "x", "99999", "0"])
def test_invalid_mutex_is_not_held(setting: str | None) -> None:
    assert hold(setting) is None


def test_a_child_that_is_reaped_keeps_no_descriptor(tmp_path: Path) -> None:
    """The supervisor may keep a reference to it, as a group does to a rank that was replaced."""
    script = tmp_path / "script.py"
    script.write_text(CHILD.replace("word = sys.stdin.readline().strip()", "word = 'leave'"))
    children: list[Child] = []
    for number in range(3):
        before = os.listdir("/proc/self/fd")
        log, reported = tmp_path / f"{number}.log", threading.Event()
        children.append(
            child := Child("0", number, 1, Script([str(script)]), dict(os.environ), log)
        )
        child.watch(reported.set)
        assert child.dies_within(LIMIT_S)
        assert child.reap() == 3, log.read_text()
        assert os.listdir("/proc/self/fd") == before

"""Tests of the detection of vanished hosts, from the times and beats of a judge's observations."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fft.health.detectors.base import Level
from fft.health.detectors.silence import BEATS, Beating, HostJudge, Looked

LIMIT = 5.0
PAUSE = LIMIT / BEATS
SHORTEST = 0.4 * LIMIT


@dataclass
class Watching:
    """A judge that observes hosts regularly; they beat equally often, unless they are held."""

    judge: HostJudge = field(default_factory=lambda: HostJudge(2 * PAUSE))
    now: float = 100.0
    numbers: dict[str, int] = field(default_factory=lambda: {"a": 1, "b": 1})
    held: set[str] = field(default_factory=set)
    """Hosts whose beats do not arrive."""
    steps: int | None = None
    rate: int = 0
    """Steps committed between two observations."""

    def look(self, after: float = PAUSE) -> list[str]:
        """Return the hosts that have vanished at the next observation."""
        self.now += after
        for host in self.numbers.keys() - self.held:
            self.numbers[host] += 1
        if self.steps is not None:
            self.steps += self.rate
        doubts = self.judge.doubts(self.now)
        found = {name: Beating(at, name, LIMIT) for name, at in self.numbers.items()}
        self.judge.observe(Looked(self.now, found, self.steps if doubts else None))
        return sorted(self.judge.vanished(self.now))

    def looks(self, seconds: float) -> list[str]:
        """Return the hosts that have vanished after ``seconds`` of observations."""
        found: list[str] = []
        for _ in range(round(seconds / PAUSE)):
            found = self.look()
        return found

    def until_vanished(self, look: float = PAUSE) -> float:
        """Return the time until the first host has vanished."""
        since = self.now
        while not self.look(look):
            assert self.now < since + 100
        return self.now - since


def settled(**fields: object) -> Watching:
    """Return a judge after ten seconds of regular beats."""
    watching = Watching(**fields)  # type: ignore[arg-type]
    assert watching.looks(10.0) == []
    return watching


def test_silent_host_vanishes_within_the_limit_and_the_others_do_not() -> None:
    watching = settled()
    watching.held = {"b"}
    assert SHORTEST <= watching.until_vanished() <= LIMIT
    assert watching.looks(10.0) == ["b"]
    reason = watching.judge.vanished(watching.now)["b"]
    assert reason.startswith("nothing was heard from host b for ")
    assert watching.judge.verdict(watching.now).level is Level.YELLOW


def test_unknown_host_is_not_missed_and_removed_host_is_forgotten() -> None:
    watching = settled(numbers={"a": 1})
    watching.numbers["b"] = 7
    watching.held = {"b"}
    assert watching.until_vanished() == pytest.approx(LIMIT, abs=2 * PAUSE)
    del watching.numbers["b"]
    assert watching.look() == []
    assert watching.judge.verdict(watching.now).level is Level.GREEN


def test_all_hosts_but_one_may_vanish_at_once() -> None:
    watching = settled(numbers=dict.fromkeys("abcdefgh", 1))
    watching.held = set("bcdefgh")
    watching.until_vanished()
    assert watching.look() == list("bcdefgh")


def test_new_beat_ends_the_suspicion_and_an_older_one_is_ignored() -> None:
    watching = settled()
    watching.held = {"b"}
    watching.until_vanished()
    watching.numbers["b"] -= 5
    assert watching.look() == ["b"], "somebody has put an old beat back"
    watching.numbers["b"] += 6
    assert watching.look() == []


def test_late_beats_raise_no_alarm_while_steps_are_committed() -> None:
    """The supervisor is busy or stopped; its trainers vote."""
    watching = settled(steps=10, rate=1)
    watching.held = {"b"}
    assert watching.looks(60.0) == []
    assert watching.judge.forgotten(watching.now) == set()
    assert watching.looks(10.0) == []
    assert watching.judge.forgotten(watching.now) == {"b"}


def test_single_commit_is_no_sign_of_life() -> None:
    watching = settled(steps=10)
    watching.held = {"b"}
    watching.looks(1.5)
    assert watching.steps is not None
    watching.steps += 1
    assert watching.until_vanished() <= LIMIT


def test_commits_before_the_beats_were_late_are_none_either() -> None:
    watching = settled(steps=10, rate=3)
    watching.held, watching.rate = {"b"}, 0
    assert watching.until_vanished() <= LIMIT


def test_observer_pause_is_not_counted_as_silence() -> None:
    """A bus elects a leader, or the observer was stopped; all hosts then start anew."""
    watching = settled()
    watching.looks(1.0)
    watching.held = {"a", "b"}
    watching.looks(1.5)
    assert watching.look(after=8.0) == []
    assert watching.looks(SHORTEST - PAUSE) == []
    assert watching.until_vanished() <= LIMIT


def test_late_observer_still_detects_a_vanished_host() -> None:
    watching = settled()
    for _ in range(20):
        assert watching.look(after=3 * PAUSE) == []
    watching.held = {"b"}
    assert watching.until_vanished(look=3 * PAUSE) <= 1.5 * LIMIT


def test_host_is_judged_by_its_own_limit() -> None:
    judge, now = HostJudge(2 * PAUSE), 0.0
    beats = {"quick": Beating(1, "quick", 2.0), "slow": Beating(1, "slow", 60.0)}
    vanished_at: dict[str, float] = {}
    while now < 70.0:
        judge.observe(Looked(now, beats))
        for host in judge.vanished(now):
            vanished_at.setdefault(host, now)
        now += PAUSE
    assert vanished_at["quick"] <= 2.0 + PAUSE and 59.0 < vanished_at["slow"] <= 60.0 + PAUSE


@given(
    pauses=st.lists(st.floats(0.0, 60.0), max_size=30),
    beats=st.lists(st.integers(0, 2), max_size=30),
)
def test_host_with_a_beat_at_every_look_has_not_vanished(
    pauses: list[float], beats: list[int]
) -> None:
    """This holds however irregular the observer is, and with at most two missed beats in a row."""
    watching = Watching()
    for pause in pauses:
        assert watching.look(after=pause) == []
    for missed in beats:
        for _ in range(missed):
            watching.held = {"b"}
            assert watching.look() == []
        watching.held = set()
        assert watching.look() == []

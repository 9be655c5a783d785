"""Detect that a peer, a host or a process has fallen silent, from the times of its heartbeats.
Pure.

The bound is ``factor`` times the longest of the last gaps between two heartbeats, between ``min_s``
and ``max_s``. The phi-accrual detector (Hayashibara et al., *The phi accrual failure detector*,
2004) is not used: it turns the silence into a probability under a normal distribution fitted to the
gaps. Gaps here are regular with rare long ones (a scheduler, a garbage collector, a lost packet),
so that distribution is too narrow until the first long gap is observed, and the levels in use,
10^-8 and less, are far beyond what a window of gaps can support. This detector keeps its idea: the
bound follows the gaps observed on this path. The longest gap is a number that a person can check in
a log, and a false alarm corrects itself, as its gap is in the window from then on.

An observer's own pause does not count against any peer (`fft.health.detectors.base.Attention`).

Judge which hosts of a job have vanished, from heartbeats that are read periodically. Pure.

A host that loses its power or its network sends nothing, closes no connection, and its own monitors
are gone as well. Other hosts must judge it by its silence. A sign of life is

- a heartbeat that was not there at the last look;
- *two commits* of the job since the heartbeats are late. A commit has the votes of all members, and
  a member that votes for the next step has seen the one before. So a host that has vanished can
  have voted for one more commit, never for two. A heartbeat that is late only because its sender is
  busy raises no alarm while the job trains. (If the job trains without that host, there is nothing
  to report.)

Time in which the observer itself was away does not count as silence: of the time between two of its
looks only a part counts (`Attention`). If it was away for long, or its bus did not answer, all
clocks restart when it is back, because others may need a while until their heartbeats come again.

Each host is judged by the limit that its own heartbeats name.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from fft.health.detectors.base import GREEN, Attention, Level, Verdict, counted, worst


@dataclass(frozen=True, slots=True)
class Seen:
    """A look at ``at``. ``beat``: time of the newest heartbeat known to the observer, or None.

    ``starved``: seconds since the last look in which the sender waited for a core.
    """

    at: float
    beat: float | None = None
    starved: float = 0.0


@dataclass(frozen=True, slots=True)
class SilenceConfig:
    """Limits, in seconds. Raises ValueError for limits that are inconsistent.

    Attributes:
        max_s: Maximum of the bound.
        grace_s: Time from yellow to red; None: silence alone is never beyond recovery.
        min_s: Minimum of the bound; before ``samples`` gaps are known the bound is ``max_s``.
        factor: Bound as a multiple of the longest gap.
        window: Number of gaps that are kept.
        samples: Number of gaps that must be known.
        look_s: Maximum time between two looks of the observer that counts.
    """

    max_s: float = 10.0
    grace_s: float | None = None
    min_s: float = 1.0
    factor: float = 3.0
    window: int = 64
    samples: int = 3
    look_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.min_s <= self.max_s < math.inf:
            raise ValueError(f"need 0 < min_s <= max_s, not {self.min_s:g} and {self.max_s:g}")
        if not (self.factor >= 1 and self.look_s > 0 and (self.grace_s or 0.0) >= 0):
            raise ValueError("need factor >= 1, look_s > 0 and grace_s None or >= 0")
        if not 1 <= self.samples <= self.window:
            raise ValueError(f"need 1 <= samples <= window, not {self.samples} and {self.window}")


class SilenceDetector:
    """A judge of one named sender. Green until its first beat, before which it is not missed."""

    def __init__(self, who: str, config: SilenceConfig | None = None) -> None:
        self.who = who
        self.config = config or SilenceConfig()
        self._attention = Attention(self.config.look_s)
        self._gaps: deque[float] = deque(maxlen=self.config.window)
        self._beat: float | None = None
        self._excused = self._starved = 0.0

    def observe(self, event: Seen) -> None:
        """Take one look, with or without a new heartbeat."""
        self._excused += self._attention.look(event.at)
        self._starved += event.starved
        if event.beat is None or (self._beat is not None and event.beat <= self._beat):
            return
        missed = self._attention.missed_since(event.beat)
        if self._beat is not None:
            # A beat that came while the observer was away may have had others before it.
            away = self._excused - missed
            self._gaps.append(max(0.0, event.beat - self._beat - away))
        self._beat, self._excused, self._starved = event.beat, missed, 0.0

    def bound(self) -> float:
        """Return the longest silence that is not suspect, in seconds."""
        config = self.config
        if len(self._gaps) < config.samples:
            return config.max_s
        return min(config.max_s, max(config.min_s, config.factor * max(self._gaps)))

    def silent(self, now: float) -> float:
        """Return the seconds of silence that count."""
        if self._beat is None:
            return 0.0
        silent = now - self._beat - self._excused - self._attention.late(now)
        return counted(silent, self._starved)

    def verdict(self, now: float) -> Verdict:
        """Return green, yellow beyond the bound, or red ``grace_s`` later if that is set."""
        silent, bound, grace = self.silent(now), self.bound(), self.config.grace_s
        if self._beat is None or silent < bound:
            return GREEN
        reason = f"nothing was heard from {self.who} for {silent:.2f} s ({self._explained(bound)})"
        if grace is None or silent < bound + grace:
            return Verdict(Level.YELLOW, reason)
        return Verdict(Level.RED, f"{reason}, and the {grace:g} s of grace are over")

    def _explained(self, bound: float) -> str:
        config = self.config
        if len(self._gaps) < config.samples:
            return f"the maximum is {bound:g} s; too few beats were heard for a shorter one"
        wanted = config.factor * max(self._gaps)
        source = f"{config.factor:g} × the longest of the last {len(self._gaps)} gaps"
        if wanted < config.min_s:
            return f"bound {bound:.2f} s, the minimum; {source} is only {wanted:.2g} s"
        if wanted > config.max_s:
            return f"bound {bound:.2f} s, the maximum; {source} is {wanted:.2f} s"
        return f"bound {bound:.2f} s = {source}"


# --- hosts ---

BEATS = 10
"""Heartbeats per limit."""
_LATE, _SHORTEST = 0.2, 0.4
"""Fractions of the limit: a longer silence is late; a shorter silence is never suspect, even if the
heartbeats are very regular."""
_FORGOTTEN = 12.0
"""Number of limits after which a sender without heartbeats is removed, alive or not."""
_AWAY = 2.0
"""Multiple of ``look_s`` by which a look must be late to count as one after a long absence."""
_PROOF = 2
"""Number of commits that are a sign of life of all members of the epoch."""


@dataclass(frozen=True, slots=True)
class Beating:
    """The observation of one host: its newest heartbeat's number, its name, its limit in
    seconds."""

    number: int
    name: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Looked:
    """A look of the observer that was finished at ``at``.

    ``hosts``: the observations by sender. ``steps``: number of committed steps, or None if the
    observer did not read it.
    """

    at: float
    hosts: Mapping[str, Beating]
    steps: int | None = None


class _Host:
    """One sender of heartbeats, and its observations."""

    def __init__(self, found: Beating, look_s: float) -> None:
        self.limit_s = found.limit_s
        config = SilenceConfig(self.limit_s, min_s=_SHORTEST * self.limit_s, look_s=look_s)
        self.silence = SilenceDetector(f"host {found.name}", config)
        self.beat_at = -math.inf
        self._newest = -1
        self._steps: int | None = None
        """Number of steps committed when its heartbeats were found to be late."""

    def see(self, at: float, number: int, again: bool, steps: int | None) -> None:
        """Take the number of a heartbeat; only a new one counts. ``again``: restart the clock."""
        beats = again or number > self._newest
        if beats:
            self.beat_at = at
        self._newest = max(self._newest, number)
        lives = beats or self._shown_by(steps)
        if lives:
            self._steps = None
        self.silence.observe(Seen(at, at if lives else None))

    def _shown_by(self, steps: int | None) -> bool:
        if steps is None:
            return False
        if self._steps is None:
            self._steps = steps
        return steps >= self._steps + _PROOF


class HostJudge:
    """A judge of all hosts that one observer looks at; a host never found is not missed."""

    def __init__(self, look_s: float = math.inf) -> None:
        """Begin without hosts. ``look_s``: maximum time between two looks that is no absence."""
        self._attention = Attention(look_s)
        self._hosts: dict[str, _Host] = {}

    def observe(self, event: Looked) -> None:
        """Take one look. A host that is missing from it is forgotten."""
        again = self._attention.look(event.at) > _AWAY * self._attention.look_s
        known, self._hosts = self._hosts, {}
        for sender, found in event.hosts.items():
            host = known.get(sender)
            if host is None or host.limit_s != found.limit_s:
                host = _Host(found, self._attention.look_s)
            host.see(event.at, found.number, again, event.steps)
            self._hosts[sender] = host

    def doubts(self, now: float) -> bool:
        """Whether the next look should include the number of committed steps: a host is late."""
        return any(host.silence.silent(now) > _LATE * host.limit_s for host in self._hosts.values())

    def vanished(self, now: float) -> dict[str, str]:
        """Return the senders of the vanished hosts, each with the reason."""
        verdicts = {sender: host.silence.verdict(now) for sender, host in self._hosts.items()}
        return {sender: v.reason for sender, v in verdicts.items() if v.level > Level.GREEN}

    def forgotten(self, now: float) -> set[str]:
        """Return the senders whose heartbeats are too overdue to look for them any longer."""
        return {
            sender
            for sender, host in self._hosts.items()
            if now - host.beat_at > _FORGOTTEN * host.limit_s
        }

    def verdict(self, now: float) -> Verdict:
        """Return yellow if any host has vanished, with the first reason; never red."""
        return worst([Verdict(Level.YELLOW, why) for why in self.vanished(now).values()] or [GREEN])

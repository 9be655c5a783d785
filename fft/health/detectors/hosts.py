"""Judge which hosts of a job have vanished, from heartbeats that are read periodically. Pure.

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
from collections.abc import Mapping
from dataclasses import dataclass

from fft.health.detectors.base import GREEN, Attention, Level, Verdict, worst
from fft.health.detectors.silence import Seen, SilenceConfig, SilenceDetector

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

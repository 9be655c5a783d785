"""Judges which hosts of a job have vanished, from beats that are looked up now and then. Pure.

A host that loses its power or its network sends nothing, ends no connection, and its own watchers
are gone with it. Others must judge it by its silence. A sign of life is

- a beat that was not there at the last look;
- *two commits* of the job since the beats are late. A commit has the votes of all members, and a
  member that votes for the next step has seen the one before. So a host that has vanished can have
  voted for one commit more, never for two. A beat that is late because its sender has no time for
  it raises no alarm while the job trains. (If the job trains without that host, there is nothing to
  report.)

Time in which the observer itself was away does not count as silence: of the time between two of its
looks only a part counts (`Attention`). If it was away for long, or its bus did not answer, all
clocks begin anew when it is back, because others may need a while until their beats come again.

Each host is judged by the limit that its own beats name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fft.health.detectors.base import GREEN, Attention, Level, Verdict, worst
from fft.health.detectors.silence import Seen, SilenceConfig, SilenceDetector

BEATS = 10
"""Beats in a limit."""
_LATE, _SHORTEST = 0.2, 0.4
"""Of the limit: so long a silence is late; none is suspect before, however regular the beats."""
_FORGOTTEN = 12.0
"""Limits after which whose beats do not come is struck off, alive or not."""
_AWAY = 2.0
"""Times ``look_s``: by so much too late a look is one after a long absence."""
_PROOF = 2
"""Commits that are a sign of life of everybody in the epoch."""


@dataclass(frozen=True, slots=True)
class Beating:
    """What was found of one host: the number of its newest beat, its name, its limit in seconds."""

    number: int
    name: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Looked:
    """The observer has looked, and was through with it at ``at``.

    ``hosts``: what it found, by sender. ``steps``: how many the job has committed; None: it did not
    look.
    """

    at: float
    hosts: Mapping[str, Beating]
    steps: int | None = None


class _Host:
    """One sender of beats, and what is known of it."""

    def __init__(self, found: Beating, look_s: float) -> None:
        self.limit_s = found.limit_s
        config = SilenceConfig(self.limit_s, min_s=_SHORTEST * self.limit_s, look_s=look_s)
        self.silence = SilenceDetector(f"host {found.name}", config)
        self.beat_at = -math.inf
        self._newest = -1
        self._steps: int | None = None
        """Committed when its beats were found to be late."""

    def see(self, at: float, number: int, again: bool, steps: int | None) -> None:
        """``number``: of the beat that was found; an old one is none. ``again``: begin anew."""
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
    """Judges all hosts that one observer looks at. Who was never found is not missed."""

    def __init__(self, look_s: float = math.inf) -> None:
        """``look_s``: the longest time between two looks that is no absence of the observer."""
        self._attention = Attention(look_s)
        self._hosts: dict[str, _Host] = {}

    def observe(self, event: Looked) -> None:
        """Take in a look. Who is not in it any more is forgotten."""
        again = self._attention.look(event.at) > _AWAY * self._attention.look_s
        known, self._hosts = self._hosts, {}
        for sender, found in event.hosts.items():
            host = known.get(sender)
            if host is None or host.limit_s != found.limit_s:
                host = _Host(found, self._attention.look_s)
            host.see(event.at, found.number, again, event.steps)
            self._hosts[sender] = host

    def doubts(self, now: float) -> bool:
        """Whether the next look should say how many steps are committed: somebody is late."""
        return any(host.silence.silent(now) > _LATE * host.limit_s for host in self._hosts.values())

    def vanished(self, now: float) -> dict[str, str]:
        """Who has vanished, by sender, each with the reason."""
        verdicts = {sender: host.silence.verdict(now) for sender, host in self._hosts.items()}
        return {sender: v.reason for sender, v in verdicts.items() if v.level > Level.GREEN}

    def forgotten(self, now: float) -> set[str]:
        """Whose beats have not come for so long that nobody should look for them any more."""
        return {
            sender
            for sender, host in self._hosts.items()
            if now - host.beat_at > _FORGOTTEN * host.limit_s
        }

    def verdict(self, now: float) -> Verdict:
        """Yellow if anybody has vanished, with the first reason; never red."""
        return worst([Verdict(Level.YELLOW, why) for why in self.vanished(now).values()] or [GREEN])

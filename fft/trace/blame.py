"""Find the ranks that the rollbacks since the last commit name. Pure: it only reads records.

An ABORT carries a cause as text, in which its proposer names itself first. A cause is evidence
against a rank if its own step function failed, or if others saw it end, hang or stay away. A cause
that reports only a failed collective or an expired wait accuses no rank: its author was only the
first to notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Place = tuple[str, int]
"""(group, rank): a place in the job, independent of the process that holds it."""

_KEPT = 64
_PEER = r"[^\s,]+/\d+#\d+"
_PEERS = rf"{_PEER}(?:, {_PEER})*"
_NAMED = (
    re.compile(rf"(?P<peers>{_PEERS}) (?:died|is suspected|hangs|left): "),
    re.compile(rf"not in the barrier in time: (?P<peers>{_PEERS})"),
    re.compile(rf"no word from (?P<peers>{_PEER}) that all are in the barrier"),
)
_NOBODY = re.compile(
    r"no decision in time|votes' manifests do not fit|gloo|nccl|process ?group|all-?reduce|"
    r"collective|connection|broken pipe|socket|timed? ?out|TxnAborted|GroupAborted|[Bb]us[A-Z]",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Rollback:
    """One ABORT. ``named`` holds the ranks that its cause is evidence against; it may be empty."""

    n: int
    step: int
    by: str
    cause: str
    named: frozenset[Place]


def place_text(place: Place) -> str:
    """Return the place in display form: ``GROUP/RANK``."""
    return f"{place[0]}/{place[1]}"


def rollback(n: int, step: int, by: str, cause: str) -> Rollback:
    """Read one ABORT record. ``by`` is its proposer as ``GROUP/RANK#INCARNATION``."""
    said = cause.removeprefix(f"{by}: ")
    return Rollback(n, step, by, cause, frozenset(_named(by, said)))


def _named(by: str, said: str) -> Iterable[Place]:
    for form in _NAMED:
        if found := form.match(said):
            return [_place(peer) for peer in found["peers"].split(", ")]
    # A participant's own "hangs: …" is evidence, regardless of the text that follows.
    if said.startswith("hangs: ") or not _NOBODY.search(said):
        return [_place(by)]
    return ()


def _place(peer: str) -> Place:
    group, _, rest = peer.rpartition("/")
    return group, int(rest.partition("#")[0])


@dataclass
class History:
    """The rollbacks since the last commit; records may arrive in any order and more than once."""

    _committed: int = -1
    _rollbacks: dict[int, Rollback] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> None:
        """Take one record of the head register, in trace form; anything else is ignored.

        An ABORT that the user requested by skipping the step is also ignored, because nothing
        failed.
        """
        n, kind, step = record.get("n"), record.get("kind"), record.get("step")
        if not isinstance(n, int) or not isinstance(step, int) or n <= self._committed:
            return
        if kind == "commit":
            self._committed = n
            self._rollbacks = {at: old for at, old in self._rollbacks.items() if at > n}
        elif kind == "abort" and not record.get("skip") and n not in self._rollbacks:
            by = record.get("by")
            who = (
                "{}/{}#{}".format(*by) if isinstance(by, list | tuple) and len(by) == 3 else "?/0#0"
            )
            found = rollback(n, step, who, str(record.get("cause", "")))
            odd = record.get("odd") or ()
            # Otherwise this would name the participant that counted the votes.
            if odd or record.get("diverged"):
                found = replace(found, named=frozenset((peer[0], peer[1]) for peer in odd))
            self._rollbacks[n] = found
            while len(self._rollbacks) > _KEPT:
                del self._rollbacks[min(self._rollbacks)]

    @property
    def run(self) -> list[Rollback]:
        """The rollbacks since the last commit, in order; all are attempts at the same step."""
        return [self._rollbacks[n] for n in sorted(self._rollbacks)]


def named_by_all(rollbacks: Iterable[Rollback], at_least: int) -> Place | None:
    """Return the one rank that all rollbacks name, if there are at least ``at_least``."""
    run = list(rollbacks)
    if len(run) < max(1, at_least):
        return None
    everywhere = frozenset.intersection(*(r.named for r in run))
    return next(iter(everywhere)) if len(everywhere) == 1 else None

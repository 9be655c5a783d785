"""Which ranks the rollbacks since the last commit name. Pure: fed with records, it only reads them.

An ABORT carries a cause as text, in which its proposer names itself first. A cause is evidence
against a rank if its own body failed, or if others saw it end, hang or stay away. A cause that says
only that a collective failed or that a wait was over accuses nobody: its author was only the first
to notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Place = tuple[str, int]
"""(group, rank): a place of the job, whichever process holds it."""

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
    """One ABORT. ``named``: against whom its cause is evidence; empty: nobody."""

    n: int
    step: int
    by: str
    cause: str
    named: frozenset[Place]


def place_text(place: Place) -> str:
    """As people write it: ``GROUP/RANK``."""
    return f"{place[0]}/{place[1]}"


def rollback(n: int, step: int, by: str, cause: str) -> Rollback:
    """An ABORT record read. ``by`` is its proposer as ``GROUP/RANK#INCARNATION``."""
    said = cause.removeprefix(f"{by}: ")
    return Rollback(n, step, by, cause, frozenset(_named(by, said)))


def _named(by: str, said: str) -> Iterable[Place]:
    for form in _NAMED:
        if found := form.match(said):
            return [_place(peer) for peer in found["peers"].split(", ")]
    # "hangs: …" of oneself is evidence whatever words follow it
    if said.startswith("hangs: ") or not _NOBODY.search(said):
        return [_place(by)]
    return ()


def _place(peer: str) -> Place:
    group, _, rest = peer.rpartition("/")
    return group, int(rest.partition("#")[0])


@dataclass
class History:
    """The rollbacks since the last commit, from records heard in any order, and more than once."""

    _committed: int = -1
    _rollbacks: dict[int, Rollback] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> None:
        """One record of the head register, as traces have it. What is none is passed over.

        So is an ABORT because the user skipped the step: nothing has failed.
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
            if odd or record.get("diverged"):  # else it would be who counted the votes
                found = replace(found, named=frozenset((peer[0], peer[1]) for peer in odd))
            self._rollbacks[n] = found
            while len(self._rollbacks) > _KEPT:
                del self._rollbacks[min(self._rollbacks)]

    @property
    def run(self) -> list[Rollback]:
        """The rollbacks since the last commit, in order; all are attempts at one step."""
        return [self._rollbacks[n] for n in sorted(self._rollbacks)]


def named_by_all(rollbacks: Iterable[Rollback], at_least: int) -> Place | None:
    """The one rank that every one of the rollbacks names, if there are ``at_least`` so many."""
    run = list(rollbacks)
    if len(run) < max(1, at_least):
        return None
    everywhere = frozenset.intersection(*(r.named for r in run))
    return next(iter(everywhere)) if len(everywhere) == 1 else None

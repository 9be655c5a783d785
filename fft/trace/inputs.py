"""What committed txns were computed on, by the notes of who drew it: none missing, none odd. Pure.

The header of a trace names the notes that its process owes for each txn that it applies and that it
counts in: ``consumed`` in FFT's own loop, and ``entry`` of a stage that takes what another gives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from fft.messages.effects import StartTxn
from fft.messages.protocol import Applied, ApplyFailed, Token
from fft.protocol.flow import has_left_well
from fft.protocol.invariants import Finding, Move
from fft.protocol.state import Local

CONSUMED = "consumed"
ENTRY = "entry"
MADE_ANEW = "entry_made_anew"


class _Told(NamedTuple):
    """A note, and where it stands."""

    name: str
    slice: int | None
    version: int | None
    """Of an entry."""
    token: Token
    place: str


class Runs:
    """Pairs (version, slice) in the order in which they came, as runs of equal strides."""

    def __init__(self) -> None:
        self._runs: list[list[int]] = []
        """Of each run: version and slice it begins with, their strides, and how many it has."""
        self._at = 0
        """The run that had what was looked for last."""

    def add(self, version: int, number: int) -> None:
        """The next pair; one that is there twice in a row counts once."""
        if self._runs:
            run = self._runs[-1]
            count = run[4]
            if (version, number) == _nth(run, count - 1):
                return
            if count == 1:
                run[2:4] = version - run[0], number - run[1]
            if (version, number) == _nth(run, count):
                run[4] += 1
                return
        self._runs.append([version, number, 0, 0, 1])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for run in self._runs:
            yield from (_nth(run, k) for k in range(run[4]))

    def __contains__(self, pair: tuple[int, int]) -> bool:
        for k in range(len(self._runs)):
            at = (self._at + k) % len(self._runs)
            if _has(self._runs[at], *pair):
                self._at = at
                return True
        return False


def _nth(run: list[int], k: int) -> tuple[int, int]:
    return run[0] + k * run[2], run[1] + k * run[3]


def _has(run: list[int], version: int, number: int) -> bool:
    stride, far = (run[2], version - run[0]) if run[2] else (run[3], number - run[1])
    k = far // stride if stride else 0
    return 0 <= k < run[4] and _nth(run, k) == (version, number)


class Given:
    """Entries of one scope: what it has given to the next one, and taken of the one before."""

    def __init__(self) -> None:
        self.offered: dict[str, list[Runs]] = {}
        """Group → of each of its processes, and of what they made anew."""
        self.taken: dict[tuple[str, str], Runs] = {}
        """(group, trace) → what the txns were computed on that it applied."""


class Inputs:
    """The notes of one process, with its moves, in the order of its trace.

    Args:
        finding: each txn has the notes that are owed for it, once, and of its slice; what is made
            anew is made with the weights of the job.
        given: gets what this process gives and takes.
        group, name: of the process, and of its trace.
    """

    def __init__(self, finding: Finding, given: Given, group: str, name: str) -> None:
        self._finding = finding
        self._group, self._name, self._given = group, name, given
        self._computed, self._anew = Runs(), Runs()
        given.offered.setdefault(group, []).extend((self._computed, self._anew))
        self._local: Local | None = None
        """After the last move."""
        self._plan: StartTxn | None = None
        self._told: list[_Told] = []

    def note(self, place: str, line: dict[str, Any]) -> None:
        """One note, and its place."""
        name, data = line["note"], line["data"]
        if name == MADE_ANEW:
            self._make_anew(data["slice"], data["version"], place)
        elif name in (CONSUMED, ENTRY):
            token = data["token"] if name == CONSUMED else (line["epoch"], line["txn"])
            self._told.append(_Told(name, data["slice"], data.get("version"), Token(*token), place))

    def move(self, move: Move, owed: Collection[str]) -> None:
        """One move. ``owed``: the notes that the header of the trace speaks of."""
        event, self._local = move.event, move.after
        if isinstance(event, Applied | ApplyFailed) and move.out.verdict == "row":
            self._judge(event.token, owed, move.place)
        for effect in move.out.effects:
            if isinstance(effect, StartTxn):
                self._plan = effect
                self._told = [t for t in self._told if t.token >= effect.token]
                if (number := effect.slice) is not None:
                    self._computed.add(effect.step, number)

    def _make_anew(self, number: int, version: int, place: str) -> None:
        local, state, is_right = self._local, "without the state of the job", False
        if local is not None and (local.healed or has_left_well(local)):
            state = f"at step {local.step}"
            is_right = version - local.step in (0, 1)  # 1: the engine is to hear of it yet
        text = (
            f"the entry of slice {number} was made anew with version {version}, by a rank {state}"
        )
        self._finding.expect(is_right, text, place)
        self._anew.add(version, number)

    def _judge(self, token: Token, owed: Collection[str], place: str) -> None:
        plan = self._plan
        if plan is None or plan.token != token or (number := plan.slice) is None:
            return
        for name in (name for name in (CONSUMED, ENTRY) if name in owed):
            told = [t for t in self._told if t.name == name and t.token == token]
            text = f"txn {token} took slice {number} here, and was committed; the trace has "
            is_once = len(told) == 1
            self._finding.expect(is_once, f"{text}{len(told)} notes {name!r} of it", place)
            for each in told:
                of = f"a note {name!r} of slice {each.slice}"
                self._finding.expect(each.slice == number, text + of, each.place)
                if each.version is not None:
                    at = (self._group, self._name)
                    self._given.taken.setdefault(at, Runs()).add(each.version, number)

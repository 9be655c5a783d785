"""Replay a trace through the shipped core: handle each event again and compare the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

from pydantic_core import ValidationError, to_json

from fft.messages.protocol import Event, Peer, UnreadableMessage, event_from_json
from fft.protocol.invariants import Finding, Move
from fft.protocol.participant import Participant
from fft.protocol.spec import FsmSpec
from fft.protocol.state import Config, Elsewhere
from fft.protocol.table import Table
from fft.trace.format import FORMAT, READABLE, cause_of, where
from fft.trace.older import OlderParticipant
from fft.trace.read import GAP, TraceFile

_OF_A_ROW = "from", "to", "roles", "on", "guards", "effects"
_HANDLED = {"transition", "fenced", "refused", "deferred"}


class Note(NamedTuple):
    """A line that is not an event of the protocol, and its place."""

    place: str
    line: dict[str, Any]


def participant_of(head: dict[str, Any]) -> Participant:
    """Return the participant that a header line describes.

    The spec in ``head`` is replaced by an equal object that all headers share.

    Raises:
        ValueError, KeyError, TypeError: The header is not one of this format.
    """
    if head.get("kind") != "header" or head["format"] not in READABLE:
        known = " or ".join(map(str, READABLE))
        raise ValueError(f"the first line is no header of trace format {known}")
    flow = tuple(_elsewhere(other) for other in head["config"].get("flow", ()))
    rules = tuple((kind, number) for kind, number in head["config"].get("rules", ()))
    me = Peer(*head["config"]["me"])
    values = {**head["config"], "me": me, "flow": flow, "rules": rules}
    table, head["spec"] = _shared(json.dumps(head["spec"]))
    return OlderParticipant(table, Config(**values))


@lru_cache(maxsize=4)
def _shared(spec: str) -> tuple[Table, dict[str, Any]]:
    """Return the table of a spec and the spec as plain data; cached for all ranks."""
    found = json.loads(spec)
    return Table(FsmSpec.model_validate(found)), found


def _elsewhere(told: dict[str, Any]) -> Elsewhere:
    return Elsewhere(**{**told, "groups": tuple(told["groups"])})


class Replay:
    """One trace file as moves and notes, in order; differences from the core go to the finding."""

    def __init__(self, file: TraceFile, finding: Finding) -> None:
        self.file, self._finding = file, finding
        self.head: dict[str, Any] = {}
        """Its first line, if that is a header of this format."""
        self.differs = False
        """Its moves end before the file does; the moves after that are unknown."""

    def run(self) -> Iterator[Move | Note]:
        """Yield the moves and notes of the whole file.

        After a difference only notes follow; after a gap nothing follows.
        """
        lines = self.file.lines()
        number, first = next(lines, (0, {}))
        if not first or first["kind"] == GAP:
            for _ in lines:  # read to the end, so that the chain is checked
                pass
            return
        name = self.file.path.name
        try:
            participant = participant_of(first)
        except (ValueError, KeyError, TypeError) as error:
            self._finding.expect(False, f"the header cannot be used: {error}", f"{name}:1")
            moves, self.differs = None, True
        else:
            self.head = first
            moves = _Events(self.file, participant, first)
        gap = False
        for number, line in lines:
            gap = gap or line["kind"] == GAP
            if moves is not None:
                move = self._move(moves, number, line)
                if isinstance(move, Move):
                    yield move
                if moves.is_over:
                    moves = None
            if line["kind"] == "note" and not gap:
                yield Note(f"{name}:{number}", line)
        if moves is not None and isinstance(move := self._move(moves, 0, _END), Move):
            yield move

    def _move(self, moves: _Events, number: int, line: dict[str, Any]) -> Move | None:
        try:
            done = moves.take(number, line)
        except (UnreadableMessage, ValidationError, KeyError, AssertionError) as error:
            text = f"the event after this line cannot be handled: {error!r}"
            self._finding.expect(False, text, f"{self.file.path.name}:{moves.last}")
            moves.is_over = self.differs = True
            return None
        if done is None:
            return None
        move, at, difference = done
        moves.last = at
        self._finding.expect(difference is None, difference or "", move.place)
        if difference is not None:
            moves.is_over = self.differs = True
            return None
        return move


_END: dict[str, Any] = {"kind": "end", "event": {}}


class _Events:
    """The events of a trace: the lines of each are collected until the next event begins."""

    def __init__(self, file: TraceFile, participant: Participant, header: dict[str, Any]) -> None:
        self._file, self._participant = file, participant
        self._coded = header["format"] == FORMAT
        """Lines about rows have codes of causes."""
        self._name, self._peer = file.path.name, participant.config.me
        self._local = participant.initial(**header["start"])
        self._told: list[tuple[int, dict[str, Any]]] = []
        self.last = 1
        """Line of the last event that was handled."""
        self.is_over = False

    def take(self, number: int, line: dict[str, Any]) -> tuple[Move, int, str | None] | None:
        """Return the move that ends before this line, its line, and the trace's difference."""
        if line["kind"] == "transition" and line["event"] is None:
            self._told.append((number, line))
            return None
        told, self._told = self._told, [(number, line)] if line["kind"] in _HANDLED else []
        self.is_over = line["kind"] in (GAP, "end")
        return self._handled(told, line) if told else None

    def _handled(
        self, told: list[tuple[int, dict[str, Any]]], line: dict[str, Any]
    ) -> tuple[Move, int, str | None] | None:
        first = told[0]
        event, at = _event_of(first[1]["event"]), first[1]["at"]
        before = self._local
        self._local, out = self._participant.handle(before, event, at)
        place = f"{self._name}:{first[0]}"
        move = Move(self._peer, before, event, self._local, out, place, first[1]["wall"])
        lines = [t[1] for t in told]
        if line["kind"] == "end" and _is_cut_off(lines, move):
            self._file.torn = True
            return None
        return move, first[0], _difference(lines, move, self._coded)


def _event_of(data: dict[str, Any]) -> Event:
    """Return the event; cached, since all ranks trace it. Raises UnreadableMessage."""
    try:
        text = to_json(data, inf_nan_mode="constants")
    except ValueError:  # a lone surrogate
        return event_from_json(data)
    return _parsed(text)


@lru_cache(maxsize=64)
def _parsed(text: bytes) -> Event:
    return event_from_json(text)


def _rows(lines: list[dict[str, Any]], move: Move) -> tuple[list[Any], list[Any]]:
    """Return the rows that an event took: those in its lines, and those by the table."""
    told = [tuple(map(line.get, _OF_A_ROW)) for line in lines]
    steps = move.out.steps
    return told, [(s.source, s.dest, list(s.roles), s.event, s.guards, s.effects) for s in steps]


def _is_cut_off(lines: list[dict[str, Any]], move: Move) -> bool:
    """Whether the process was killed while writing these lines, before carrying them out."""
    told, rows = _rows(lines, move)
    return len(told) < len(rows) and told == rows[: len(told)]


def _difference(lines: list[dict[str, Any]], move: Move, coded: bool) -> str | None:
    """Return how the lines differ from the core. ``coded``: their causes have codes."""
    if move.out.verdict != "row":
        is_told = {"kind": move.out.verdict, **where(move.before), "reason": move.out.reason}
        return _unlike(lines[0], is_told)
    told_rows, is_rows = _rows(lines, move)
    if told_rows != is_rows:
        odd = next(i for i, (a, b) in enumerate(zip_longest(told_rows, is_rows)) if a != b)
        return f"the trace has {told_rows[odd:]}, the table takes {is_rows[odd:]}"
    after = {**where(move.after), **cause_of(move.after)}
    if not coded:
        del after["code"]
    return next(filter(None, (_unlike(line, after) for line in lines)), None)


def _unlike(line: dict[str, Any], core: dict[str, Any]) -> str | None:
    if all(line.get(name) == value for name, value in core.items()):
        return None
    odd = [name for name, value in core.items() if line.get(name) != value]
    told, is_so = ({name: what.get(name) for name in odd} for what in (line, core))
    return f"the trace has {told}, the core {is_so}"

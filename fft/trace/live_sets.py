"""Decide whether the live sets of one execution are valid, by a formal definition. Pure.

The definition is that of JAX's live_devices document, section "Formal Semantics". Every process
performs events one after another: it **starts**, it **enters** the barrier (sends its request), it
**leaves** it with a set of members (receives the reply), it **fails**. From its start, or its
restart, to its failure a process is alive, and otherwise dead; it is in the barrier from entering
to leaving or failing. An execution is **valid** if failures can be moved, earlier or later, though
never past another event of the same process, such that for every leave with a set ``P`` there is an
instant at which every process of ``P`` is in the barrier and every other process is dead. One
placement of the failures serves all instants.

Where the document leaves room, this module reads it as follows:

- The instant of an answer lies in the stay that got it (the document builds on linearizability); so
  a process that is given a set is in that set.
- "The same set to every process" is part of the verdict: at the instant of an answer each member is
  in a stay that ends with the same answer, or with none because the process failed.
- A failure without a start before it means that the process was dead from the beginning.
- A process without a failure is alive to the end of the execution, as a diagram shows it.
- Time is an order of events and nothing more. ``timed`` takes it from a clock that all share; other
  orders, such as that of messages, are given as pairs. Events that no order separates may be put
  either way.
- An ``act`` is any other event; failures are not moved past it.
- Barriers may have names. Stays in different ones never meet.

**Decision procedure.** Put all events in some linear order that agrees with the given one: its
prefixes are cuts, and each answer asks for a cut at which every process, looked at by itself, is
where it should be. Such a conjunction has a least cut above any given cut. It is found by advancing
each process that is not where it should be, and then the processes that its events wait for (Garg
and Waldecker's detection of weak conjunctive predicates). An execution is valid if cuts for all
answers can be chosen that form one chain, because the cuts of a chain are the prefixes of one
order. So, from the cut reached, take the least cut of each process's next answer. If one lies below
all others, taking it costs nothing, since every chain that goes on from here can be given it first.
If not, each of the minimal ones is tried. With n processes and m events an instant costs O(n * (m +
n)); k answers that follow each other cost O(k) times that. The search branches only for answers
whose order is open and matters (for example if their sets are disjoint, and failures could fall on
either side). The worst case is therefore exponential in the number of those at one time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fft.errors import FftError

Kind = Literal["start", "enter", "leave", "fail", "act"]
Mark = tuple[str, int]
"""(process, index of one of its events)"""


class ExecutionError(FftError):
    """The given events are not an execution: their order is circular or impossible."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of one process."""

    kind: Kind
    barrier: str = ""
    """For an enter: the name of the barrier, if there are several."""
    members: frozenset[str] = frozenset()
    """For a leave: the set that was given."""
    place: str = ""
    """Where the event stands in its source, for messages."""


@dataclass(frozen=True, slots=True)
class Execution:
    """Events of every process in its own order, and the known order between processes.

    A pair that names a failure keeps the failure from moving to the wrong side; the document has no
    such pairs.
    """

    lines: Mapping[str, tuple[Event, ...]]
    before: frozenset[tuple[Mark, Mark]] = frozenset()


@dataclass(frozen=True, slots=True)
class Instant:
    """A point of the order at which ``members`` were in ``barrier`` and all others were dead."""

    members: frozenset[str]
    barrier: str = ""


@dataclass(frozen=True, slots=True)
class LiveSetVerdict:
    """A verdict with the witness ``order`` of a valid execution, or the ``reason`` against it."""

    valid: bool
    order: tuple[Mark | Instant, ...] = ()
    reason: str = ""
    answers: int = 0
    """Number of leaves that were judged."""

    @property
    def instants(self) -> tuple[Instant, ...]:
        """The instants of the witness, in order."""
        return tuple(x for x in self.order if isinstance(x, Instant))


def timed(
    lines: Mapping[str, Sequence[tuple[float, Event]]], failures_move: bool = True
) -> Execution:
    """Build an execution from events timed by one shared clock; equal times are not ordered.

    ``failures_move=False`` selects the document's first, simple definition: failures stay in place.
    """
    marks = sorted(
        (at, name, i)
        for name, line in lines.items()
        for i, (at, event) in enumerate(line)
        if not (failures_move and event.kind == "fail")
    )
    before: set[tuple[Mark, Mark]] = set()
    latest: dict[str, int] = {}
    same: list[Mark] = []
    for n, (at, name, i) in enumerate(marks):
        if n and at > marks[n - 1][0]:
            latest.update(same)
            same = []
        before.update(((q, j), (name, i)) for q, j in latest.items() if q != name)
        same.append((name, i))
    return Execution({q: tuple(e for _, e in line) for q, line in lines.items()}, frozenset(before))


# --- the model ------------------------------------------------------------------------------------

Cut = tuple[int, ...]
"""The number of events of each process that have happened."""


@dataclass(frozen=True, slots=True)
class _Stay:
    """One stay of a process in the barrier; ``members`` is None if it got no answer."""

    process: str
    entered: int
    barrier: str
    members: frozenset[str] | None

    def __str__(self) -> str:
        where = f" in {self.barrier}" if self.barrier else ""
        return f"{self.process} was given {_names(self.members or ())}{where}"


_Where = _Stay | Literal["dead", "out"]


@dataclass(frozen=True, slots=True)
class _Stuck:
    """``stay`` has no instant: ``process`` cannot be where it should be from ``bound`` on."""

    stay: _Stay
    process: int
    bound: int
    cause: Mark | None


def _names(names: Iterable[str]) -> str:
    return "{" + ", ".join(sorted(names)) + "}"


def _whereabouts(name: str, line: Sequence[Event]) -> list[_Where]:
    """Return where the process is at first and after each event. Raises ``ExecutionError``."""
    found: list[_Where] = ["dead"]
    for i, event in enumerate(line):
        now, inside = found[-1], isinstance(found[-1], _Stay)
        match event.kind:
            case "start" if now == "dead":
                found.append("out")
            case "fail" if now != "dead" or i == 0:
                found.append("dead")
            case "enter" if now == "out":
                later = (line[k] for k in range(i + 1, len(line)))
                end = next((e for e in later if e.kind in ("leave", "fail")), event)
                answer = end.members if end.kind == "leave" else None
                found.append(_Stay(name, i, event.barrier, answer))
            case "leave" if inside:
                found.append("out")
            case "act" if now != "dead":
                found.append(now)
            case _:
                state = "in the barrier" if inside else now
                raise ExecutionError(
                    f"process {name}, {event.place or f'event {i + 1}'}: {event.kind} while it is "
                    f"{state}; "
                    "each life is: start, any number of enter and leave, fail"
                )
    return found


Sources = Mapping[tuple[int, int], list[tuple[int, int]]]
"""(process, index) → the events that must have happened before it, besides its own past."""


def vectors(lengths: Sequence[int], sources: Sources) -> list[list[Cut]]:
    """Return, for every event, the least cut that contains it.

    The result for a process is shorter than its events if the order is circular.
    """
    found: list[list[Cut]] = [[] for _ in lengths]
    progress = True
    while progress:
        progress = False
        for p, length in enumerate(lengths):
            while (i := len(found[p])) < length:
                below = sources.get((p, i), [])
                if any(len(found[q]) <= j for q, j in below):
                    break
                past = [found[q][j] for q, j in below] + found[p][-1:]
                least = [max(column) for column in zip(*past, strict=True)] or [0] * len(lengths)
                least[p] = i + 1
                found[p].append(tuple(least))
                progress = True
    return found


class _Model:
    """An execution, prepared for questions about cuts."""

    def __init__(self, execution: Execution) -> None:
        self.names = sorted(execution.lines)
        self.lines = [execution.lines[name] for name in self.names]
        self.where = [_whereabouts(*x) for x in zip(self.names, self.lines, strict=True)]
        self._check_members()
        self.need = self._needs(execution.before)
        self.lasts = [
            {at: k for k, at in enumerate(line) if isinstance(at, _Stay)} for line in self.where
        ]
        """For each process: its stays, in order, and the last index of each in ``where``."""
        self._inside: dict[tuple[str, str], list[_Stay]] = defaultdict(list)
        """Process and barrier → its stays there, in order."""
        for stay in (x for lasts in self.lasts for x in lasts):
            self._inside[stay.process, stay.barrier].append(stay)

    @cached_property
    def stays(self) -> list[list[_Stay]]:
        """Stays that got an answer, by process, in order."""
        return [[x for x in lasts if x.members is not None] for lasts in self.lasts]

    def meeting(self, name: str, stay: _Stay) -> list[_Stay]:
        """Return the stays of process ``name`` that can share the instant of ``stay``, in order."""
        return [x for x in self._inside[name, stay.barrier] if self.meet(x, stay)]

    def _check_members(self) -> None:
        for name, line in zip(self.names, self.lines, strict=True):
            for event in line:
                if strangers := event.members - set(self.names):
                    raise ExecutionError(
                        f"process {name} was given {_names(strangers)}, which has no line; "
                        "a process that never ran needs an empty one"
                    )

    def _needs(self, before: Iterable[tuple[Mark, Mark]]) -> list[list[Cut]]:
        """Return every event's least cut that contains it. Raises ``ExecutionError`` on a cycle."""
        index = {name: p for p, name in enumerate(self.names)}
        sources: Sources = defaultdict(list)
        for (q, j), (name, i) in before:
            sources[index[name], i].append((index[q], j))
        need = vectors([len(line) for line in self.lines], sources)
        held = [self.event((p, len(n))) for p, n in enumerate(need) if len(n) < len(self.lines[p])]
        if held:
            raise ExecutionError(f"the order is circular; none can be first of: {', '.join(held)}")
        return need

    def event(self, mark: tuple[int, int]) -> str:
        """Describe an event."""
        p, i = mark
        event = self.lines[p][i]
        return f"{self.names[p]}'s {event.kind} ({event.place or f'event {i + 1}'})"

    def fits(self, stay: _Stay, p: int, k: int) -> bool:
        """Whether process ``p``, after ``k`` events, is where the answer of ``stay`` needs it."""
        name, at = self.names[p], self.where[p][k]
        if name == stay.process:
            return at == stay and name in (stay.members or ())
        if name in (stay.members or ()):
            return isinstance(at, _Stay) and self.meet(at, stay)
        return at == "dead"

    @staticmethod
    def meet(one: _Stay, stay: _Stay) -> bool:
        """Whether ``one`` can share the instant of the answer of ``stay``."""
        return one.barrier == stay.barrier and one.members in (None, stay.members)

    def asks(self, stay: _Stay) -> tuple[object, ...]:
        """Return a key that is equal for stays that require the same of a cut."""
        members = stay.members or frozenset()
        one_each = all(len(self.meeting(name, stay)) == 1 for name in members)
        plain = one_each and stay.process in members
        return (stay.barrier, members) if plain else (stay,)

    def least(self, above: Cut, stay: _Stay) -> Cut | _Stuck:
        """Return the least cut from ``above`` on that is an instant of the answer of ``stay``."""
        cut, cause = list(above), [None] * len(above)  # type: list[int], list[Mark | None]
        todo = list(range(len(cut)))
        while todo:
            p = todo.pop()
            places = range(cut[p], len(self.where[p]))
            k = next((k for k in places if self.fits(stay, p, k)), None)
            if k is None:
                return _Stuck(stay, p, cut[p], cause[p])
            cut[p] = k
            for q, bound in enumerate(self.need[p][k - 1] if k else ()):
                if bound > cut[q]:
                    cut[q], cause[q] = bound, (self.names[p], k - 1)
                    todo.append(q)
        return tuple(cut)

    def explain(self, stuck: _Stuck) -> str:
        """Explain why there is no instant."""
        stay, p = stuck.stay, stuck.process
        name = self.names[p]
        if name == stay.process and name not in (stay.members or ()):
            return f"{stay}, which leaves out {name} itself"
        inside = name in (stay.members or ())
        want = "in the barrier with that answer or none" if inside else "dead"
        fitting = [k for k in range(len(self.where[p])) if self.fits(stay, p, k)]
        if not fitting:  # This process is a member: any other process was dead at the beginning.
            given = [_names(s.members or ()) for s in self.stays[p] if s.barrier == stay.barrier]
            other = f"; it was given {', '.join(given[:3])}" if given else ""
            return f"{stay}, but {name} is never {want}{other}"
        end = self.event((p, fitting[-1]))
        at = stuck.cause and self.event((self.names.index(stuck.cause[0]), stuck.cause[1]))
        return f"{stay}, but {name} is {want} only until {end}, which comes before " + (
            at or "the instant just taken"
        )


# --- the decision ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Path:
    """The cuts taken so far, as a linked list from the newest one."""

    cut: Cut
    stay: _Stay
    rest: _Path | None

    def __iter__(self) -> Iterator[_Path]:
        """Iterate over the path from its beginning."""
        found: list[_Path] = []
        at: _Path | None = self
        while at is not None:
            found.append(at)
            at = at.rest
        return reversed(found)


@dataclass(slots=True)
class _Search:
    """A search for a chain of cuts for ``stays`` (by process, in order)."""

    model: _Model
    stays: list[list[_Stay]]
    dead_ends: list[tuple[_Path | None, _Stuck]] = field(default_factory=list)

    def run(self) -> list[_Path] | None:
        """Return the chain, or None if there is none; then ``dead_ends`` holds the reasons."""
        nothing = tuple(0 for _ in self.model.names)
        stack: list[tuple[Cut, Cut, _Path | None]] = [(nothing, nothing, None)]
        seen: set[tuple[Cut, Cut]] = set()
        while stack:
            cut, heads, path = stack.pop()
            due = [line[h] for line, h in zip(self.stays, heads, strict=True) if h < len(line)]
            if not due:
                return list(path) if path else []
            for stay, option in self._options(cut, due, path):
                state = (option, self._served(heads, option))
                if state not in seen:
                    seen.add(state)
                    stack.append((*state, _Path(option, stay, path)))
        return None

    def _options(self, cut: Cut, due: list[_Stay], path: _Path | None) -> list[tuple[_Stay, Cut]]:
        """Return the minimal next cuts; no cuts if some answer can no longer have an instant."""
        found: dict[Cut, _Stay] = {}
        for stay in {self.model.asks(stay): stay for stay in due}.values():
            least = self.model.least(cut, stay)
            if isinstance(least, _Stuck):
                self.dead_ends.append((path, least))
                return []
            found[least] = stay
        return [
            (stay, one)
            for one, stay in found.items()
            if not any(other != one and _below(other, one) for other in found)
        ]

    def _served(self, heads: Cut, cut: Cut) -> Cut:
        """Return ``heads`` after every answer that has the cut as an instant."""
        served = list(heads)
        for p, h in enumerate(heads):
            if h < len(self.stays[p]):
                stay = self.stays[p][h]
                fits = all(self.model.fits(stay, q, k) for q, k in enumerate(cut))
                served[p] += fits
        return tuple(served)


def _below(one: Cut, other: Cut) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def decide(execution: Execution) -> LiveSetVerdict:
    """Decide whether the execution is valid, with a witness or the reason.

    Raises:
        ExecutionError: The events are not an execution.
    """
    return _decide(_Model(execution))


def _decide(model: _Model) -> LiveSetVerdict:
    answers = sum(map(len, model.stays))
    chain = _Search(model, model.stays).run()
    if chain is None:
        return LiveSetVerdict(False, reason=_reason(model), answers=answers)
    return LiveSetVerdict(True, tuple(_linear(model, chain)), answers=answers)


def _linear(model: _Model, chain: Iterable[_Path]) -> Iterator[Mark | Instant]:
    """Yield one order of all events in which the cuts of the chain are prefixes."""
    done = [0] * len(model.names)
    end = tuple(map(len, model.lines))
    for step in (*chain, None):
        target = step.cut if step else end
        while _below(tuple(done), target) and tuple(done) != target:
            for p, goal in enumerate(target):
                while done[p] < goal and _below(_apart(model.need[p][done[p]], p), tuple(done)):
                    yield model.names[p], done[p]
                    done[p] += 1
        if step:
            yield Instant(step.stay.members or frozenset(), step.stay.barrier)


def _apart(need: Cut, p: int) -> Cut:
    return (*need[:p], 0, *need[p + 1 :])


def _reason(model: _Model) -> str:
    """Return a minimal set of answers that cannot all be right, and the reason."""
    core = list({model.asks(s): s for line in model.stays for s in line}.values())
    nothing = tuple(0 for _ in model.names)
    for stay in core:
        if isinstance(least := model.least(nothing, stay), _Stuck):
            return f"no instant: {model.explain(least)}"
    for stay in list(core):
        fewer = [s for s in core if s != stay]
        if _search(model, fewer).run() is None:
            core = fewer
    search = _search(model, core)
    search.run()
    told = [f"no common order of the instants of: {'; '.join(map(str, core))}"]
    for path, stuck in search.dead_ends[:4]:
        first = ", then ".join(_names(step.stay.members or ()) for step in path or ())
        told.append(f"with {first or 'nothing'} first: {model.explain(stuck)}")
    return "\n  ".join(told)


def _search(model: _Model, stays: list[_Stay]) -> _Search:
    return _Search(model, [[s for s in line if s in stays] for line in model.stays])


def judged(execution: Execution) -> tuple[LiveSetVerdict, str | None]:
    """Return `decide`'s verdict and the first of `unheard`. Raises ``ExecutionError``."""
    model = _Model(execution)
    return _decide(model), next(_unheard(model), None)


def unheard(execution: Execution) -> list[str]:
    """Return the answers with a member that the order does not show to have entered before.

    Such an execution may be valid, but only by luck: in another order the member came late. A
    process that answers only by messages can rely only on the messages that it received. Raises
    ``ExecutionError``.
    """
    return list(_unheard(_Model(execution)))


def _unheard(model: _Model) -> Iterator[str]:
    index = {name: p for p, name in enumerate(model.names)}
    for p, stays in enumerate(model.stays):
        for stay in stays:
            left = model.lasts[p][stay]
            for name in sorted(stay.members or ()):
                known = model.need[p][left][index[name]]
                if not any(x.entered < known for x in model.meeting(name, stay)):
                    told = model.event((p, left))
                    yield f"{stay} at {told}, without having heard that {name} was in the barrier"


def render(execution: Execution, verdict: LiveSetVerdict) -> str:
    """Return the witness or the reason as text, one event or instant per line."""
    if not verdict.valid:
        return f"invalid: {verdict.reason}"
    told = ["valid, in this order:"]
    for x in verdict.order:
        if isinstance(x, Instant):
            barrier = f" of {x.barrier}" if x.barrier else ""
            told.append(f"  --- instant: {_names(x.members)} in the barrier{barrier}, others dead")
        else:
            event = execution.lines[x[0]][x[1]]
            given = f" with {_names(event.members)}" if event.kind == "leave" else ""
            told.append(f"  {x[0]} {event.kind}{given}")
    return "\n".join(told)

"""Scenario files: a run of a modelled job, written as commands with their expected results.

Reads and writes scenario files; pure otherwise. The job is ``fft.prove.model`` over the shipped
core and a shipped table, with every fault allowed. A file is a header and blocks::

    title: what must happen, and why
      (a line that begins with a space continues the previous one)
    spec: hsdp              # or the path of a YAML file, relative to this file
    groups: 2
    ranks: 1
    commits: 2              # no step function begins at this committed step
    formed: yes             # begin in the first txn; no: at the start of the processes
    alike: yes              # all groups begin with the same weights
    least: 1                # minimum number of groups for progress
    digests: no             # yes: votes contain digests of the states
    heals: no               # yes: a divergent rank fetches the state again; else the job ends
    expect: ok              # or the property that the last command must break

    A/0 raises
    settle
    ----
    the output

Only ``title`` is required. Lines that begin with ``#`` are comments. A block's output ends with an
empty line; ``pytest tests/prove/test_scenarios.py --rewrite`` writes it anew, and the result must
be reviewed. ``mutant:`` names a planted bug of ``fft.prove.mutants``; ``world:`` names switches of
the modelled bus that are off; ``only:`` names the properties to evaluate, if not all.

In commands, ``A/0`` is rank 0 of group A, ``A/0#2`` its second incarnation, ``A`` stands for all
ranks of A in turn, and ``all`` for all live participants::

    A/0 hears               handles the next broadcast (hears commit 1.1: it must be this one)
    A/0 hears second        handles the broadcast after the next one first
    A/0 hears twice | never hears | hears all
    A/0 is told             handles the next message to it alone (is told ack of B/0: this one)
    A/0 is told second | is told twice | is never told
    A/0 does                its next operation on the bus (does all: every one)
    A/0 fails               the operation is lost with the bus
    A/0 fails, though done  the operation is done, but its answer is lost
    A/0 body ends | body ends with NO | body reduces nothing | raises
    A/0 body has other data                      its batch is not that of the other ranks
    A/0 body flips a gradient                    a gradient is wrong after its reduction
    A/0 body skips | body skips early            the user skips the step: early, before reducing
    A/0 body is a live block                     the txn is the entry or the end of a live block
    A/0 body is the final live block             it ends one, and the program ends with it
    A/0 body ends without a digest | state is corrupted
    A/0 applies | applies half | handles applied | restores | restores half
    A/0 heals | fails to heal
    A/0 connects | learns | fails to learn       a learner, which fetches in its first txn
    A/0 timer NAME          fires, early if necessary
    A/0 ends (crash)        a monitor reports it; ends (silent): without a report
    A/0 ends (loss)         the report adds that another takes its place: A/0 is replaced
    A comes back | A is asked to leave | A is started twice
    bus away | bus back | bus forgets
    hears all               all handle and do everything, while main threads stand still
    settle                  everything that can happen happens, except timers, in a fixed fair order
    time passes             the timer that is due fires
    until CONDITION         as settle, and time passes when nothing else can happen
    expect CONDITION        an error unless it holds
    state | register        the state of all participants | the records so far

A condition is ``[who] [STATE | STATE.sub | out] [at EPOCH.TXN] [step N] [clean | torn] [fetched |
fetched nothing]`` (for all live participants, if none is named), or ``register commit 1.1`` (the
beginning of the newest record's description). The output of a single step describes all of it. The
output of ``settle`` and similar commands lists only the changes of state, one line per participant,
after the records that were written.

A counterexample of the checker (``save_counterexample``) names the property that its last command
breaks, and fails once the bug is fixed. To keep it then as a regression scenario: set ``expect:
ok``, drop ``mutant:``, remove the commands that can no longer happen, end it with ``until`` and
``expect`` lines that state what must happen instead, rewrite it, and review the difference.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fft.errors import FftError
from fft.messages.protocol import Record
from fft.protocol.load import load_spec
from fft.protocol.main_thread import ThreadTable
from fft.protocol.participant import Participant
from fft.protocol.spec import FsmSpec, outermost
from fft.protocol.state import GENESIS
from fft.prove.bounds import KINDS, REAL, Bounds, World
from fft.prove.intern import thaw
from fft.prove.model import Model, State, Step
from fft.prove.narrate import (
    at_work,
    ending,
    fetched,
    label,
    name,
    on_bus,
    say,
    say_effect,
    say_record,
    start_of,
    tell,
    txn,
)

if TYPE_CHECKING:
    from fft.prove.checker import Search, Violation

_AMPLE = 1_000
"""Maximum number of faults of each kind in a scenario."""
_LIMIT = 3_000
"""Maximum number of steps of one command; beyond it the command counts as endless."""
_DASHES = "----"
_DEFAULTS = {
    "title": "",
    "spec": "hsdp",
    "groups": "2",
    "ranks": "1",
    "rules": "",
    "commits": "2",
    "formed": "yes",
    "alike": "yes",
    "least": "1",
    "digests": "no",
    "heals": "no",
    "expect": "ok",
    "mutant": "",
    "world": "",
    "only": "",
}


class _Wrong(Exception):
    """A ``FftError`` whose line is not known yet."""


# --- files ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Block:
    """Commands, as written, and their output. ``line``: number of the first one."""

    line: int
    commands: list[str]
    output: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Scenario:
    """A parsed scenario file."""

    path: Path
    header: dict[str, str]
    written: list[str]
    """The header's lines as written."""
    blocks: list[Block]

    def text(self) -> str:
        """Return the text of the file."""
        parts = ["\n".join(self.written)]
        parts += ["\n".join([*b.commands, _DASHES, *b.output]) for b in self.blocks]
        return "\n\n".join(parts) + "\n"


def read_scenario(path: Path) -> Scenario:
    """Read a file. Raises ``FftError``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((i for i, line in enumerate(lines) if not line.strip()), len(lines))
    header, key = dict(_DEFAULTS), ""
    for number, line in enumerate(lines[:end], 1):
        if line[0] == " " and key:
            header[key] += f" {line.strip()}"
            continue
        key, colon, value = line.partition(":")
        if not colon or key not in _DEFAULTS:
            known = ", ".join(_DEFAULTS)
            raise FftError(f"{path}:{number}: not a header line; they are `key: value`: {known}")
        header[key] = value.strip()
    if not header["title"]:
        raise FftError(f"{path}:1: no title: say what must happen and why")
    return Scenario(path, header, lines[:end], list(_blocks(path, lines, end)))


def _blocks(path: Path, lines: list[str], at: int) -> Iterator[Block]:
    while at < len(lines):
        if not lines[at].strip():
            at += 1
            continue
        block = Block(at + 1, [])
        while at < len(lines) and lines[at] != _DASHES:
            if not lines[at].strip():
                raise FftError(f"{path}:{at + 1}: commands end with a line `{_DASHES}`")
            block.commands.append(lines[at])
            at += 1
        if at == len(lines):
            raise FftError(f"{path}:{at}: the last commands lack their line `{_DASHES}`")
        at += 1
        while at < len(lines) and lines[at].strip():
            block.output.append(lines[at])
            at += 1
        yield block


def run_scenario(path: Path, instead: FsmSpec | None = None) -> str:
    """Return the whole file with fresh output.

    Args:
        path: The file.
        instead: A changed table, for files of the spec with that name.

    Raises:
        FftError: A command is unknown or cannot happen, an expectation does not hold, or the
            broken property is not the expected one.
    """
    scenario = read_scenario(path)
    try:
        run = Run(scenario.header, path.parent, instead)
    except (_Wrong, FftError) as error:
        raise FftError(f"{path}:1: {error}") from None
    line = 1
    for block in scenario.blocks:
        block.output = []
        for line, command in enumerate(block.commands, block.line):
            try:
                block.output += run.command(command)
            except _Wrong as error:
                raise FftError(f"{path}:{line}: {error}") from None
    try:
        run.end(scenario.header["expect"])
    except _Wrong as error:
        raise FftError(f"{path}:{line}: {error}") from None
    return scenario.text()


def check_scenario(path: Path, instead: FsmSpec | None = None) -> None:
    """Raise ``FftError`` unless the file runs and its output is as written."""
    was, fresh = path.read_text(encoding="utf-8"), run_scenario(path, instead)
    if was != fresh:
        lines = difflib.unified_diff(
            was.splitlines(), fresh.splitlines(), "as written", "as it runs", lineterm="", n=2
        )
        raise FftError(
            f"{path}: other output than written; if it is what it should be, rewrite it "
            "(pytest tests/prove/test_scenarios.py --rewrite)\n" + "\n".join(lines)
        )


def rewrite_scenario(path: Path) -> bool:
    """Write the file with fresh output. Returns whether it has changed."""
    was, fresh = path.read_text(encoding="utf-8"), run_scenario(path)
    path.write_text(fresh, encoding="utf-8")
    return was != fresh


# --- the job of a scenario ------------------------------------------------------------------------

_spec = cache(load_spec)


def _model(header: dict[str, str], folder: Path, instead: FsmSpec | None) -> Model:
    named = header["spec"]
    spec = _spec(str(folder / named) if named.endswith((".yaml", ".yml")) else named)
    spec = instead if instead is not None and instead.name == named else spec
    participant, world, thread = Participant, REAL, None
    if header["mutant"]:
        spec, participant, world, thread = _mutant(header["mutant"])
    for switch in header["world"].split():
        if not hasattr(REAL, switch):
            raise _Wrong(f"world: no switch {switch!r}; there are {', '.join(vars(REAL))}")
    if header["world"]:
        world = World(**{switch: switch not in header["world"].split() for switch in vars(REAL)})
    bounds = Bounds(
        "scenario",
        groups=_number(header, "groups"),
        ranks=_number(header, "ranks"),
        rules=_rules(header["rules"]),
        commits=_number(header, "commits"),
        faults=_AMPLE,
        budget=tuple((kind, _AMPLE) for kind in KINDS),
        formed=_yes(header, "formed"),
        alike=_yes(header, "alike"),
        least=_number(header, "least"),
        digests=_yes(header, "digests"),
        heals=_yes(header, "heals"),
    )
    return Model(spec, bounds, participant, world, tuple(header["only"].split()), thread)


def _number(header: dict[str, str], key: str) -> int:
    if not header[key].isdigit():
        raise _Wrong(f"{key}: {header[key]!r} is no number")
    return int(header[key])


def _rules(text: str) -> tuple[tuple[str, int], ...]:
    """Return the rules that choose active groups, such as ``max_active 2``."""
    words = text.split()
    if len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
        raise _Wrong(f"rules: {text!r} is no list of names and numbers")
    return tuple(zip(words[::2], map(int, words[1::2]), strict=True))


def _yes(header: dict[str, str], key: str) -> bool:
    if header[key] not in ("yes", "no"):
        raise _Wrong(f"{key}: yes or no, not {header[key]!r}")
    return header[key] == "yes"


def _mutant(wanted: str) -> tuple[FsmSpec, type[Participant], World, ThreadTable | None]:
    """Return tables, core and bus with the planted bug of that name."""
    mutants = importlib.import_module("fft.prove.mutants").MUTANTS  # only when one is requested
    for mutant in mutants:
        if mutant.name == wanted:
            return mutant.spec, mutant.participant, mutant.world, mutant.thread_table
    raise _Wrong(f"no mutant {wanted!r}; there are {', '.join(m.name for m in mutants)}")


# --- running --------------------------------------------------------------------------------------

_HEARING = ("hears", "is told", "does", "fails at")
_STARTS = ("comes back", "is asked to leave", "is started twice", "is replaced")
_ACTIONS = {
    "hears": "hears 0",
    "hears second": "hears 1",
    "hears twice": "hears 0 twice",
    "never hears": "never hears 0",
    "is told": "is told 0",
    "is told second": "is told 1",
    "is told twice": "is told 0 twice",
    "is never told": "never is told 0",
}
_SUBJECT = re.compile(r"([A-H])(?:/(\d+))?(?:#(\d+))?$")


def _command(model: Model, state: State, step: Step) -> str:
    """Return the command for a step that is taken in a state."""
    if step.who < 0:
        return step.what
    peer = model.peer(step.who, model.node(state, step.who).inc)
    same = range(step.who % model.places, model.size, model.places)
    twins = sum(model.node(state, who).local >= 0 for who in same) > 1
    subject = f"{peer.group}/{peer.rank}" + (f"#{peer.inc}" if twins else "")
    for said, what in _ACTIONS.items():
        if step.what == what:
            return f"{subject} {said}"
    if step.what in _STARTS:
        return start_of(model, step)
    action = step.what
    if action.startswith("does"):
        action = "does"
    elif action.startswith("fails at"):
        action = "fails, though done" if action.endswith("was done") else "fails"
    return f"{subject} {action.removesuffix(' early')}"


@dataclass(slots=True)
class _Log:
    """Changes of state while a command takes many steps."""

    moves: dict[int, list[str]] = field(default_factory=dict)
    records: list[str] = field(default_factory=list)

    def lines(self, names: Callable[[int], str]) -> Iterator[str]:
        """Yield the lines of the log, register first."""
        if self.records:
            yield f"register: {'; '.join(self.records)}"
        for who in sorted(self.moves):
            yield f"{names(who)} {' → '.join(self.moves[who])}"


class Run:
    """One run of a scenario's commands. ``folder``: base of relative spec paths."""

    def __init__(
        self, header: dict[str, str], folder: Path, instead: FsmSpec | None = None
    ) -> None:
        self.model = _model(header, folder, instead)
        self.state: State = self.model.initial()
        self.broken: tuple[str, str] | None = None
        head = self._shared().head
        self._chain: list[Record] = [] if head is None else [head]
        self._fetched: set[int] = set()
        self._lived = set(range(self.model.places))
        self._turn = 0
        self._fired: dict[tuple[int, str], int] = {}

    def command(self, text: str) -> list[str]:
        """Carry out one command and return its output; a comment has none. Raises ``_Wrong``."""
        words = text.split()
        if not words or text[0] == "#":
            return []
        if self.broken and text not in ("state", "register"):
            raise _Wrong(f"{self.broken[0]} is broken: nothing can come after that")
        match words:
            case ["settle"]:
                return self._until(None, timers=False)
            case ["hears", "all"]:
                return self._until(None, timers=False, only=_HEARING)
            case ["time", "passes"]:
                return self._pass_time()
            case ["until", *condition]:
                return self._until(self._condition(condition), timers=True, aim=text)
            case ["expect", *condition]:
                if not self._condition(condition)():
                    raise _Wrong(f"{text!r} does not hold:\n" + "\n".join(self._stand()))
                return []
            case ["state"]:
                return list(self._stand())
            case ["register"]:
                return [f"{r.n} {say_record(r)} by {name(r.by)}" for r in self._chain]
            case ["bus", _]:
                return self._single(lambda s: s.who < 0 and s.what == " ".join(words), text)
            case [subject, *action] if action:
                return self._act(subject, " ".join(action), text)
        raise _Wrong(f"unknown command {text!r}; the docstring of fft/prove/scenario.py lists them")

    def end(self, expected: str) -> None:
        """Compare the broken property with the expected one. Raises ``_Wrong``."""
        if expected == "eventually" and self.broken is None:
            if not is_stuck(self.model, self.state):
                raise _Wrong("eventually: from here on everything can still settle")
            return
        found = self.broken[0] if self.broken else "ok"
        if found != expected:
            text = f": {self.broken[1]}" if self.broken else ""
            raise _Wrong(f"the last command should leave {expected}, but it leaves {found}{text}")

    # --- single steps ---

    def _act(self, subject: str, action: str, text: str) -> list[str]:
        if action in _STARTS:
            return self._single(lambda s: start_of(self.model, s) == text, text)
        lines = []
        for who in self._who(subject):
            if action == "hears all":
                lines += self._until(None, timers=False, only=_HEARING, who=who)
            elif action == "does all":
                while self.model.node(self.state, who).pending:
                    lines += self._single(_named(who, "does"), text)
            else:
                lines += self._single(_named(who, self._checked(who, action)), text)
        return lines

    def _checked(self, who: int, action: str) -> str:
        """Return the action without the text that names the expected message."""
        match = re.match(r"(?:never )?hears |is (?:never )?told ", action)
        if match is None or action in _ACTIONS:
            return action
        wanted, node = action[match.end() :], self.model.node(self.state, who)
        queue = node.mail if "told" in match[0] else node.inbox
        said = [say(self.model.events[number]) for number in queue]
        if not said or not said[0].startswith(wanted):
            waiting = "; ".join(said) or "nothing"
            raise _Wrong(f"{self._name(who)} would hear something else: {waiting}")
        return match[0].strip()

    def _single(self, wanted: Callable[[Step], bool], text: str) -> list[str]:
        steps = list(self.model.steps(self.state, every=True))
        fitting = sorted(filter(wanted, steps), key=lambda step: step.what.endswith(" early"))
        if not fitting:
            raise _Wrong(f"{text!r} cannot happen here; what can: {self._possible(steps)}")
        lines = [tell(self.model, self.state, fitting[0])]
        self._take(fitting[0])
        return lines + self._verdict()

    def _possible(self, steps: list[Step]) -> str:
        said = (_command(self.model, self.state, step) for step in steps)
        return ", ".join(dict.fromkeys(said))

    def _who(self, subject: str) -> list[int]:
        """Return the places of the live participants that a command names, in order."""
        live = [i for i in range(self.model.size) if self._node(i).local >= 0]
        if subject == "all":
            return live
        match = _SUBJECT.match(subject)
        if match is None:
            raise _Wrong(f"who is {subject!r}? A, A/0, A/0#2 or all")
        group, rank, inc = match.groups()
        peers = {i: self.model.peer(i, self._node(i).inc) for i in live}
        found = [
            i
            for i, peer in peers.items()
            if peer.group == group
            and (rank is None or peer.rank == int(rank))
            and (inc is None or peer.inc == int(inc))
        ]
        if not found:
            raise _Wrong(f"there is no live {subject}")
        if inc is None and len({peers[i].inc for i in found}) > 1:
            raise _Wrong(f"which {subject}? " + ", ".join(str(peers[i]) for i in found))
        return found

    def _take(self, step: Step, log: _Log | None = None) -> None:
        before, state = self._shared().head, self.state
        if step.broken is not None and not self.model.is_excused(step):
            self.broken = step.broken
        self.state = step.state
        self._lived |= {i for i in range(self.model.size) if self._node(i).local >= 0}
        node = self.model.node(state, step.who) if step.who >= 0 else None
        if node is not None and fetched(node, step.what):
            self._fetched.add(step.who)
        head = self._shared().head
        wrote = head is not None and head != before
        if head is not None and wrote:
            self._chain.append(head)
        if log is not None:
            if head is not None and wrote:
                log.records.append(f"{say_record(head)} by {name(head.by)}")
            self._note(log, state, step)

    def _note(self, log: _Log, state: State, step: Step) -> None:
        before, after = self.model.node(state, step.who), self._node(step.who)
        was = label(thaw(self.model.locals[before.local]))
        if after.local < 0:
            now = ending(self.model, before, step)
        else:
            now = label(thaw(self.model.locals[after.local]))
        if fetched(before, step.what):
            moves = log.moves.setdefault(step.who, [was])
            moves[-1] += " (fetches)"
        if now != was:
            log.moves.setdefault(step.who, [was]).append(now)

    def _verdict(self) -> list[str]:
        return [f"BROKEN {self.broken[0]}: {self.broken[1]}"] if self.broken else []

    # --- many steps ---

    def _until(
        self,
        reached: Callable[[], bool] | None,
        timers: bool,
        only: tuple[str, ...] = (),
        who: int | None = None,
        aim: str = "this",
    ) -> list[str]:
        log = _Log()
        for _ in range(_LIMIT):
            if self.broken or (reached is not None and reached()):
                break
            step = self._next(timers, only, who)
            if step is None and reached is None:
                break
            if step is None:
                lines = [*log.lines(self._name), *self._stand()]
                raise _Wrong(f"{aim!r} is never reached:\n" + "\n".join(lines))
            self._take(step, log)
        else:
            lines = [*log.lines(self._name), *self._stand()]
            raise _Wrong(f"{aim!r} does not end within {_LIMIT} steps:\n" + "\n".join(lines))
        return [*log.lines(self._name), *self._verdict()]

    def _next(
        self, timers: bool, only: tuple[str, ...] = (), who: int | None = None
    ) -> Step | None:
        """Return the next free step, in turns; timers fire only if nothing else can happen."""
        steps = [s for s in self.model.steps(self.state, faults=False) if s.who >= 0]
        if who is not None or only:  # another participant may hide their steps (see Model._quiet)
            steps = [
                step
                for step in self.model.steps(self.state, every=True)
                if step.free and step.who >= 0 and who in (None, step.who)
                if step.what.startswith(only)
            ]
        due = [s for s in steps if s.what.startswith("timer ")]
        moves = [s for s in steps if not s.what.startswith("timer ")]
        size = self.model.size
        if moves:
            turn = self._turn
            # Receive before computing, or a participant that can compute would never receive.
            moves.sort(
                key=lambda s: (
                    (s.who - turn) % size,
                    not s.what.startswith(_HEARING),
                    s.what.endswith("was done"),
                )
            )
            self._turn = moves[0].who + 1
            return moves[0]
        if not timers or not due:
            return None
        due.sort(key=lambda s: self._fired.get((s.who, s.what), 0))
        self._fired[due[0].who, due[0].what] = 1 + max(self._fired.values(), default=0)
        return due[0]

    def _pass_time(self) -> list[str]:
        step = self._next(timers=True)
        if step is None or not step.what.startswith("timer "):
            raise _Wrong("no time passes while something else can happen; `settle` first")
        lines = [tell(self.model, self.state, step)]
        self._take(step)
        return lines + self._verdict()

    # --- conditions ---

    def _condition(self, words: list[str]) -> Callable[[], bool]:
        if words[:1] == ["register"]:
            wanted = " ".join(words[1:])
            return lambda: say_record(self._shared().head).startswith(wanted)
        subject = "all"
        if words and (words[0] == "all" or _SUBJECT.match(words[0])):
            subject, words = words[0], words[1:]
        tests = list(self._tests(words))
        if not tests:
            raise _Wrong("a condition says what must hold, as `A/0 NORMAL step 1`")
        if words == ["out"]:
            gone = tests[0]
            return lambda: all(gone(i) for i in self._lived if self._is_named(subject, i))
        return lambda: all(test(i) for i in self._who(subject) for test in tests)

    def _is_named(self, subject: str, who: int) -> bool:
        peer = self.model.peer(who, self._node(who).inc)
        names = ("all", peer.group, f"{peer.group}/{peer.rank}", str(peer))
        return subject in names

    def _tests(self, words: list[str]) -> Iterator[Callable[[int], bool]]:
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "out":
                yield lambda i: self._node(i).local < 0
            elif word in {
                part for name in self.model.spec.names for part in (name, outermost(name))
            }:
                yield partial(self._stands, word)
            elif word == "clean":
                yield lambda i: not self._node(i).bits.marks
            elif word == "torn":
                yield partial(self._has, "lineage", "")
            elif word == "fetched" and rest == ["nothing"]:
                rest.clear()
                yield lambda i: i not in self._fetched
            elif word == "fetched":
                yield lambda i: i in self._fetched
            elif word == "step" and rest and rest[0].isdigit():
                yield partial(self._has, "step", int(rest.pop(0)))
            elif word == "at" and re.fullmatch(r"\d+\.\d+", rest[0] if rest else ""):
                yield partial(self._has, "token", tuple(map(int, rest.pop(0).split("."))))
            else:
                raise _Wrong(f"a condition knows no {word!r}")

    def _stands(self, state: str, who: int) -> bool:
        here = self._local(who).state
        return state in (here, outermost(here))

    def _has(self, field: str, value: object, who: int) -> bool:
        return bool(getattr(self._local(who), field) == value)

    # --- what there is ---

    def _shared(self) -> Any:
        return self.model.shared[self.state[self.model.size]]

    def _node(self, who: int) -> Any:
        return self.model.node(self.state, who)

    def _local(self, who: int) -> Any:
        return thaw(self.model.locals[self._node(who).local])

    def _name(self, who: int) -> str:
        return name(self.model.peer(who, self._node(who).inc))

    def _stand(self) -> Iterator[str]:
        shared = self._shared()
        if shared.bus != "up":
            yield f"bus {shared.bus}"
        for who in sorted(self._lived):
            yield f"{self._name(who)} {'out' if self._node(who).local < 0 else self._about(who)}"

    def _about(self, who: int) -> str:
        node, local, model = self._node(who), self._local(who), self.model
        lineage = "lost" if local.lineage == "" else local.lineage
        groups = " ".join(g.group for g in local.epoch.members) if local.epoch else ""
        parts = [
            f"{outermost(local.state)} at {txn(local.token)}",
            f"step {local.step}",
            f"lineage {lineage if lineage in (GENESIS, 'lost') else lineage[:4]}",
            f"with {groups}" if groups else "in no epoch",
            " and ".join(dict.fromkeys(what for what, _ in node.bits.marks)) or "clean",
        ]
        if local.timers:
            parts.append(f"timers {' '.join(sorted(local.timers))}")
        if node.inbox:
            parts.append(f"to hear: {', '.join(say(model.events[n]) for n in node.inbox)}")
        if node.mail:
            parts.append(f"to be told: {', '.join(say(model.events[n]) for n in node.mail)}")
        if todo := on_bus(model, node.pending):
            parts.append(f"to do: {', '.join(map(say_effect, todo))}")
        if (at := at_work(model, node)) is not None:
            parts.append(f"main thread: {at}")
        return ", ".join(parts)


def _named(who: int, action: str) -> Callable[[Step], bool]:
    """Return a test for this action, in the vocabulary of scenarios or of the model."""
    action = _ACTIONS.get(action, action)

    def wanted(step: Step) -> bool:
        if step.who != who:
            return False
        if action == "does":
            return step.what.startswith("does ")
        if action in ("fails", "fails, though done"):
            done = step.what.endswith("which was done")
            return step.what.startswith("fails at ") and done == (action != "fails")
        return step.what == action or (
            action.startswith("timer ") and step.what == f"{action} early"
        )

    return wanted


# --- counterexamples ------------------------------------------------------------------------------


def is_stuck(model: Model, state: State, limit: int = 100_000) -> bool:
    """Whether no free steps lead from ``state`` to a settled one.

    Raises:
        FftError: More than ``limit`` states would have to be explored.
    """
    from fft.prove.checker import Search  # imported here because it imports this module

    judge, seen, front = Search(model), {state}, [state]
    while front:
        at = front.pop()
        if judge._is_settled(at):
            return False
        for step in model.steps(at, faults=False):
            if step.free and step.state not in seen:
                seen.add(step.state)
                front.append(step.state)
        if len(seen) > limit:
            raise FftError(f"whether this settles is not known after {limit} states")
    return True


def save_counterexample(
    search: Search,
    violation: Violation,
    path: Path,
    spec: str | None = None,
    mutant: str | None = None,
) -> None:
    """Write the counterexample of a search as a scenario file, and run it.

    Args:
        search: The search.
        violation: The violation that it found.
        path: The scenario file.
        spec: Name or path of the table that was searched, as it is written to the file; by default
            the table's own name.
        mutant: Name of the planted bug in table, core or bus, if there was one.

    Raises:
        FftError: The file does not show the violation (it is left for inspection).
    """
    model, bounds = search.model, search.model.bounds
    header = {
        "title": f"counterexample of {violation.name}: {violation.text}".replace("\n", " "),
        "spec": spec or model.spec.name,
        "groups": str(bounds.groups),
        "ranks": str(bounds.ranks),
        "commits": str(bounds.commits),
        "formed": "yes" if bounds.formed else "no",
        "alike": "yes" if bounds.alike else "no",
        "least": str(bounds.least),
        "expect": violation.name,
    }
    header |= {key: "yes" for key in ("digests", "heals") if getattr(bounds, key)}
    if model.only:
        header["only"] = " ".join(sorted(model.only))
    if mutant is not None:
        header["mutant"] = mutant
    elif off := [switch for switch, on in vars(model.world).items() if not on]:
        header["world"] = " ".join(off)
    lines = [f"{key}: {value}" for key, value in header.items()]
    commands = list(_commands(model, violation))
    path.write_text(Scenario(path, header, lines, [Block(0, [*commands, "state"])]).text(), "utf-8")
    path.write_text(run_scenario(path), encoding="utf-8")


def _commands(model: Model, violation: Violation) -> Iterator[str]:
    state, last = model.initial(), len(violation.path) - 1
    for number, (who, what) in enumerate(violation.path):
        ends = number == last and violation.name != "eventually"
        steps = list(model.steps(state, every=True))
        found = next((s for s in steps if (s.who, s.what) == (who, what)), None)
        if ends and (found is None or found.broken is None):
            # The search may name groups differently: it keeps one state for all equivalent ones.
            found = next(s for s in steps if s.broken and s.broken[0] == violation.name)
        if found is None:
            raise FftError(f"step {number + 1} of the counterexample cannot be taken again")
        yield _command(model, state, found)
        state = found.state

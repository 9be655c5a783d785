"""Describe steps of a modelled job, for counterexamples and for scenario files. Pure.

Participants are named ``A/0``, and ``A/0#2`` for a later incarnation; a txn is ``epoch.txn``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fft.messages.effects import Broadcast, CastVote, Decide, Finish, Tell
from fft.messages.protocol import Death, Decision, Drain, Event, Peer, Record, Suspect, Timer, Token
from fft.protocol.participant import Outcome
from fft.protocol.spec import outermost
from fft.protocol.state import Local
from fft.prove.bare_effects import SHARED
from fft.prove.intern import thaw
from fft.prove.model import QUEUES, Model, State, Step
from fft.prove.nodes import Node, Shared


def narrate(model: Model, path: list[tuple[int, str]]) -> Iterator[str]:
    """Yield the run of a path, one line per step: the actor, the action and its effects."""
    state = model.initial()
    for number, (who, what) in enumerate(path, 1):
        step = find_step(model, state, who, what)
        yield f"{number:3}. {tell(model, state, step)}"
        state = step.state


def find_step(model: Model, state: State, who: int, what: str) -> Step:
    """Return the step with that name. Raises ``LookupError`` if it cannot be taken."""
    for step in model.steps(state, every=True):
        if (step.who, step.what) == (who, what):
            return step
    raise LookupError(f"{what!r} of process {who} cannot happen here")


# --- names ----------------------------------------------------------------------------------------


def name(peer: Peer) -> str:
    """Return ``A/0``; with the incarnation unless it is the first."""
    return f"{peer.group}/{peer.rank}" + (f"#{peer.inc}" if peer.inc > 1 else "")


def txn(token: Token) -> str:
    """Return ``epoch.txn``."""
    return f"{token[0]}.{token[1]}"


def say_record(record: Record | None) -> str:
    """Describe a value of the head register briefly."""
    if record is None:
        return "empty register"
    if record.kind == "epoch":
        groups = " ".join(
            g.group + (f"#{g.ranks[0].inc}" if g.ranks[0].inc > 1 else "") for g in record.members
        )
        spares = [g.group for g in record.members if record.active and g.group not in record.active]
        spare = f", of which {' '.join(spares)} is spare" if spares else ""
        return f"epoch {record.epoch} of {groups}{spare}" + _leases(record)
    text = f"{record.kind} {txn(record.token)}"
    if record.live:
        text += ", a live block"
    elif record.skip:
        text += ", skipped"
    if record.odd or record.diverged:
        odd = " ".join(map(name, record.odd))
        return f"{text} ({f'{odd} differs from most' if odd else 'replicas differ'})"
    if record.leavers:
        return f"{text}, with which {' '.join(record.leavers)} leaves"
    text = f"{text}, the last of its epoch" if record.change else text
    return text + _leases(record)


def _leases(record: Record) -> str:
    """List the holder of each slice after the record, and the returned slices, if there are
    leases."""
    if not record.leases or record.kind == "abort":
        return ""
    held = ", ".join(f"{lease.group} {lease.slice}" for lease in record.leases)
    back = f"; given back: {', '.join(map(str, record.returned))}" if record.returned else ""
    return f" (leases: {held}{back})"


def say(event: Event | Any) -> str:
    """Describe an event briefly."""
    match event:
        case Decision(record=record):
            return say_record(record) + (f" by {name(record.by)}" if record else "")
        case Death(group=group, rank=rank, host=host):
            return f"death of {name(Peer(group, rank, int(host.rpartition('.')[2])))}"
        case Suspect(group=group, rank=rank, host=host):
            return f"suspicion of {name(Peer(group, rank, int(host.rpartition('.')[2])))}"
        case Drain(groups=groups):
            return f"drain of {' '.join(groups)}"
        case Timer(name=timer):
            return f"timer {timer}"
    peer = getattr(event, "peer", None) or getattr(getattr(event, "hello", None), "peer", None)
    token = getattr(event, "token", None)
    of = f" of {name(peer)}" if peer else f" {txn(token)}" if token else ""
    return f"{event.type}{of}"


def say_effect(effect: Any) -> str:
    """Describe an operation on the bus that is to be done."""
    match effect:
        case Broadcast(message=message):
            return f"say {say(message)}"
        case Tell(to=to, message=message):
            return f"tell {name(to)} {say(message)}"
        case Decide(proposal=proposal):
            return f"propose {say_record(proposal)}"
        case CastVote(token=token):
            return f"vote YES in {txn(token)}"
    return "read the register"


# --- steps ----------------------------------------------------------------------------------------


def start_of(model: Model, step: Step) -> str:
    """Return the scenario command by which processes start, or a group is asked to leave."""
    place = model.peer(step.who, 1)
    return f"{place.group}{f'/{place.rank}' if step.what == 'is replaced' else ''} {step.what}"


def tell(model: Model, state: State, step: Step) -> str:
    """Describe a step in one line: the action, the change of state, the next bus operations."""
    if step.who < 0:
        return step.what
    before, after = model.node(state, step.who), model.node(step.state, step.who)
    me = name(model.peer(step.who, after.inc))
    if step.what == "is replaced":
        return f"{me} comes; will {_todo(model, after.pending)}"
    if step.what in ("comes back", "is started twice"):
        return f"{me.partition('/')[0]} {step.what} as {me}; will {_todo(model, after.pending)}"
    text = f"{me} {_action(model, state, step)}"
    notes = [n for n in (_moved(model, before, after, step), _will(model, before, after)) if n]
    return f"{text}: {'; '.join(notes)}" if notes else text


def _action(model: Model, state: State, step: Step) -> str:
    node, what = model.node(state, step.who), step.what
    if (heard := message_of(model, node, what)) is not None:
        event, verb = heard, "is told" if "is told" in what else "hears"
        verdict = outcome(model, node, step)
        said = f"{verb} {say(event)}"
        if what.startswith("never"):
            said = f"never {said}"
        elif what.endswith("twice"):
            said += ", and will once more"
        elif what.endswith("1"):
            said += " before what was said earlier"
        return (
            said if verdict is None or verdict.verdict == "row" else f"{said} ({verdict.verdict})"
        )
    if what.startswith("does"):
        return _does(model.effects[node.pending[0]], *_bus(model, state, step))
    if what.startswith("fails at"):
        todo = say_effect(model.effects[node.pending[0]])
        how = "which is done, but the answer is lost" if what.endswith("was done") else "in vain"
        return f"fails to {todo}, {how}"
    if what == "heals":
        return f"heals, fetches {'the state' if fetched(node, what) else 'nothing'}"
    if what == "connects":
        return "rebuilds its groups, and begins to fetch the state"
    if what == "learns":
        return "has fetched the state"
    return what


def at_work(model: Model, node: Node) -> str | None:
    """Return the main thread's work that others wait for, as one word, or None."""
    if node.stuck:
        return "blocked"
    words = {"connecting": "heal", "restoring": "restore", "applying": "apply"}
    return words.get(model.at(node))


def fetched(node: Node, what: str) -> bool:
    """Whether this step gives a process the state of another."""
    if what != "heals":
        return what == "learns"
    _, source = node.task
    return source is not None


def _bus(model: Model, state: State, step: Step) -> tuple[Shared, Shared]:
    return model.shared[state[model.size]], model.shared[step.state[model.size]]


def _does(effect: Any, before: Shared, after: Shared) -> str:
    match effect:
        case Broadcast(message=message):
            return f"says {say(message)}"
        case Tell(to=to, message=message):
            return f"tells {name(to)} {say(message)}"
        case Decide(proposal=proposal):
            came = "wins" if after.head == proposal else f"loses to {say_record(after.head)}"
            if before.head == proposal:
                came = "finds it there already"
            return f"proposes {say_record(proposal)} and {came}"
        case CastVote(token=token, voters=voters):
            votes = dict(after.ballots).get(token, ())
            voted = len({vote.peer for vote in votes})
            return f"votes YES in {txn(token)}, {voted} of {voters}"
    return f"reads the register: {say_record(after.head)}"


def _moved(model: Model, before: Node, after: Node, step: Step) -> str:
    if before.local < 0:
        return ""
    was = thaw(model.locals[before.local])
    if after.local < 0:
        return (
            ""
            if step.what.startswith("ends")
            else f"{outermost(was.state)} → {ending(model, before, step)}"
        )
    now = thaw(model.locals[after.local])
    same = outermost(now.state) == outermost(was.state)
    return "" if same else f"{outermost(was.state)} → {label(now)}"


def label(local: Local) -> str:
    """Return the state (not its sub-state), and the txn if one is open."""
    state = outermost(local.state)
    return f"{state} {txn(local.token)}" if local.role == "training" else state


def ending(model: Model, before: Node, step: Step) -> str:
    """Return ``out`` or ``ended``, with the error that the user sees if there is one."""
    if step.what.startswith("ends"):
        return "ended"
    found = outcome(model, before, step)
    errors = [e.error for e in found.effects if isinstance(e, Finish)] if found else []
    return f"out ({errors[0]})" if errors and errors[0] else "out"


def _will(model: Model, before: Node, after: Node) -> str:
    left = before.pending[1:] if len(before.pending) > 0 else ()
    new = after.pending[len(left) :] if after.pending[: len(left)] == left else after.pending
    todo = _todo(model, new)
    return f"will {todo}" if todo and after.pending != before.pending else ""


def _todo(model: Model, pending: tuple[int, ...]) -> str:
    return ", ".join(say_effect(effect) for effect in on_bus(model, pending))


def on_bus(model: Model, pending: tuple[int, ...]) -> list[Any]:
    """Return the effects that others can see."""
    return [e for e in map(model.effects.__getitem__, pending) if isinstance(e, SHARED)]


def message_of(model: Model, node: Node, what: str) -> Event | None:
    """Return the message that a step with that name takes, or None."""
    for queue, hears in QUEUES.items():
        verb = hears.removesuffix(" 0")
        if what.removeprefix("never ").startswith(verb):
            waiting = getattr(node, queue)
            return model.events[waiting[1 if what == f"{verb} 1" else 0]]
    return None


def outcome(model: Model, node: Node, step: Step) -> Outcome | None:
    """Return the core's outcome for the event of the step, or None if the step has no event."""
    local = thaw(model.locals[node.local])
    event = None if step.what.startswith("never") else message_of(model, node, step.what)
    match step.what.removesuffix(" early").split():
        case ["timer", timer]:
            event = Timer(timer, local.timers[timer])
        case ["handles", *_]:
            event = model.events[node.done]
    if event is None:
        return None
    return model.participant(step.who, node.inc).handle(local, event, 0.0)[1]

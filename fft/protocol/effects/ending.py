"""Effects: the end of a participant, either regular or with the error that its user sees."""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.effects import Effect, Finish
from fft.messages.protocol import Event, Hello, Here, Join, Peer, RankEntry
from fft.protocol.effects.base import action
from fft.protocol.forming import base_of
from fft.protocol.state import Config, Local, coordinator, missing_mates, whole_groups


@action
def finish(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Finish regularly."""
    yield Finish(getattr(event, "cause", "") or "left after a commit")


def _fenced(me: Peer, newer: str) -> Effect:
    return Finish(
        f"{me} is replaced by {newer}, which took the same replica_id and rank; give each process "
        "its own, or end the older one",
        error="Fenced",
    )


def _in_words(newer: Peer, entry: Hello | RankEntry) -> str:
    return f"{newer} (pid {entry.pid} on {entry.host})"


@action
def stop_fenced(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: a newer incarnation of this identity asks to join."""
    assert isinstance(event, Join)
    yield _fenced(c.me, _in_words(event.hello.peer, event.hello))


@action
def stop_answered(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: a newer incarnation of this identity has answered."""
    assert isinstance(event, Here)
    yield _fenced(c.me, f"{event.peer}")


@action
def stop_replaced(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: a newer incarnation of this identity is in the newest epoch."""
    assert s.head is not None, "replaced by a record"
    newer = s.head.entries[c.me.group, c.me.rank]
    yield _fenced(c.me, _in_words(c.me._replace(inc=newer.inc), newer))


@action
def stop_ended(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: the job has ended."""
    assert s.head is not None
    yield Finish(
        "the job had ended before this process joined it: all groups left after step "
        f"{s.head.step}; to train further, start a new job from a checkpoint",
        error="JobEnded",
    )


@action
def stop_mates_missing(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: this group has not become whole in time."""
    ranks = ", ".join(map(str, missing_mates(s, c)))
    yield Finish(
        f"no word from rank {ranks} of my group {c.me.group} within {c.timeouts['quorum']:g} s; "
        "the ranks of a group come and go together: start the whole group again",
        error="NotEnoughGroups",
    )


@action
def stop_no_epoch(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: the coordinator has not formed an epoch in time."""
    yield Finish(
        f"{coordinator(s)} gathers the acknowledgements, and formed no epoch within "
        f"{c.timeouts['quorum']:g} s; its own error says why",
        error="NoEpoch",
    )


@action
def stop_too_few(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: too few groups have joined in time."""
    rules = "".join(f", counted after {kind}({n})" for kind, n in c.rules)
    yield Finish(
        f"{len(whole_groups(s, c))} whole replica groups within {c.timeouts['quorum']:g} s, but "
        f"min_replica_size is {c.min_groups}{rules}; start the missing groups, or raise "
        "quorum_timeout",
        error="NotEnoughGroups",
    )


def _steps_held(s: Local, groups: list[list[Hello]]) -> str:
    """The step of each rank before the first epoch, if the ranks differ; else an empty text."""
    ranks = [h for group in groups for h in group]
    if s.head is not None or len({h.step for h in ranks}) < 2:
        return ""
    steps = ", ".join(f"{h.peer} step {h.step}" for h in ranks)
    return (
        f". The ranks have begun with different steps ({steps}): load the files of one step on all "
        "ranks"
    )


@action
def stop_no_state(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: there are enough groups, but none holds the job's newest state."""
    groups = whole_groups(s, c)
    step = base_of(s, groups).step
    yield Finish(
        f"no live replica group holds the state of the job at step {step}, and none came within "
        f"{c.timeouts['quorum']:g} s; start the job again, from a checkpoint if it has one; the "
        f"same job name may be used again{_steps_held(s, groups)}",
        error="NoState",
    )


@action
def stop_state_gone(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: no process holds the job's newest state, and none can provide it."""
    assert s.head is not None
    yield Finish(
        f"no process holds the state of the job at step {s.head.step} any more: each one that had "
        "it has ended, or its update failed; start the job again, from a checkpoint if it has one; "
        "the same job name may be used again",
        error="NoState",
    )


@action
def stop_diverged(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: replicas differ."""
    assert s.head is not None
    yield Finish(
        f"{s.head.cause}. Equal replicas must stay equal: look for parameters that are changed "
        "outside of the optimizer step, gradients that are used before their reduction is over or "
        "that take no part in one, values that differ between groups (seeds, data, environment), "
        "and faulty memory. Then start the job again from a checkpoint; the same job name may be "
        "used again",
        error="Diverged",
    )


@action
def stop_in_doubt(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: the bus stayed unreachable, and it is unknown whether the vote led to a COMMIT."""
    yield _without_bus(s, c, "in doubt: voted YES, decision unknown; ")


@action
def stop_without_bus(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: the bus stayed unreachable."""
    yield _without_bus(s, c)


def _without_bus(s: Local, c: Config, doubt: str = "") -> Effect:
    return Finish(
        f"{doubt}the bus was out of reach for {c.timeouts['bus_limit']:g} s or more after an "
        f"operation on it was given up, at step {s.step}, epoch {s.token.epoch}, txn {s.token.txn}",
        error="InDoubt",
    )

"""How a job ended where that is no violation and yet no good end: in words, with the mend. Pure.

Reads the moves of a history; the texts are for `fft audit` and `fft run`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fft.messages.effects import Finish
from fft.messages.protocol import Ballot, Peer, Record
from fft.protocol.equality import differing, odd_ones, tell
from fft.protocol.invariants import History

_NAMED = 8
"""Participants that a text names at most."""


def divergences(history: History) -> list[str]:
    """Each time that the states of replicas differed: after which step, who had which digest."""
    apart = [r for r, _ in history.records().values() if r.odd or r.diverged]
    return [_divergence(history, record) for record in sorted(apart, key=lambda r: r.n)]


def ended_by_divergence(history: History) -> bool:
    """Whether the job has ended so, nobody being able to tell whose state is right."""
    return any(record.diverged for record, _ in history.records().values())


def _divergence(history: History, record: Record) -> str:
    what = record.cause.removeprefix(f"{record.by}: ")
    odd = record.odd
    for move in history.all():
        votes = move.event.votes if isinstance(move.event, Ballot) else ()
        if move.before.token == record.token and (apart := differing(votes)):
            what = f"replicas differ after step {record.step}: {tell(apart)}"
            odd = odd or odd_ones(votes) or ()
            break
    names = ", ".join(map(str, odd))
    if not record.diverged:
        return f"{what}; the job went on, and the state of {names} was given up for that of most"
    whose = f"most agree, and {names} differ" if odd else "nobody has a majority"
    return f"{what}; {whose}, and the job ended with Diverged"


def without_state(history: History) -> str | None:
    """The end of a job whose state was nowhere any more (``NoState``); None: it did not end so."""
    records = [record for record, _ in history.records().values()]
    last_commit = max((r.n for r in records if r.kind == "commit"), default=0)
    ended: list[Peer] = []
    step = 0
    for peer, reached in _stopped_without_state(history):
        if reached is None or reached.n >= last_commit:
            ended.append(peer)
            step = reached.step if reached is not None else 0
    if not ended:
        return None
    more = f" and {len(ended) - _NAMED} more" if len(ended) > _NAMED else ""
    names = ", ".join(map(str, sorted(ended)[:_NAMED])) + more
    return f"{names} ended with NoState: {about_no_state(step if last_commit else None)}"


def _stopped_without_state(history: History) -> Iterator[tuple[Peer, Record | None]]:
    """Who stopped so, and the newest record that it knew."""
    for move in history.all():
        for effect in move.out.effects:
            if isinstance(effect, Finish) and effect.error == "NoState":
                yield move.peer, move.after.head


def about_no_state(step: int | None) -> str:
    """What ``NoState`` means and what to do; ``step``: the last committed; None: there is none."""
    if step is None:
        return (
            "all processes that had the weights which the job began with were gone before a step "
            "was committed, and other processes have other weights. No work is lost: start the "
            "job again as it was started (from the same checkpoint, if from one); with "
            "init_sync=False, if all groups build equal weights by themselves, new processes can "
            "go on without that. Look first for why the processes were gone"
        )
    return (
        f"all processes that had the state of step {step}, the last that was committed, are gone; "
        "start the job again, and go on from a checkpoint; its name can stay"
    )

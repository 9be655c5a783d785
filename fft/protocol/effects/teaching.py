"""Effects for teaching specs: a protocol without the register.

Wrong on purpose: two participants can have different decisions of one txn. `fft check` shows how
(fsm_specs/teaching, fft/prove/mutants.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fft.messages.causes import CauseCode
from fft.messages.effects import Broadcast, Decide, Effect
from fft.messages.protocol import Ballot, Decision, Event, Record
from fft.protocol.effects.base import action
from fft.protocol.effects.register import abort_record, commit_record
from fft.protocol.forming import next_epoch
from fft.protocol.state import Config, Local


def _unwritten(s: Local, record: Record) -> Record:
    assert s.epoch is not None, "a txn exists only in an epoch"
    # Without a register no author wins: equal decisions of different authors must be equal.
    return replace(record, by=s.epoch.by, cause="", code=CauseCode.NONE, accused=())


def _assume(s: Local, record: Record) -> None:
    s.head, s.proposed = _unwritten(s, record), False


@action
def assume_commit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Assume COMMIT without asking the register or any participant. Wrong on purpose."""
    record = replace(commit_record(s, c, ()), change=False, leavers=(), last=False)
    _assume(s, record)
    return ()


@action
def assume_abort(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Assume ABORT without asking the register or any participant. Wrong on purpose."""
    _assume(s, abort_record(s, c))
    return ()


@action
def tell_commit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Decide COMMIT by a broadcast, without the register. Wrong on purpose."""
    assert isinstance(event, Ballot)
    yield Broadcast(Decision(_unwritten(s, commit_record(s, c, event.votes))))


@action
def tell_abort(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Decide ABORT by a broadcast, without the register. Wrong on purpose."""
    yield Broadcast(Decision(_unwritten(s, abort_record(s, c))))


@action
def succeed_epoch(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose the next epoch as the successor of this one, because the register holds no decision.

    Outside every epoch it succeeds the last record, as usual.
    """
    proposal = next_epoch(s, c)
    assert proposal is not None, "the row is guarded by epoch_possible"
    s.proposed = True
    yield Decide(s.epoch or s.head, proposal)

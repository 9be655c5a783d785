"""The flow of the data between scopes: what follows from what is known of the others. Pure.

It goes by slices of the data, which both scopes count alike: a skipped step takes its slices as any
other, and scopes may have unlike groups for a while.
"""

from __future__ import annotations

from fft.messages.protocol import Record, Seen
from fft.protocol.elsewhere import Elsewhere
from fft.protocol.state import Config, Local, data_after, participants


def _begun_at(s: Local) -> Local | Record:
    return s.epoch if s.epoch is not None and s.token.txn == 1 else s


def slices_due(s: Local, c: Config) -> tuple[int, int]:
    """The present txn takes the slices from the first of these to before the second."""
    at = _begun_at(s)
    return at.cursor, data_after(s, c, at).cursor


def step_due(s: Local) -> int:
    """Committed steps before the present txn."""
    return _begun_at(s).step


def seen(s: Local) -> tuple[Seen, ...]:
    """What my vote tells of other scopes."""
    return tuple(e.seen for e in s.elsewhere)


def held_for(s: Local, c: Config) -> Elsewhere | None:
    """The scope that must take more before the present txn may be computed; None: none."""
    if not s.elsewhere:
        return None
    first, after = slices_due(s, c)
    return next((e for e in s.elsewhere if not e.seen.allows(first, after)), None)


def needed_of(s: Local, c: Config, other: Elsewhere) -> int:
    """How many slices ``other`` must have taken before the present txn may be computed."""
    first, after = slices_due(s, c)
    return after if not other.ahead else first + 1 - other.ahead * other.takers


def ended_before(s: Local, c: Config) -> Elsewhere | None:
    """The scope that the present txn is held for, if all groups have left it; None: it goes on."""
    other = held_for(s, c)
    return other if other is not None and other.has_ended else None


def data_end(s: Local, cursor: int, groups: int) -> bool:
    """Whether a scope that this one follows has ended, with too few slices from ``cursor`` on for a
    txn of ``groups``."""
    return any(e.has_ended and cursor + groups > e.cursor for e in s.elsewhere if not e.ahead)


def is_last(s: Local, c: Config) -> bool:
    """Whether no txn can come after the present one: what this scope follows has ended."""
    return bool(s.elsewhere) and data_end(s, slices_due(s, c)[1], participants(s, c))


def has_left_well(s: Local) -> bool:
    """Whether I am out, with the state of the newest decision."""
    return s.role == "terminal" and s.head is not None and s.lineage == s.head.lineage


def may_leave(s: Local, group: str) -> bool:
    """Whether a group that is asked to leave may: it leaves scopes in the order of the flow.

    Those that it follows may need steps of this one before they can commit their last.
    """
    return not any(group in e.groups for e in s.elsewhere if e.ahead == 0)

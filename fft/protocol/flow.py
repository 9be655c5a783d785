"""The flow of the data between scopes: what is known of the others, and what follows. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fft.messages.protocol import Seen

if TYPE_CHECKING:
    from fft.protocol.state import Local


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another scope that the flow of the data binds mine to, as far as I know it."""

    scope: str
    ahead: int
    """My scope may commit up to so many steps more than that one has; 0: it follows that one."""
    n: int = 0
    """Of its newest record that I know; 0: none."""
    version: int = 0
    groups: tuple[str, ...] = ()
    """Groups in it, but for those that leave it."""


def next_version(s: Local) -> int:
    """Committed steps after the present txn, if it is no skip."""
    at = s.epoch if s.epoch is not None and s.token.txn == 1 else s
    return at.step + 1


def seen(s: Local) -> tuple[Seen, ...]:
    """What my vote tells of other scopes."""
    return tuple(Seen(e.scope, e.version, e.ahead) for e in s.elsewhere)


def held_for(s: Local) -> Elsewhere | None:
    """The scope that must commit more before the present txn may be computed; None: none."""
    version = next_version(s)
    return next((e for e in s.elsewhere if version > e.version + e.ahead), None)


def ended_before(s: Local) -> Elsewhere | None:
    """The scope that the present txn is held for, if all groups have left it; None: it goes on."""
    other = held_for(s)
    return other if other is not None and other.n and not other.groups else None


def may_leave(s: Local, group: str) -> bool:
    """Whether a group that is asked to leave may: it leaves scopes in the order of the flow.

    Those that it follows may need steps of this one before they can commit their last.
    """
    return not any(group in e.groups for e in s.elsewhere if e.ahead == 0)

"""The positions of the scopes to which the data flow binds a participant's own scope. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fft.messages.protocol import ScopeRecord, Seen


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another scope to which the data flow binds this one, as far as it is known here."""

    scope: str
    ahead: int
    """Number of the other scope's txns that this scope may be ahead; 0 if this scope follows it."""
    n: int = 0
    """Number of its newest known record, or 0."""
    cursor: int = 0
    takers: int = 1
    """As in ``Seen``, from the record that lets this scope proceed furthest. Before the scope has
    begun, its minimum."""
    groups: tuple[str, ...] = ()
    """Groups in it by the newest record, without those that leave with that record."""

    @property
    def seen(self) -> Seen:
        """The position of the scope, as a vote reports it."""
        return Seen(self.scope, self.cursor, self.ahead, self.takers)

    @property
    def has_ended(self) -> bool:
        """Whether all groups have left the scope, so that it takes no more slices."""
        return self.takers == 0

    def after(self, record: ScopeRecord) -> Elsewhere:
        """Return the same scope with a newer record.

        A permission is never revoked, not even by a record of more groups than are left.
        """
        new = replace(self, n=record.n, groups=record.groups)
        further = replace(new, cursor=record.cursor, takers=record.takers)
        is_further = further.has_ended or further.seen.reach >= self.seen.reach
        return further if is_further else new

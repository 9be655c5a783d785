"""What is known of other scopes, which the flow of the data binds mine to. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fft.messages.protocol import ScopeRecord, Seen


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another scope that the flow of the data binds mine to, as far as I know it."""

    scope: str
    ahead: int
    """My scope may begin so many of that one's txns ahead of it; 0: it follows that one."""
    n: int = 0
    """Of its newest record that I know; 0: none."""
    cursor: int = 0
    takers: int = 1
    """As in ``Seen``, from the record that lets my scope go furthest. Of a scope that has not
    begun: what it will have at least."""
    groups: tuple[str, ...] = ()
    """Groups in it, but for those that leave it, by the newest record."""

    @property
    def seen(self) -> Seen:
        """What a vote tells of it."""
        return Seen(self.scope, self.cursor, self.ahead, self.takers)

    @property
    def has_ended(self) -> bool:
        """All groups have left it: it takes nothing any more."""
        return self.takers == 0

    def after(self, record: ScopeRecord) -> Elsewhere:
        """The same, with a newer record. What was allowed stays allowed, also by a record of more
        groups than are left."""
        new = replace(self, n=record.n, groups=record.groups)
        further = replace(new, cursor=record.cursor, takers=record.takers)
        is_further = further.has_ended or further.seen.reach >= self.seen.reach
        return further if is_further else new

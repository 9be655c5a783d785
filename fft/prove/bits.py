"""What a participant's memory really holds, followed beside the core. Pure.

The core only tracks a lineage: what the state *should* be. A modelled main thread carries one of
these and does to it what the real one does to tensors, so that a wrong order of effects shows as
different digests at equal lineage (invariant ``replicas_equal``).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from fft.messages.protocol import Peer, Token

CORRUPT = "corrupted"


def _mix(*parts: object) -> str:
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class Bits:
    """``content`` stands for parameters, optimizer state and buffers as committed txns left them.

    ``open`` is the txn whose attempt has touched buffers, RNG and gradients since they were last
    put back; ``stain`` names whoever's fault makes that attempt's gradients differ from the peers'.
    ``marks`` tell what got into the content that no commit put there: (what, whose).
    """

    content: str
    open: Token | None = None
    stain: Peer | None = None
    marks: tuple[tuple[str, Peer], ...] = ()

    @property
    def digest(self) -> str:
        """What a real digest would tell apart. Begins with a participant where it is not clean."""
        if not self.marks:
            return self.content
        return f"{self.marks[0][1]}:{self.content}:{'+'.join(what for what, _ in self.marks)}"

    def begin(self, who: Peer, token: Token) -> Bits:
        """The body starts to compute. What an earlier attempt left behind stays in for good."""
        marks = self.marks if self.open is None else (*self.marks, ("left over", who))
        return Bits(self.content, token, None, marks)

    def spoil(self, who: Peer) -> Bits:
        """A reduction failed or was skipped: these gradients are not those of the peers."""
        return replace(self, stain=who)

    def restored(self) -> Bits:
        """The start of the step is back."""
        return Bits(self.content, marks=self.marks)

    def applied(self, who: Peer, token: Token) -> Bits:
        """The optimizer step is done, with the gradients that are there."""
        marks = self.marks
        if self.open != token:
            marks = (*marks, ("gradients of another txn", who))
        elif self.stain is not None:
            marks = (*marks, ("spoilt gradients", self.stain))
        return Bits(_mix(self.content, token.epoch, token.txn), marks=marks)

    def skipped(self, token: Token) -> Bits:
        """The txn is committed as a skip: what belongs to one (the scaler's word) is done."""
        return Bits(_mix(self.content, token.epoch, token.txn, "skip"), marks=self.marks)

    def corrupted(self, who: Peer) -> Bits:
        """Something has changed the content that nobody was to change."""
        return replace(self, marks=(*self.marks, (CORRUPT, who)))

    @property
    def told(self) -> str | None:
        """The digest after a step; none while only votes could tell that the state is corrupted."""
        return None if any(what == CORRUPT for what, _ in self.marks) else self.digest

    def torn(self, who: Peer) -> Bits:
        """A step or a fetch was half done."""
        return Bits(self.content, marks=(*self.marks, ("torn", who)))

    def fetched(self, source: Bits) -> Bits:
        """A peer's state, as it is there now."""
        return Bits(source.content, marks=source.marks)

    def learnt(self, source: Bits) -> Bits:
        """A peer's state under the gradients that are here: those of the txn that is open."""
        return replace(self, content=source.content, marks=source.marks)

"""Model the real contents of a participant's memory, beside the core. Pure.

The core only tracks a lineage: what the state *should* be. A modelled main thread carries a `Bits`
and applies to it what the real main thread does to tensors. So a wrong order of effects shows as
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
    """The modelled state. ``content`` stands for the parameters, optimizer state and buffers.

    ``open`` is the txn whose attempt has changed buffers, RNG and gradients since they were last
    restored. ``stain`` names the participant whose fault makes that attempt's gradients differ from
    the peers'. ``marks`` records changes of the content that no commit made: (change, participant).
    """

    content: str
    open: Token | None = None
    stain: Peer | None = None
    marks: tuple[tuple[str, Peer], ...] = ()
    flipped: bool = False
    """The stain is a fault of the memory that no operation reports, after the reductions."""

    @property
    def digest(self) -> str:
        """Digest of the state, like a real one. It begins with a participant if it has marks."""
        if not self.marks:
            return self.content
        return f"{self.marks[0][1]}:{self.content}:{'+'.join(what for what, _ in self.marks)}"

    @property
    def gradients(self) -> str:
        """Digest of the reduced gradients; it begins with the participant whose fault stains
        them."""
        return "sum" if self.stain is None else f"{self.stain}:flipped"

    def begin(self, who: Peer, token: Token) -> Bits:
        """Start the step function. Leftovers of an earlier attempt become permanent."""
        marks = self.marks if self.open is None else (*self.marks, ("left over", who))
        return Bits(self.content, token, None, marks)

    def spoil(self, who: Peer) -> Bits:
        """Mark a failed or skipped reduction: these gradients are not those of the peers."""
        return replace(self, stain=who)

    def flip(self, who: Peer) -> Bits:
        """Change a reduced gradient in the memory of this rank, which continues."""
        return replace(self, stain=who, flipped=True)

    def restored(self) -> Bits:
        """Return to the start of the step."""
        return Bits(self.content, marks=self.marks)

    def applied(self, who: Peer, token: Token) -> Bits:
        """Finish the optimizer step, with the gradients that are there."""
        marks = self.marks
        if self.open != token:
            marks = (*marks, ("gradients of another txn", who))
        elif self.stain is not None:
            marks = (*marks, (CORRUPT if self.flipped else "spoilt gradients", self.stain))
        return Bits(_mix(self.content, token.epoch, token.txn), marks=marks)

    def skipped(self, token: Token) -> Bits:
        """Commit the txn as a skip, which still updates the gradient scaler."""
        return Bits(_mix(self.content, token.epoch, token.txn, "skip"), marks=self.marks)

    def corrupted(self, who: Peer) -> Bits:
        """Change the content wrongly."""
        return replace(self, marks=(*self.marks, (CORRUPT, who)))

    @property
    def told(self) -> str | None:
        """Digest reported after a step; None if the state is corrupted, which only votes show."""
        return None if any(what == CORRUPT for what, _ in self.marks) else self.digest

    def torn(self, who: Peer) -> Bits:
        """Mark a step or a fetch as half done."""
        return Bits(self.content, marks=(*self.marks, ("torn", who)))

    def fetched(self, source: Bits) -> Bits:
        """Take over a peer's present state."""
        return Bits(source.content, marks=source.marks)

    def learnt(self, source: Bits) -> Bits:
        """Take over a peer's state, and keep the gradients of the txn that is open here."""
        return replace(self, content=source.content, marks=source.marks)

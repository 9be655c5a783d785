"""What one participant has seen of the head register: two values that cannot both be its own.

Pure. A bus that keeps its contract never shows them. One whose memory was lost, or into which
somebody writes who has no job token, can show a register that went back, and so let two
participants decide one txn differently. Whoever sees both sides must trust neither.
"""

from __future__ import annotations

from dataclasses import replace

from fft.messages.protocol import Record, next_lineage

_KEPT = 64
"""Records remembered: a word that is later than so many decisions is no longer compared."""


class Witness:
    """Remembers the newest records. For one thread."""

    def __init__(self) -> None:
        self._seen: dict[int, Record] = {}

    def against(self, record: Record) -> tuple[str, Record] | None:
        """Why the record cannot be, after what was seen, and the record that it contradicts.

        None: it can be; it is remembered.
        """
        for n in (record.n, record.n - 1, record.n + 1):
            known = self._seen.get(n)
            if known is not None and (why := _contradiction(known, record)):
                return why, known
        self._seen[record.n] = record
        while len(self._seen) > _KEPT:
            del self._seen[min(self._seen)]
        return None


def _contradiction(known: Record, record: Record) -> str:
    if known.n == record.n:
        same = known == record
        return "" if same else f"two values for record {record.n}: {_text(known)}, {_text(record)}"
    first, then = sorted((known, record), key=lambda r: r.n)
    if _follows(first, then):
        return ""
    return f"record {then.n} ({_text(then)}) does not go on from {first.n} ({_text(first)})"


def _follows(first: Record, then: Record) -> bool:
    """Whether the later record has the state that the one before it leads to."""
    lineage = first.lineage
    if then.kind == "commit":
        lineage = next_lineage(lineage, then.token, then.step, then.cursor, then.skip)
    return then.lineage == lineage and then.token >= replace(first, txn=0).token


def _text(record: Record) -> str:
    return f"{record.kind} {record.epoch}.{record.txn} by {record.by}"

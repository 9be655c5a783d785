"""Detection of contradicting values of the head register, from the values that one participant saw.

Pure. A bus that keeps its contract never returns contradicting values. A bus that lost its memory,
or that a process without the job token writes to, can show a register that went back; two
participants may then decide one txn differently. A participant that sees both values must trust
neither.
"""

from __future__ import annotations

from bisect import bisect_left

from fft.messages.protocol import Record, Token, next_lineage

_KEPT = 64
"""Number of records remembered. Older ones are not compared with new ones."""


class Witness:
    """Remembers the newest records. Used by one thread only."""

    def __init__(self) -> None:
        self._seen: dict[int, Record] = {}

    def against(self, record: Record) -> tuple[str, Record] | None:
        """Compare a record with those seen before, and remember it if it contradicts none.

        Returns:
            None if the record is possible, else the reason and the record that it contradicts.
        """
        numbers = sorted(self._seen)
        at = bisect_left(numbers, record.n)
        # equal to one seen before, it fits the neighbours as that one did
        near = [record.n] if record.n in self._seen else numbers[max(0, at - 1) : at + 1]
        for known in map(self._seen.__getitem__, near):
            if why := _contradiction(known, record):
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
    """Whether the later record can come from the earlier one.

    Its epoch is not older. If it is the next record, it has the state that the earlier one leads
    to.
    """
    if then.token < Token(first.epoch, 0):
        return False
    if then.n > first.n + 1:
        return True
    lineage = first.lineage
    if then.kind == "commit":
        lineage = next_lineage(lineage, then.token, then.step, then.cursor, then.skip)
    return then.lineage == lineage and then.step >= first.step


def _text(record: Record) -> str:
    return f"{record.kind} {record.epoch}.{record.txn} by {record.by}"

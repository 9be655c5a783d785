"""Tests of the witness: contradicting values of the head register are found in every order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fft.messages.protocol import Peer, Record, next_lineage
from fft.protocol.witness import Witness

ME = Peer("0", 0, 1)


def chain(kinds: str) -> list[Record]:
    """Return the records of a register that goes on by (e)pochs, (c)ommits, (s)kips, (a)borts."""
    records = [Record(1, "epoch", 1, 0, 0, "start", 0, 0, ME)]
    for kind in kinds:
        last = records[-1]
        if kind == "e":
            made = replace(last, kind="epoch", epoch=last.epoch + 1, txn=0, skip=False)
        elif kind == "a":
            made = replace(last, kind="abort", txn=last.txn + 1, skip=False)
        else:
            made = replace(last, kind="commit", txn=last.txn + 1, skip=kind == "s")
            made = replace(made, step=last.step + (kind == "c"), cursor=last.cursor + 2)
            line = next_lineage(last.lineage, made.token, made.step, made.cursor, made.skip)
            made = replace(made, lineage=line)
        records.append(replace(made, n=last.n + 1))
    return records


KINDS = st.text("ecsa", min_size=2, max_size=12)


@settings(max_examples=200, deadline=None)
@given(KINDS, st.data())
def test_witness_accepts_one_register_in_any_order(kinds: str, data: st.DataObject) -> None:
    records, witness = chain(kinds), Witness()
    for record in data.draw(st.permutations([*records, *records[:2]])):
        assert witness.against(record) is None


CHANGES = {
    "lineage": lambda record: replace(record, lineage=record.lineage + "x"),
    "another group's state": lambda record: replace(
        record, kind="commit", cursor=record.cursor + 1
    ),
    "older epoch": lambda record: replace(record, epoch=0),
    "older step": lambda record: replace(record, step=record.step - 1),
}


@settings(max_examples=200, deadline=None)
@given(KINDS, st.data(), st.sampled_from(sorted(CHANGES)), st.booleans())
def test_witness_rejects_a_record_that_does_not_follow(
    kinds: str, data: st.DataObject, how: str, is_first: bool
) -> None:
    """Either of two successive records may be the false one, and either may arrive first."""
    known, true = data.draw(st.sampled_from(list(pairwise(chain("c" + kinds)))[1:]))
    false = CHANGES[how](true)
    witness = Witness()
    assert witness.against(false if is_first else known) is None
    found = witness.against(known if is_first else false)
    assert found is not None and "does not go on from" in found[0]


def test_witness_rejects_a_register_that_went_back_between_two_reads() -> None:
    records, witness = chain("cececa"), Witness()
    assert witness.against(records[3]) is None
    assert witness.against(replace(records[-1], epoch=1)) is not None
    assert witness.against(records[-1]) is None, "the false record is not remembered"

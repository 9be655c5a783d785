"""The table is looked up as the library that holds it would."""

from __future__ import annotations

from itertools import product

import pytest

from fft.protocol.load import load_machine, load_spec
from fft.protocol.table import EXIT_ROWS, Table, Turn


@pytest.mark.parametrize(
    "name",
    [
        "hsdp",
        "main_thread",
        "fsm_specs/teaching/local_commit.yaml",
        "fsm_specs/teaching/plain_votes.yaml",
    ],
)
def test_every_look_up_takes_the_row_that_the_library_takes(name: str) -> None:
    table = Table(load_machine(name))
    taken = set()
    for state, event in sorted(table._rows):
        named = sorted({g for row in table._candidates[state, event] for g in row.guard})
        for answers in product((False, True), repeat=len(named)):
            holds = dict(zip(named, answers, strict=True)).__getitem__
            own = table.look_up(Turn(state, holds), event)
            library = table.trigger(Turn(state, holds), event)
            assert own.row is library.row
            assert (own.state, own.guards) == (library.state, library.guards)
            taken.add(id(own.row))
    assert len(taken) > 10


def test_what_the_table_does_not_have_changes_nothing() -> None:
    table = Table(load_spec("hsdp"))
    for event in (EXIT_ROWS, "prepared", "no such event"):
        turn = table.look_up(Turn("EXIT", lambda _: True), event)
        assert (turn.row, turn.state, turn.guards) == (None, "EXIT", {})

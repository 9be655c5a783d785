"""Tests that the checker's look-up takes the same rows as the library's machine in production."""

from __future__ import annotations

import logging
from itertools import product

import pytest

from fft.protocol.load import load_machine, load_spec
from fft.protocol.table import EXIT_ROWS, LookupTable, Table, Turn

SPECS = ["async", "ddp", "diloco", "hsdp", "hsdp_diloco", "local_sgd", "pipeline", "pipeline_ahead"]
TEACHING = ["fsm_specs/teaching/local_commit.yaml", "fsm_specs/teaching/plain_votes.yaml"]


@pytest.mark.parametrize("name", [*SPECS, *TEACHING, "main_thread"])
def test_look_up_takes_the_row_that_the_library_takes(name: str) -> None:
    spec = load_machine(name)
    library, look_up = Table(spec), LookupTable(spec)
    taken = set()
    for state, event in sorted(library._rows):
        rows = library._candidates[state, event]
        named = sorted({g.removeprefix("not ") for row in rows for g in row.guard})
        for answers in product((False, True), repeat=len(named)):
            holds = dict(zip(named, answers, strict=True)).__getitem__
            expected = library.take(Turn(state, holds), event)
            found = look_up.take(Turn(state, holds), event)
            assert found == expected and found.row is expected.row
            taken.add(id(found.row))
    assert len(taken) > 10


@pytest.mark.parametrize("kind", [Table, LookupTable])
def test_event_without_a_row_changes_nothing(kind: type[Table]) -> None:
    table = kind(load_spec("hsdp"))
    for event in (EXIT_ROWS, "prepared", "no such event"):
        turn = table.take(Turn("EXIT", lambda _: True), event)
        assert (turn.row, turn.state, turn.guards) == (None, "EXIT", {})


def test_library_logs_nothing_for_scripts_that_log_at_info(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torchtitan, for one, logs at INFO through the root logger."""
    with caplog.at_level(logging.INFO):
        assert Table(load_spec("hsdp")).take(Turn("INIT", lambda _: False), "start").row is not None
    assert not caplog.records

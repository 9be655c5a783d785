"""Tests that a table takes the rows that the library's own machine would take."""

from __future__ import annotations

import logging
from functools import partial
from itertools import product

import pytest
from transitions import EventData, Machine

from fft.protocol.load import load_machine, load_spec
from fft.protocol.spec import MachineSpec, Row
from fft.protocol.table import EXIT_ROWS, Table, Turn

SPECS = ["async", "ddp", "diloco", "hsdp", "hsdp_diloco", "local_sgd", "pipeline", "pipeline_ahead"]
TEACHING = ["fsm_specs/teaching/local_commit.yaml", "fsm_specs/teaching/plain_votes.yaml"]


def plain_machine(spec: MachineSpec) -> tuple[Machine, dict[tuple[str, str], list[Row]]]:
    """Return the rows in the library's own classes, and the rows of each state and event."""
    options = {"model": None, "initial": spec.initial, "auto_transitions": False}
    machine = Machine(states=list(spec.leaves), send_event=True, **options)
    rows = {(n, e): rows for n, leaf in spec.leaves.items() for e, rows in leaf.on.items()}
    rows |= {(name, EXIT_ROWS): leaf.exit for name, leaf in spec.leaves.items() if leaf.exit}
    for (state, event), candidates in rows.items():
        for row in candidates:
            asks = [partial(ask, name) for name in row.guard]
            machine.add_transition(event, state, row.to, asks, before=partial(take, row))
    return machine, rows


def ask(name: str, event: EventData) -> bool:
    holds: bool = event.model.ask(name)
    return holds


def take(row: Row, event: EventData) -> None:
    event.model.row = row


@pytest.mark.parametrize("name", [*SPECS, *TEACHING, "main_thread"])
def test_table_takes_the_row_that_the_library_takes(name: str) -> None:
    spec = load_machine(name)
    table, (library, rows) = Table(spec), plain_machine(spec)
    taken = set()
    for (state, event), candidates in sorted(rows.items()):
        named = sorted({g.removeprefix("not ") for row in candidates for g in row.guard})
        for answers in product((False, True), repeat=len(named)):
            holds = dict(zip(named, answers, strict=True)).__getitem__
            expected = Turn(state, holds)
            library.events[event].trigger(expected)
            found = table.take(Turn(state, holds), event)
            assert found == expected and found.row is expected.row
            taken.add(id(found.row))
    assert len(taken) > 10


def test_event_without_a_row_changes_nothing() -> None:
    table = Table(load_spec("hsdp"))
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

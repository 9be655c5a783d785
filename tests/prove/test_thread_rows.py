"""Tests that checker and simulator run the main thread's table and catch missing or wrong rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from fft.engine import executor
from fft.errors import ConfigError
from fft.protocol.load import load_spec, load_thread, parse_thread
from fft.protocol.main_thread import ThreadTable
from fft.prove.bounds import Bounds
from fft.prove.checker import search
from fft.prove.planting import small
from fft.prove.simulator.faults import CALM, Weather
from fft.prove.simulator.run import run_seed

HSDP = load_spec("hsdp")
Place = tuple[str, str, int]
START = small(formed=False, alike=False, fault=1)
JOIN = small(crash=1, restart=1)
BOUNDS = {
    ("CONNECTING", "heal_failed", 0): small(formed=False, alike=False, commits=0, heal=1),
    ("CONNECTING", "restore", 0): small(formed=False, alike=False, commits=0, heal=1),
    ("BODY.learning", "healed", 0): JOIN,
    ("BODY.learning", "heal_failed", 0): small(crash=1, restart=1, heal=1),
}
"""Bounds in which the loss of a row shows, if not in ``START``."""
LATE = ("IDLE.ready", "start_txn", 0)
"""The row for a loss of the state that the main thread itself notices; simulated, not searched."""
UNSEEN = {LATE, ("IDLE.learning", "start_txn", 0), ("RESTORING.mid_fetch", "heal_failed", 0)}
"""Rows whose loss the search does not catch: those for such a loss, which a process that is
learning cannot have, and one for a rollback that ends a fetch after its first write, whose absence
only reduces what can go wrong."""


def owners(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return (name, …) of everything that has rows."""
    yield "common", raw["common"]
    for name, state in raw["states"].items():
        yield name, state
        for sub, inner in state["states"].items():
            yield f"{name}.{sub}", inner


def places() -> list[Place]:
    return [
        (name, event, i)
        for name, owner in owners(load_thread().model_dump())
        for event, rows in owner["on"].items()
        for i in range(len(rows))
    ]


def without(place: Place) -> ThreadTable | None:
    """Return the table without a row, or None if its own checks refuse it."""
    name, event, i = place
    raw = load_thread().model_dump()
    on = dict(owners(raw))[name]["on"]
    del on[event][i]
    if not on[event]:
        del on[event]
    try:
        return ThreadTable(parse_thread(yaml.safe_dump(raw), "x.yaml"))
    except ConfigError:
        return None


@pytest.mark.long
@pytest.mark.parametrize("place", [p for p in places() if p not in UNSEEN], ids=str)
def test_a_row_that_is_missing_is_caught(place: Place) -> None:
    if (thread := without(place)) is None:
        return
    bounds: Bounds = BOUNDS.get(place, START)
    violation = search(HSDP, bounds, thread=thread)[1].violation
    assert violation is not None
    assert violation.name in ("protocol", "eventually")


def test_the_checks_refuse_some_and_the_search_is_for_the_others() -> None:
    refused = [place for place in places() if without(place) is None]
    assert ("common", "finish", 0) in refused and ("WAITING", "apply", 0) in refused
    searched = set(places()) - {*refused, *UNSEEN}
    assert searched >= BOUNDS.keys() and len(searched) > 10


def test_simulator_reports_an_event_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_seed(7, HSDP, CALM).violations == ()
    table = without(("CONNECTING.current", "healed", 0))
    assert table is not None
    monkeypatch.setattr(executor, "shipped_thread", lambda: table)
    (violation,) = run_seed(7, HSDP, CALM).violations
    assert violation.name == "protocol_error"
    assert "CONNECTING.current, which has no row for 'healed'" in violation.text


def test_simulator_catches_a_lost_state_that_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weather = Weather({}, {"noticed_late": 0.3})
    results = [run_seed(seed, HSDP, weather) for seed in range(8)]
    assert not any(result.violations for result in results)
    assert sum(result.faults.get("noticed_late", 0) for result in results) > 3
    table = without(LATE)
    assert table is not None
    monkeypatch.setattr(executor, "shipped_thread", lambda: table)
    found = {v.name for seed in range(8) for v in run_seed(seed, HSDP, weather).violations}
    assert "replicas_equal" in found

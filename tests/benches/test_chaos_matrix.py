"""Tests of the parts of `make chaos` that need no job: a complete matrix, and the rule for
growth."""

from __future__ import annotations

import pytest

from fft.messages.fault_plans import MODELS, PHASES, FaultPlan
from tests.acceptance.chaos.cases import LAYOUTS, Layout, suites
from tests.acceptance.chaos.samples import Series


def entry_kinds(layout: Layout) -> set[tuple[str, str | None]]:
    """Return the (kind, phase) of every fault of the matrix."""
    found = (entry for s in suites(layout) for case in s.cases for entry in case.entries)
    return {(entry["kind"], entry.get("phase")) for entry in found}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_fault_kind_is_covered_at_each_of_its_phases(layout: Layout) -> None:
    expected = {
        (kind, phase)
        for kind, model in MODELS.items()
        for phase in (layout.phases if "phase" in model.model_fields else (None,))
    }
    assert entry_kinds(layout) == expected


def test_all_phases_are_met_by_some_layout() -> None:
    assert {phase for layout in LAYOUTS.values() for phase in layout.phases} == set(PHASES)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_chaos_case_spares_group_0_and_has_a_unique_name(layout: Layout) -> None:
    cases = [case for s in suites(layout) for case in s.cases]
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        entries = [{"name": f"f{i}", "step": 0, **e} for i, e in enumerate(case.entries)]
        plan = FaultPlan.model_validate({"faults": entries})
        groups = {getattr(fault, "group", None) for fault in plan.faults}
        evicted = {place.partition(".")[0] for place in case.evict}
        assert case.entries or case.evict
        assert "0" not in groups | evicted, case.name
    whole = {case.place: case for case in cases if case.kind == "kill"}
    assert len(whole["1 rank"].entries) == 1
    largest = whole["all but one" if layout.groups > 2 else "1 group"]
    assert len(largest.entries) == (layout.groups - 1) * layout.ranks


def series(what: str, early: float, late: float) -> Series:
    return Series("trainer 0/0", what, early, late, early, late, early, late, 30)


def test_growth_beyond_the_bound_is_named_and_noise_is_not() -> None:
    assert series("rss_mib", 300, 314).steady
    assert not series("rss_mib", 300, 316).steady
    assert series("rss_mib", 40, 47).steady
    assert series("fds", 50, 54).steady and not series("fds", 50, 55).steady
    assert series("threads", 20, 10).steady, "less is no growth"
    assert series("bus_keys", 40, 48).steady and not series("bus_keys", 40, 49).steady

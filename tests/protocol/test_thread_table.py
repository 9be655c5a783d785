"""Tests of the main thread's table: its vocabulary is checked, and an event without a row is an
error."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fft.errors import ConfigError, ProtocolError
from fft.protocol.load import load_machine, load_spec, load_thread, parse_spec, parse_thread
from fft.protocol.main_thread import Reaction, shipped_thread
from fft.protocol.spec_checks import check_spec
from fft.protocol.vocabulary import COMMANDS, ENGINE, MAIN_THREAD, WORDS

TABLE = shipped_thread()
STATES = sorted(TABLE.spec.leaves)


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_thread(yaml.safe_dump(raw), "x.yaml")
    return str(caught.value)


def raw() -> dict[str, Any]:
    return load_thread().model_dump()


# --- the table ------------------------------------------------------------------------------------


def test_event_without_a_row_names_state_event_and_expected_events() -> None:
    expected = (
        "in BODY.whole, which has no row for 'applied'; expected: finish, prepared, restore, unw"
    )
    with pytest.raises(ProtocolError, match=expected):
        TABLE.react("BODY.whole", "applied")


def test_an_event_of_which_no_guard_holds_is_one_without_a_row() -> None:
    with pytest.raises(ProtocolError, match=r"BODY\.learning, which has no row for 'prepared'"):
        TABLE.react("BODY.learning", "prepared")
    assert TABLE.react("BODY.learning", "prepared", {"says_no"}).state == "WAITING"


@pytest.mark.parametrize("event", sorted(WORDS.union(COMMANDS.values())))
@pytest.mark.parametrize("state", STATES)
def test_events_are_ignored_only_if_the_table_lists_them(state: str, event: str) -> None:
    leaf = TABLE.spec.leaves[state]
    if event in leaf.ignore:
        assert TABLE.react(state, event) == Reaction(state)
    elif event in leaf.on:
        facts = {name for row in leaf.on[event] for name in row.guard} - {"torn"}
        assert TABLE.react(state, event, facts).state in TABLE.spec.leaves
    else:
        with pytest.raises(ProtocolError):
            TABLE.react(state, event)


def test_fact_without_a_guard_of_that_name_is_refused() -> None:
    with pytest.raises(ValueError, match="called fetch"):
        TABLE.react("IDLE.ready", "heal", {"fetch"})


def test_command_on_a_lost_state_leaves_the_thread_in_place() -> None:
    assert TABLE.react("IDLE.ready", "start_txn", {"torn"}) == ("IDLE.ready", ("refuse_txn",))
    assert TABLE.react("IDLE.ready", "heal", {"torn", "learns"}) == (
        "IDLE.ready",
        ("refuse_epoch",),
    )


# --- its checks -----------------------------------------------------------------------------------


def test_each_machine_is_held_to_its_own_names() -> None:
    thread, engine = load_thread(), load_spec("hsdp")
    assert check_spec(thread, MAIN_THREAD) == []
    assert check_spec(engine, ENGINE) == []
    assert any("unknown event 'start_txn'" in text for _, text in check_spec(thread, ENGINE))
    assert any("unknown role 'joining'" in text for _, text in check_spec(engine, MAIN_THREAD))


def test_machine_is_selected_by_its_file() -> None:
    assert load_machine("main_thread") == load_thread()
    assert load_machine("hsdp") == load_spec("hsdp")
    with pytest.raises(
        ConfigError, match=r"main_thread\.yaml:\d+: machine: Input should be 'engine'"
    ):
        load_spec("main_thread")
    with pytest.raises(ConfigError, match="machine: Input should be 'main_thread'"):
        parse_thread(yaml.safe_dump(load_spec("hsdp").model_dump()), "x.yaml")
    with pytest.raises(ConfigError, match="unknown role 'computing'"):
        spec = load_spec("hsdp").model_dump()
        spec["states"]["NORMAL"]["role"] = "computing"
        parse_spec(yaml.safe_dump(spec), "x.yaml")


def test_an_event_of_the_engine_is_none_of_the_main_threads() -> None:
    spec = raw()
    spec["states"]["WAITING"]["on"]["decision"] = [{"to": "APPLYING"}]
    assert "states.WAITING.on.decision: unknown event 'decision'" in refusal(spec)


def test_a_name_that_no_row_uses_is_one_that_was_forgotten() -> None:
    for kind, name, change in (
        ("event", "apply", lambda s: s["states"]["WAITING"]["on"].pop("apply")),
        ("event", "connected", lambda s: s["states"]["CONNECTING"]["states"]["learner"].pop("on")),
        ("guard", "fetches", lambda s: s["states"]["IDLE"]["on"]["heal"].pop(2)),
        ("effect", "leave", lambda s: s["common"]["on"]["finish"][0].pop("effects")),
    ):
        spec = raw()
        change(spec)
        assert f"no row has the {kind} {name!r}; give it one" in refusal(spec)


def test_finish_of_the_engine_is_handled_in_every_state() -> None:
    spec = raw()
    del spec["common"]["on"]["finish"]
    spec["states"]["IDLE"]["on"]["finish"] = [{"to": "OUT", "effects": ["leave"]}]
    assert "event 'finish' has no way out of APPLYING" in refusal(spec)


def test_there_is_nothing_that_would_try_a_deferred_event_again() -> None:
    spec = raw()
    spec["states"]["APPLYING"]["defer"]["restore"] = "later"
    assert "nobody tries 'restore' again; give it a row" in refusal(spec)


def test_a_state_that_no_row_leads_to_any_more_is_refused() -> None:
    spec = raw()
    spec["states"]["CONNECTING"]["states"]["learner"]["on"]["connected"][0]["to"] = "IDLE.ready"
    assert ".learning cannot be reached from IDLE.ready" in refusal(spec)


def test_thread_table_has_no_timers_and_no_sequences() -> None:
    for key, value in (
        ("timers", {"pause": {"default": 1.0, "doc": "x"}}),
        ("sequences", {"both": ["restore", "connect"]}),
    ):
        assert f"{key}: Dictionary should have at most 0 items" in refusal({**raw(), key: value})

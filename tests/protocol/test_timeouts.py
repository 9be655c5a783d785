"""The table of timeouts: given values are kept, defaults are fitted, contradictions refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given as example
from hypothesis import settings
from hypothesis import strategies as st

from fft.errors import ConfigError
from fft.protocol.load import load_spec
from fft.protocol.timeouts import (
    ARGUMENTS,
    HOST_LIMIT_S,
    Given,
    Timeout,
    bus_operation,
    from_env,
    from_pairs,
    resolve,
    rules_of,
    timers,
)

HSDP = load_spec("hsdp")
NAMES = sorted({*HSDP.timeouts, *ARGUMENTS})


BUSES = ("tcp://a:1/j", "nats://a:1,b:1,c:1/j")


def chosen(bus: str = BUSES[0], **seconds: float) -> dict[str, Timeout]:
    return resolve(HSDP, {name: Given(value, "test") for name, value in seconds.items()}, bus)


def test_the_defaults_fit_as_they_are() -> None:
    table = chosen()
    assert timers(HSDP, table) == HSDP.timeouts
    assert not [t for t in table.values() if "to fit" in t.origin]


def test_the_margin_of_a_drain_is_a_row_that_can_be_given() -> None:
    assert chosen()["drain_margin"].seconds == 5.0
    assert chosen(drain_margin=2.0)["drain_margin"].origin == "test"
    with pytest.raises(ConfigError, match="drain_margin is -1"):
        chosen(drain_margin=-1.0)


def test_the_silence_of_a_host_is_a_row_that_can_be_given() -> None:
    assert chosen()["host_limit"].seconds == HOST_LIMIT_S
    assert chosen(host_limit=2.0)["host_limit"].origin == "test"


def test_every_rule_speaks_of_a_row_of_the_table() -> None:
    spoken = {name for rule in rules_of(HSDP) for name in (rule.larger, rule.smaller)}
    assert spoken <= set(chosen(bus=BUSES[1]))


@settings(deadline=None)
@example(st.sampled_from(NAMES), st.floats(1e-3, 1e5))
def test_given_timeout_is_kept_and_all_others_are_fitted(name: str, seconds: float) -> None:
    table = chosen(**{name: seconds})  # type: ignore[arg-type]
    assert table[name].seconds == seconds and table[name].origin == "test"
    assert all(rule.holds(table) for rule in rules_of(HSDP))


@settings(deadline=None)
@example(st.dictionaries(st.sampled_from(NAMES), st.floats(1e-3, 1e5)), st.sampled_from(BUSES))
def test_given_values_are_kept_or_refused_with_a_set_that_works(
    seconds: dict[str, float], bus: str
) -> None:
    try:
        table = chosen(bus, **seconds)
    except ConfigError as error:
        advice = str(error).splitlines()[-1].removeprefix("these would work: ")
        shown = from_pairs(advice.split(", "))
        chosen(bus, **{name: value.seconds for name, value in shown.items()})
    else:
        assert all(rule.holds(table) for rule in rules_of(HSDP))
        assert all(table[name].seconds == value for name, value in seconds.items())


def test_torchfts_arguments_are_those_of_the_timers_that_they_mean() -> None:
    table = chosen(timeout=5, quorum_timeout=20, connect_timeout=3)
    found = {n: table[n].seconds for n in ("vote_window", "quorum", "ready_window")}
    assert found == {"vote_window": 5, "quorum": 20, "ready_window": 20}
    assert table["bus_operation"].seconds == 3


def test_long_transfer_widens_the_barrier_window() -> None:
    table = chosen(timeout=600)
    assert table["ready_window"].seconds == 600
    assert table["ready_window"].origin == "torchft's default, raised to fit timeout"


def test_bus_that_elects_leaders_gets_failover_time() -> None:
    assert "bus_failover" not in chosen()
    table = chosen(bus=BUSES[1])
    assert table["bus_operation"].seconds == bus_operation(BUSES[1]) == 20
    assert table["bus_limit"].seconds == 40
    assert table["bus_limit"].origin == "spec hsdp, raised to fit bus_operation"
    assert chosen(bus=BUSES[1], connect_timeout=5)["bus_operation"].seconds == 5
    with pytest.raises(ConfigError, match=r"bus_limit = 15 s .* 2 x bus_failover = 10 s") as caught:
        chosen(bus=BUSES[1], bus_limit=15)
    assert str(caught.value).endswith("these would work: bus_limit=20")


def test_a_contradiction_names_both_values_the_reason_and_a_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(bus_limit=3, bus_retry=1)
    assert "bus_limit = 3 s (test) must be at least 4 x bus_retry = 1 s (test)" in str(caught.value)
    assert str(caught.value).endswith("these would work: bus_retry=1, bus_limit=4")


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("vote=1", "unknown name 'vote'; known: ack_window"),
        ("pause=0", "pause is 0 s (--set); give a positive number"),
        ("pause=inf", "pause is inf s"),
        ("pause=nan", "pause is nan s"),
        ("pause", "write NAME=SECONDS"),
        ("pause=soon", "pause='soon'"),
    ],
)
def test_invalid_timeout_is_refused(pair: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        resolve(HSDP, from_pairs([pair]))


def test_torchfts_variables_are_read_under_their_names() -> None:
    found = from_env({"TORCHFT_TIMEOUT_SEC": "7", "TORCHFT_MANAGER_PORT": "1"})
    assert found == {"timeout": Given(7.0, "TORCHFT_TIMEOUT_SEC")}
    with pytest.raises(ConfigError, match="quorum_timeout='x'"):
        from_env({"TORCHFT_QUORUM_TIMEOUT_SEC": "x"})

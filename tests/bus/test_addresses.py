"""Tests of the addresses that a host advertises, which are never host names."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from fft.bus import addresses, open_bus, serve_tcp
from fft.bus.addresses import SETTING, advertised_address, joined, own_address, reachable_url
from fft.errors import BusError
from fft.train.session.participation import bus_url


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("tcp://127.0.0.1:4711/job", "127.0.0.1"),
        ("tcp://[::1]:4711/job", "::1"),
        ("tcp://localhost:4711/job", "127.0.0.1"),
        ("nats://user:word@127.0.0.1:4222,127.0.0.1:4223/job", "127.0.0.1"),
        ("nats://[::1]:4222,[::1]:4223/job", "::1"),
        ("memory://job", "127.0.0.1"),
    ],
)
def test_own_address_is_the_source_of_the_route_to_the_bus(url: str, address: str) -> None:
    assert own_address(url, {}) == address


def test_own_address_setting_replaces_the_route() -> None:
    for given, address in (("10.1.2.3", "10.1.2.3"), ("[fd00::1]", "fd00::1")):
        assert own_address("tcp://127.0.0.1:1/job", {SETTING: given}) == address
        assert advertised_address("0.0.0.0", {SETTING: given}) == address


def test_own_address_setting_that_does_not_resolve_is_named() -> None:
    with pytest.raises(BusError, match=rf"{SETTING}=nowhere.invalid: the host name"):
        own_address("tcp://127.0.0.1:1/job", {SETTING: "nowhere.invalid"})


def test_bus_host_that_does_not_resolve_is_named() -> None:
    with pytest.raises(BusError, match=r"tcp://nowhere\.invalid:1/job: the host name"):
        own_address("tcp://nowhere.invalid:1/job", {})


def test_advertised_address_is_no_host_name() -> None:
    assert advertised_address("127.0.0.1", {}) == "127.0.0.1"
    assert ipaddress.ip_address(advertised_address("0.0.0.0", {})).version == 4
    assert ipaddress.ip_address(advertised_address("::", {})).version in (4, 6)


def test_metadata_of_a_foreign_transport_gets_the_own_address() -> None:
    bus, name = "tcp://[::1]:1/job", socket.gethostname()
    assert reachable_url(f"http://{name}:80/x", bus) == "http://[::1]:80/x"
    assert reachable_url("http://elsewhere:80/x", bus) == "http://elsewhere:80/x"
    assert reachable_url("nccl", bus) == "nccl"


@pytest.mark.parametrize(
    ("found", "host"),
    [
        (["127.0.1.1"], "10.9.9.9"),
        (["127.0.1.1", "::1"], "10.9.9.9"),
        (["127.0.1.1", "10.1.2.3"], "h"),
        (["10.1.2.3"], "h"),
    ],
)
def test_reachable_replaces_a_name_only_if_all_its_addresses_are_loopback(
    found: list[str], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_resolved", lambda name, source: [(None, a) for a in found])
    monkeypatch.setattr(addresses, "own_address", lambda bus: "10.9.9.9")
    assert addresses.reachable("h", "tcp://10.0.0.1:1/job") == host


def test_joined_puts_ipv6_into_brackets() -> None:
    assert joined("::1", 80) == "[::1]:80"
    assert joined("10.0.0.1", 80) == "10.0.0.1:80"
    assert bus_url(joined("::1", 80), "votes") == "tcp://[::1]:80/votes"


@pytest.mark.parametrize("host", ["::1", "::", "localhost"])
def test_bus_is_served_on(host: str) -> None:
    with serve_tcp(host) as server:
        port = server.url.rpartition(":")[2].partition("/")[0]
        for family in ("::1", "127.0.0.1") if host == "::" else (host,):
            bus = open_bus(f"tcp://{joined(family, int(port))}/job")
            bus.write("key", b"value")
            assert bus.read("key") == b"value"
            bus.close()

"""The address at which the other processes of a job reach this host.

A host name is never advertised: it may not resolve on the other hosts, and Debian resolves it to
127.0.1.1 on its own host. FFT advertises each of its listeners by the address from `own_address`.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from fft.errors import BusError

SETTING = "FFT_HOST_ADDRESS"
"""Environment variable that overrides the address that `own_address` finds."""
HOW_TO_REACH = (
    f"open this port in the firewall of that host, or set {SETTING} there to an address that leads "
    "to it"
)
"""Advice for errors about a listener that cannot be reached."""
PROBE_S = 3.0
"""Seconds that `why_unreachable` waits for a connection."""
_DISCARD = 9
"""Port used to look up a route; no packet is sent to it."""
_ABROAD = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses: only the default route leads there."""
_WILDCARDS = {"0.0.0.0": (socket.AF_INET,), "::": (socket.AF_INET, socket.AF_INET6)}

logger = logging.getLogger(__name__)


def own_address(bus_url: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the IP address (IPv4, or IPv6 without brackets) at which other ranks reach this host.

    It is ``FFT_HOST_ADDRESS`` if that is set, else the source address of the route to the job's
    bus, because the network that leads to the bus also leads back to this rank. IPv4 comes first
    if the bus has addresses of both families, so that all hosts choose the same family.

    Raises:
        BusError: ``FFT_HOST_ADDRESS`` or the host of the bus does not resolve, or no route leads
            to the bus.
    """
    if given := environ.get(SETTING):
        return _resolved(given.strip("[]"), f"{SETTING}={given}")[0][1]
    if bus_url.startswith("memory:"):
        return "127.0.0.1"
    return _towards(bus_url)


def why_unreachable(address: tuple[str, int]) -> OSError | None:
    """Connect to a listener and close the connection; return the error, or None without one."""
    try:
        socket.create_connection(address, PROBE_S).close()
    except OSError as error:
        return error
    return None


def why_no_route(address: tuple[str, int]) -> OSError | None:
    """Return the error of a connection that this host cannot route, or None; send nothing."""
    with socket.socket(family_of(address[0]), socket.SOCK_DGRAM) as end:
        try:
            end.connect(address)
        except OSError as error:
            return error
    return None


def advertised_address(host: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address at which other hosts reach a server that listens on ``host``.

    For a wildcard it is ``FFT_HOST_ADDRESS`` if that is set. Otherwise it is the first address that
    is not a loopback address among those that this host's name resolves to, followed by the source
    address of the default route.
    """
    if (families := _WILDCARDS.get(host)) is None:
        return host
    if environ.get(SETTING):
        return own_address("", environ)
    try:
        named = _resolved(socket.gethostname(), "this host's name")
    except BusError:
        named = []
    found = [address for family, address in named if family in families]
    found += [address for family in families if (address := _source(family, _ABROAD[family]))]
    own = "::1" if host == "::" else "127.0.0.1"
    return next((address for address in found if not is_loopback(address)), own)


def listening_address(host: str) -> str:
    """Return the address at which a server of this host listens that others reach as ``host``.

    It is a wildcard if ``host`` is a name that does not lead here, or only to a loopback address.
    """
    try:
        family, address = _resolved(host, host)[0]
    except BusError:
        return "0.0.0.0"
    if is_own(host) and (not is_loopback(address) or _means_this_host(host)):
        return address
    return "0.0.0.0" if family == socket.AF_INET else "::"


def is_own(host: str) -> bool:
    """Whether ``host`` is an address, or the name of an address, of this host."""
    try:
        family, address = _resolved(host, host)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except (BusError, OSError):
        return False
    return True


def reachable(host: str, bus_url: str) -> str:
    """Return ``host``, or `own_address` if ``host`` does not resolve or is a loopback address."""
    try:
        found = _resolved(host, host)
    except BusError:
        return own_address(bus_url)
    own = own_address(bus_url)
    is_private = all(is_loopback(address) for _, address in found)
    return own if is_private and not is_loopback(own) else host


def reachable_url(url: str, bus_url: str) -> str:
    """Return ``url`` with this host's name, if it has that, replaced by `own_address`."""
    parts = urlsplit(url)
    if parts.hostname != socket.gethostname().lower() or parts.port is None:
        return url
    return urlunsplit(parts._replace(netloc=joined(own_address(bus_url), parts.port)))


def joined(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of the first address of ``host``; IPv4 before IPv6. Raises BusError."""
    return _resolved(host, host)[0][0]


def is_loopback(address: str) -> bool:
    """Whether the IP ``address`` leads to the host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


@lru_cache(maxsize=16)
def _towards(bus_url: str) -> str:
    hosts = _hosts_of(bus_url)
    found, refused = list[str](), ""
    for host in hosts:
        try:
            routes = (_source(family, address) for family, address in _resolved(host, bus_url))
            found += [source for source in routes if source]
        except BusError as error:
            refused = str(error)
    if not found:
        raise BusError(refused or f"{bus_url}: no route leads to the bus from this host")
    if public := [address for address in found if not is_loopback(address)]:
        return public[0]
    if all(_means_this_host(host) for host in hosts):
        return found[0]
    # This host's own name resolves to loopback only here, so look for an address for the others.
    public = [source for family, other in _ABROAD.items() if (source := _source(family, other))]
    if not public:
        logger.warning(
            "%s resolves to the loopback address %s on this host, and no default route names "
            "another address: ranks on other hosts cannot reach this one. Set %s to its address",
            hosts[0],
            found[0],
            SETTING,
        )
    return (*public, *found)[0]


def without_password(url: str) -> str:
    """Return the URL of a bus for display and messages, with ``***`` instead of its password."""
    return re.sub(r"^(\w+://[^:/@]*):[^/]+@", r"\1:***@", url)


def with_job_of(url: str, other: str) -> str:
    """Return ``url`` with the job name of ``other``, a URL whose password may be hidden."""
    return f"{url.rpartition('/')[0]}/{other.rpartition('/')[2]}"


def _hosts_of(bus_url: str) -> list[str]:
    """Return the hosts of all servers of a bus; a NATS URL separates them by commas."""
    parts = urlsplit(bus_url)
    places = parts.netloc.rpartition("@")[2].split(",")
    return [host for place in places if (host := urlsplit(f"//{place}").hostname)]


def _means_this_host(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")


def _resolved(host: str, source: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return (family, address) of all addresses of ``host``, IPv4 first. Raises BusError."""
    try:
        found: list[Any] = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise BusError(
            f"{source}: the host name {host} does not resolve on this host ({error.strerror}); "
            f"use an IP address, or add the name to /etc/hosts"
        ) from error
    plain = [(family, address[0]) for family, *_, address in found if family in _ABROAD]
    return sorted(plain, key=lambda one: one[0] != socket.AF_INET)


def _source(family: socket.AddressFamily, address: str) -> str | None:
    """Return the address from which this host sends to ``address``, or None without a route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _DISCARD))  # UDP: looks up the route without sending a packet
            source: str = probe.getsockname()[0]
            return source
    except OSError:
        return None

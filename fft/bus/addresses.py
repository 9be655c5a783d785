"""Under which address the other processes of a job reach this host."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def own_address(bus_url: str) -> str:
    """This host's address towards the job's bus: there its other ranks can reach it, too."""
    host = urlsplit(bus_url.split(",")[0]).hostname
    if host is None or bus_url.startswith("memory:"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only looks up the way
        address: str = probe.getsockname()[0]
        return address

"""Hosts on one machine: network namespaces joined by virtual interfaces.

They need root and `ip`. The namespaces and interfaces are deleted when the block is left.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
BUS_IN_4, BUS_IN_6 = "10.77.0.1", "fd77::1"

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and the command ip",
)


class Host:
    """One of the hosts. ``name``: its host name, which its /etc/hosts resolves to 127.0.1.1."""

    def __init__(self, space: str, name: str, hosts: Path, link: str) -> None:
        self.space, self.name, self.hosts, self.link = space, name, hosts, link
        self.memory = Path("/dev/shm", space)
        """Its shared memory, unless it has that of this machine."""

    def forget(self) -> None:
        """Remove all files in its shared memory, as a loss of power does."""
        shutil.rmtree(self.memory, ignore_errors=True)
        self.memory.mkdir()

    def ip(self, command: str) -> None:
        """Run ``ip COMMAND`` in its network namespace."""
        _ip(f"-n {self.space} {command}")

    def enter(self) -> None:
        """Make the calling process, which has one thread, a process of this host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.space}") as space:
            _check(libc.setns(space.fileno(), CLONE_NEWNET))
        _check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
        _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        _check(libc.mount(os.fsencode(self.hosts), b"/etc/hosts", None, MS_BIND, None))
        if self.memory.exists():
            _check(libc.mount(os.fsencode(self.memory), b"/dev/shm", None, MS_BIND, None))
        socket.sethostname(self.name)


@contextmanager
def two_hosts(folder: Path, families: str = "46") -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other by IPv4, IPv6, or both; neither has a default route."""
    tag = secrets.token_hex(3)
    names, hosts = [f"fft{tag}a", f"fft{tag}b"], []
    try:
        for number, space in enumerate(names, 1):
            _ip(f"netns add {space}")
            known = folder / space
            other = names[0] if number == 2 else ""
            bus = BUS_IN_4 if "4" in families else BUS_IN_6
            known.write_text(
                f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {space}\n"
                + (f"{bus} {other}\n" if other else "")
            )
            hosts.append(Host(space, space, known, f"v{tag}{'ab'[number - 1]}"))
        _ip(f"link add v{tag}a netns {names[0]} type veth peer name v{tag}b netns {names[1]}")
        for number, host in enumerate(hosts, 1):
            if "4" in families:
                host.ip(f"addr add 10.77.0.{number}/24 dev {host.link}")
            if "6" in families:
                host.ip(f"addr add fd77::{number}/64 dev {host.link} nodad")
            host.ip("link set lo up")
            host.ip(f"link set {host.link} up")
        yield hosts[0], hosts[1]
    finally:
        for space in names:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@contextmanager
def hosts_of_one_network(folder: Path, number: int) -> Iterator[list[Host]]:
    """Hosts with their own shared memory that reach each other through a bridge; host n has the
    address 10.77.0.(n + 1)."""
    tag = secrets.token_hex(3)
    names = [f"fft{tag}h{n}" for n in range(number)]
    switch, made = f"fft{tag}s", []
    try:
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        for n, space in enumerate(names):
            _ip(f"netns add {space}")
            known = folder / space
            known.write_text(f"127.0.0.1 localhost\n127.0.1.1 {space}\n")
            host = Host(space, space, known, f"v{tag}h{n}")
            _ip(f"link add {host.link} netns {space} type veth peer name p{n} netns {switch}")
            _ip(f"-n {switch} link set p{n} master bridge up")
            host.forget()
            host.ip(f"addr add 10.77.0.{n + 1}/24 dev {host.link}")
            host.ip("link set lo up")
            host.ip(f"link set {host.link} up")
            made.append(host)
        yield made
    finally:
        for space in (*names, switch):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        for host in made:
            shutil.rmtree(host.memory, ignore_errors=True)


def _ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {command}: {done.stderr}"


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

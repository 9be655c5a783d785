"""The folder in shared memory in which the ranks of this host keep copies of their state.

`fft run` makes, locks and removes it. Its name follows from the command, so that the same command
finds the copies of a start whose `fft run` was killed. The folder then stays for `KEPT_S` seconds.

In a job of several hosts each `fft run` serves its folder to the others. When a start begins, they
enter themselves in a register of the job's bus. One of them compares what all have, and another
register decides with which copy the start begins (`agreed`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fft.bus import ErrorBus, open_job_bus
from fft.bus.addresses import own_address
from fft.bus.base import HEAD
from fft.bus.token import JobToken
from fft.checkpoints.copies import Choice, CopiesOfHost, HeldCopies
from fft.checkpoints.files import Strict
from fft.checkpoints.peers import (
    HOSTS,
    CopiesServer,
    HostEntry,
    PeerCopies,
    hosts_of,
    key_of,
    place_of,
)
from fft.checkpoints.plan import COPIES, MemoryPlan, memory_interval
from fft.checkpoints.stores import LocalStore, StoreError
from fft.errors import BusError
from fft.launch.supervisor import Joined, RunConfig
from fft.launch.supervisor.config import SupervisorError
from fft.util.files import why_not_private
from fft.util.remove_after_death import vanishing

ROOT = Path("/dev/shm")
KEPT_S = 600.0
"""How long the copies stay after `fft run` was killed, or has ended without finishing the job."""
NAMED = 8
"""Maximum number of unused copies that the traces of a start name."""
_SHARE = 0.5
"""Part of the free memory of the host that the copies may take."""
_CGROUP = Path("/sys/fs/cgroup")
_BEGIN = "memory/begin"
"""Register of a start: the SHA-256 of the `Agreement` of its hosts."""
_NOTHING = b"no copy"
"""Its value if the job begins without one."""
_AGREEMENT = "agreement"
"""Name of the text with it that each host serves."""
_COME_S = 10.0
"""Time without a further host after which a start begins with the copies of those there are."""
_LEAD_S = 10.0
"""Further time after which another host than the first one compares the copies."""
_LOOK_S = 0.2

logger = logging.getLogger(__name__)


@contextmanager
def copies_folder(
    config: RunConfig, joins: bool
) -> Iterator[tuple[MemoryPlan | None, CopiesServer | None, Callable[[], None]]]:
    """Hold a folder for copies in memory while the block runs, and remove it then.

    Args:
        joins: The job may have other hosts, to which the folder is served.

    Yields:
        The settings of the copies, or None if there are none; the server; and a function that lets
        the folder stay for `KEPT_S` after the block.
    """
    with ExitStack() as undo:
        keep: Callable[[], None] = lambda: None  # noqa: E731
        plan = server = None
        if config.memory != "off" and config.has_other_hosts and not joins:
            logger.warning(
                "no copies of the state in memory: serve the bus of a job of several hosts by "
                "`fft serve`, and give --join on each host"
            )
        elif config.memory != "off":
            every, ranks = memory_interval(config.memory), config.local_ranks * (config.groups or 1)
            try:
                token = _token() if joins else None
                _sweep()
                limit = int(free_memory() * _SHARE)
                folder = _held(config, undo)
                keep = undo.enter_context(vanishing(folder, KEPT_S))
                if token is not None:
                    address = own_address(Joined.from_env().bus_url)
                    server = CopiesServer(address, HeldCopies(folder), key_of(token), limit)
                    undo.callback(server.close)
                plan = MemoryPlan(folder, every, limit // ranks)
            except (OSError, BusError, SupervisorError) as error:
                logger.warning("no copies of the state in memory: %s", error)
        yield plan, server, keep


def _token() -> JobToken:
    """Return the token of the job. Raises SupervisorError if there is none."""
    if (token := JobToken.from_env()) is None:
        raise SupervisorError(
            "on several hosts they need the job's token: set FFT_TOKEN_FILE, which `fft serve` "
            "prints, on all of them"
        )
    return token


class Agreement(Strict):
    """The copy with which a start of a job begins, and why others are not used."""

    choice: Choice | None
    urls: tuple[str, ...]
    problems: tuple[str, ...]


def agreed(
    bus: ErrorBus,
    server: CopiesServer,
    parts: int,
    choose: Callable[[Sequence[CopiesOfHost]], tuple[Choice | None, list[str]]],
) -> Agreement | None:
    """Agree with the other hosts of a job on the copy with which its start begins.

    Args:
        bus: The bus of the start, whose list this host has entered.
        parts: Number of parts of groups that all hosts run.
        choose: Returns the copy of those on these hosts, and why others are not used.

    Returns:
        The agreement, with the files ready for the ranks of this host; None if the job is running.
    """
    known, since = list[HostEntry](), time.monotonic()
    void: bytes | None = None
    """A decision of earlier `fft run`, all of which have gone."""
    while bus.read(HEAD) is None:
        hosts, now = hosts_of(bus), time.monotonic()
        decided = bus.read(_BEGIN)
        if decided is not None and decided != void:
            if decided == _NOTHING:
                return None
            if (found := _obeyed(decided.decode(), hosts, server)) is not None:
                return found
            void, since = decided, now
        if hosts != known:
            known, since = hosts, now
        leads = hosts[0].url == server.url
        are_all = sum(host.parts for host in hosts) >= parts
        if (are_all and leads) or now > since + _COME_S + (0 if leads else _LEAD_S):
            urls = tuple(host.url for host in hosts)
            choice, problems = choose([_copies_at(url, server) for url in urls])
            found = Agreement(choice=choice, urls=urls, problems=tuple(problems[:NAMED]))
            text = found.model_dump_json().encode()
            server.texts[_AGREEMENT] = text
            bus.compare_set(_BEGIN, void, hashlib.sha256(text).hexdigest().encode())
        else:
            time.sleep(_LOOK_S)
    return None


def refuse_copies(url: str, token: JobToken) -> None:
    """Let no host begin with a copy in memory, because the one that serves the bus has none."""
    with open_job_bus(url, token) as bus:
        bus.compare_set(_BEGIN, None, _NOTHING)


def _copies_at(url: str, server: CopiesServer) -> CopiesOfHost:
    return server.copies if url == server.url else PeerCopies(url, server.key)


def enter_host(bus: ErrorBus, server: CopiesServer, parts: int) -> None:
    """Enter this host in the list of a start, in the place of an earlier `fft run` of it.

    Args:
        parts: Number of parts of groups that this host runs.
    """
    entry = HostEntry(server.url, parts, place_of(server.copies.root))
    while True:
        held = bus.read(HOSTS)
        rest = (host for host in hosts_of(bus, held) if host.place != entry.place)
        desired = json.dumps([*rest, entry]).encode()
        if bus.compare_set(HOSTS, held, desired) == desired:
            return


def _obeyed(digest: str, hosts: Sequence[HostEntry], server: CopiesServer) -> Agreement | None:
    """Get the agreement from a host that has it, and prepare the files for the ranks here.

    None if no host has it.
    """
    text = server.texts.get(_AGREEMENT, b"")
    for host in hosts:
        if hashlib.sha256(text).hexdigest() == digest:
            break
        with suppress(OSError):
            text = PeerCopies(host.url, server.key).text(_AGREEMENT)
    if hashlib.sha256(text).hexdigest() != digest:
        return None
    server.texts[_AGREEMENT] = text
    found = Agreement.model_validate_json(text)
    if found.choice is not None:
        here = found.urls.index(server.url) if server.url in found.urls else None
        server.copies.adopt(found.choice, found.urls, here)
    return found


def _sweep() -> None:
    """Remove folders of this user that no process uses, and whose remover was killed as well."""
    for folder in ROOT.glob(f"fft-{os.geteuid()}-*"):
        with suppress(OSError, StoreError):
            if time.time() - folder.stat().st_mtime > 2 * KEPT_S:
                with LocalStore(folder).hold():
                    shutil.rmtree(folder)


def _held(config: RunConfig, undo: ExitStack) -> Path:
    """Return the folder of this command, or a new one if another `fft run` uses that."""
    folder = ROOT / f"fft-{os.geteuid()}-{_key(config)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        if (wrong := why_not_private(folder)) is not None:
            raise StoreError(f"{folder} {wrong}")
        undo.enter_context(LocalStore(folder).hold())
    except StoreError:  # the same command runs twice, or another user has made it
        folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=ROOT))
        undo.enter_context(LocalStore(folder).hold())
    return folder


def _key(config: RunConfig) -> str:
    """Return a name for the command: its script, arguments, folder, and shape of the job."""
    place = "" if config.checkpoint is None else str(config.checkpoint.place)
    shape = config.groups, config.ranks, config.first_group, config.all_groups
    told = json.dumps([os.getcwd(), list(config.script), shape, place])
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def about_memory() -> str:
    """Describe in a line how much memory copies of the state may take on this host."""
    try:
        free = free_memory()
    except OSError as error:
        return f"copies in memory (fft run --memory): none, as {error}"
    most, state = (f"{free * share / 1e9:.3g} GB" for share in (_SHARE, _SHARE / COPIES))
    return (
        f"copies in memory (fft run --memory): all ranks of this host take at most {most} in "
        f"{ROOT} and beside it, half of what is free now, so their states may have {state} together"
    )


def free_memory() -> int:
    """Return the bytes that shared memory can still take on this host, at most its free memory."""
    disk = os.statvfs(ROOT)
    found = [disk.f_bavail * disk.f_frsize]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    try:
        most, used = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        found.append(int(most) - int(used))
    except (OSError, ValueError):  # no limit, or another version of cgroups
        pass
    return max(0, min(found))

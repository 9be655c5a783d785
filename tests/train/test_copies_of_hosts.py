"""Tests of copies in memory on several hosts: their exchange, and the agreement on one of them.

Each host is a folder with a server and a thread; the bus is in memory.
"""

from __future__ import annotations

import http.client
import json
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from test_memory_copies import GROUPS, RANKS, part

from fft.bus import ErrorBus, open_bus
from fft.bus.base import HEAD
from fft.bus.token import JobToken
from fft.checkpoints.copies import Choice, CopiesOfHost, HeldCopies, chosen, directory_of
from fft.checkpoints.files import Checkpoints, Manifest, file_stem, partial_name
from fft.checkpoints.peers import (
    HOSTS,
    CopiesServer,
    CopyStore,
    Deputy,
    HostEntry,
    PeerCopies,
    key_of,
)
from fft.launch import memory
from fft.launch.memory import Agreement, agreed, enter_host

KEY = key_of(JobToken.fresh())
LIMIT = 40_000


@contextmanager
def served(*roots: Path) -> Iterator[list[CopiesServer]]:
    """Serve these folders, as `fft run` of each host does."""
    with ExitStack() as undo:
        servers = []
        for root in roots:
            root.mkdir(exist_ok=True)
            servers.append(CopiesServer("127.0.0.1", HeldCopies(root), KEY, LIMIT))
            undo.callback(servers[-1].close)
        yield servers
    assert not [thread for thread in threading.enumerate() if thread.name == "fft-copies"]


def one_group_each(root: Path, *steps: int) -> list[Path]:
    """Return the folders of two hosts, each with the copies of one group."""
    hosts = [root / "host0", root / "host1"]
    for step in steps:
        for group, host in zip(GROUPS, hosts, strict=True):
            for rank in range(RANKS):
                part(host, step, group, rank)
    return hosts


def agree(bus: ErrorBus, servers: Sequence[CopiesServer], parts: int = 2) -> list[Agreement | None]:
    """Let all hosts agree, each on a thread."""
    for server in servers:
        enter_host(bus, server, parts=1)
    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(partial(agreed, bus, parts=parts, choose=choose), servers))


def choose(hosts: Sequence[CopiesOfHost]) -> tuple[Choice | None, list[str]]:
    return chosen(hosts)


@pytest.fixture
def bus() -> Iterator[ErrorBus]:
    with closing(open_bus(f"memory://copies-{secrets.token_hex(4)}")) as made:
        yield made


def files_of(root: Path, manifest: Manifest, group: str, rank: int) -> list[bytes]:
    """Read the files of a rank as the rank does: with digests, and from other hosts."""
    store = CopyStore(root, KEY)
    found = Checkpoints(store).manifest(manifest.step)
    paths = [f"{directory_of(found)}/{f.name}" for f in found.files_of(group, rank).values()]
    assert [store.digest(path) for path in paths] == [
        file.sha256 for file in found.files_of(group, rank).values()
    ]
    return [store.read(path) for path in sorted(paths)]


def test_hosts_agree_on_one_copy_and_read_each_others_files(bus: ErrorBus, tmp_path: Path) -> None:
    hosts = one_group_each(tmp_path, 4, 6)
    part(hosts[1], 8, "1", 0)  # the job ended in the midst of this copy
    with served(*hosts) as servers:
        first, second = agree(bus, servers)
        assert first is not None and first == second and first.choice is not None
        manifest = first.choice.manifest
        assert (manifest.step, manifest.groups, first.problems) == (6, GROUPS, ())
        for host in hosts:
            for group in GROUPS:
                expected = [f"6 {group} 1".encode(), bytes([6, 1]) * 500]
                assert files_of(host, manifest, group, 1) == expected


def test_host_that_has_lost_its_memory_reads_the_files_of_another(
    bus: ErrorBus, tmp_path: Path
) -> None:
    hosts = one_group_each(tmp_path, 6)
    with served(tmp_path / "empty", hosts[1]) as servers:
        found = agree(bus, servers)
        assert found[0] == found[1] and found[0] is not None and found[0].choice is not None
        manifest = found[0].choice.manifest
        assert (manifest.writer, manifest.groups) == ("1", ("1",))
        read = files_of(tmp_path / "empty", manifest, "1", 0)
        assert read == [b"6 1 0", bytes([6, 0]) * 500]


def test_start_without_a_host_begins_after_some_time(
    bus: ErrorBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_COME_S", 0.3)
    monkeypatch.setattr(memory, "_LEAD_S", 0.3)
    hosts = one_group_each(tmp_path, 6)
    with served(hosts[1]) as servers:
        (found,) = agree(bus, servers)
        assert found is not None and found.choice is not None
        assert found.choice.manifest.groups == ("1",)
    with served(hosts[0]) as servers:  # the others have decided, and have gone
        (found,) = agree(bus, servers)
        assert found is not None and found.choice is not None
        assert found.choice.manifest.groups == ("0",)
        bus.compare_set(HEAD, None, b"a record")
        assert agree(bus, servers) == [None], "the job is running"


@pytest.mark.parametrize("suffix", ["part", "json", "safetensors"])
def test_damaged_copy_is_left_for_that_of_another_host(
    suffix: str, bus: ErrorBus, tmp_path: Path
) -> None:
    hosts = one_group_each(tmp_path, 6)
    path = hosts[0] / partial_name(6, "a6") / f"{file_stem('0', 1)}.{suffix}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with served(*hosts) as servers:
        found = agree(bus, servers)[0]
        assert found is not None and found.choice is not None
        assert found.choice.manifest.groups == ("1",)
        assert len(found.problems) == 1 and f"{path.parent.name}/{path.stem}" in found.problems[0]
        for host in hosts:
            read = files_of(host, found.choice.manifest, "1", 1)
            assert read == [b"6 1 1", bytes([6, 1]) * 500]


def test_file_that_changes_after_the_agreement_is_not_used(bus: ErrorBus, tmp_path: Path) -> None:
    hosts = one_group_each(tmp_path, 6)
    with served(tmp_path / "empty", hosts[1]) as servers:
        found = agree(bus, servers)[0]
        assert found is not None and found.choice is not None
        path = hosts[1] / partial_name(6, "a6") / f"{file_stem('1', 0)}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with pytest.raises(OSError, match=f"{path.name}: its SHA-256 is not that of its copy"):
            files_of(tmp_path / "empty", found.choice.manifest, "1", 0)
        assert not list((tmp_path / "empty").rglob("*.safetensors*")), "nothing of it stays"


def test_requests_without_the_token_are_refused(tmp_path: Path) -> None:
    (host, _) = one_group_each(tmp_path, 6)
    name = f"{partial_name(6, 'a6')}/{file_stem('0', 0)}.json"
    with served(host) as (server,):
        for path in ("listing", f"checked/{partial_name(6, 'a6')}", name):
            with pytest.raises(OSError, match="use one FFT_TOKEN_FILE on all hosts"):
                PeerCopies(server.url, b"other").text(path)
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
            connection.request("GET", f"/{path}")
            assert connection.getresponse().status == 403
            connection.close()
        peer = PeerCopies(server.url, KEY)
        assert peer.listing().parts.keys() == {partial_name(6, "a6")}
        for path in ("../../etc/passwd", f"{partial_name(6, 'a6')}/../x", "manifest.json"):
            with pytest.raises(OSError, match="it is not there any more"):
                peer.text(path)


def enter(bus: ErrorBus, *hosts: tuple[str, Path]) -> None:
    """Enter hosts with these addresses; each has another name."""
    entries = [HostEntry(url, 1, f"host{n}:{root}") for n, (url, root) in enumerate(hosts)]
    bus.compare_set(HOSTS, None, json.dumps(entries).encode())


def parts_of(root: Path, step: int, group: str) -> list[Manifest]:
    """Return the parts of a copy of a group by rank."""
    found = HeldCopies(root).listing().parts[partial_name(step, f"a{step}")]
    return [found[file_stem(group, rank)] for rank in range(RANKS)]


def test_copy_on_another_host_is_as_good_as_that_of_its_rank(bus: ErrorBus, tmp_path: Path) -> None:
    here, there = one_group_each(tmp_path, 4, 6, 8)
    with served(there, tmp_path / "third") as (server, _):
        enter(bus, ("http://127.0.0.1:1", tmp_path / "gone"), (server.url, there))
        deputy = Deputy(bus, here, KEY)
        for step in (4, 6, 8):
            for rank, made in enumerate(parts_of(here, step, "0")):
                assert deputy.store(directory_of(made), made, rank) == server.url
    kept = [steps for steps in HeldCopies(there).listing().parts.items() if "g0r0" in steps[1]]
    assert [name for name, _ in kept] == [partial_name(6, "a6"), partial_name(8, "a8")]
    assert not list(there.rglob(".*")), "nothing incomplete"
    choice, problems = chosen([HeldCopies(there)])
    assert choice is not None and not problems
    assert (choice.manifest.step, choice.manifest.groups) == (8, GROUPS)


def test_copy_that_no_other_host_takes_is_reported(bus: ErrorBus, tmp_path: Path) -> None:
    (here, _) = one_group_each(tmp_path, 6)
    (made, _) = parts_of(here, 6, "0")
    assert Deputy(bus, here, KEY).store(directory_of(made), made, 0) is None, "there is none"
    with served(tmp_path / "there") as (server,):
        server._limit = 700
        enter(bus, (server.url, tmp_path / "there"))
        with pytest.raises(OSError, match="its memory for copies is full"):
            Deputy(bus, here, KEY).store(directory_of(made), made, 0)
        server._limit = LIMIT
        with pytest.raises(OSError, match="its SHA-256 is not that of its copy"):
            PeerCopies(server.url, KEY).store(
                f"{directory_of(made)}/g0r0.json",
                here / directory_of(made) / "g0r0.json",
                "0" * 64,
            )
        left = [path.name for path in (tmp_path / "there").rglob("*") if path.is_file()]
        assert left == ["g0r0.json"], "the first file fitted; nothing of the others"


def test_request_to_store_a_file_is_valid_once(tmp_path: Path) -> None:
    (here, _) = one_group_each(tmp_path, 6)
    (made, _) = parts_of(here, 6, "0")
    path = f"{directory_of(made)}/g0r0.json"
    with served(tmp_path / "there") as (server,):
        peer, nonce = PeerCopies(server.url, KEY), "0" * 32
        for used, why in ((nonce, "400"), (peer.text("nonce").decode(), "")):
            with (here / path).open("rb") as file:
                if why:
                    with (
                        pytest.raises(OSError),
                        peer._requested("PUT", path, used, made.files[0].sha256, file),
                    ):
                        pass
                else:
                    with peer._requested("PUT", path, used, made.files[0].sha256, file):
                        pass
        with (
            (here / path).open("rb") as file,
            pytest.raises(OSError),
            peer._requested("PUT", path, used, made.files[0].sha256, file),
        ):
            pass

"""Tests of ranks on two hosts with misleading host names: bus, gloo and heals use addresses.

The hosts are network namespaces, each with a host name that its /etc/hosts resolves to 127.0.1.1.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from forked import Forked
from namespaces import BUS_IN_4, Host, needs_namespaces, two_hosts
from network_worker import build, list_listeners, refuse, run, serve, train
from stage import events
from waiting import wait_until

from fft.trace.audit import audit_dir

LONG_S = 120.0
SCRIPT = Path(__file__).with_name("fault_script.py")
pytestmark = [pytest.mark.timeout(400), needs_namespaces]


@contextmanager
def served(host: Host, listens_on: str, folder: Path, **env: str) -> Iterator[str]:
    """Yield the URL of a bus on ``host``."""
    server = Forked(serve, host, listens_on, log=folder / "bus.log", env=env)
    log = folder / "bus.log"
    try:
        wait_until(lambda: "//" in log.read_text(), "the bus is served", LONG_S)
        yield re.findall(r"tcp://\S+", log.read_text())[0]
    finally:
        server.end()


@contextmanager
def ranks(*processes: Forked) -> Iterator[None]:
    """End ``processes`` when the block is left."""
    with ExitStack() as undo:
        for process in processes:
            undo.callback(process.end)
        yield


def started(
    host: Host, group: int, bus: str, traces: Path, steps: int | None, **env: str
) -> Forked:
    least = 1 if steps is None else 2
    settings = {"NUM_REPLICA_GROUPS": str(least), "REPLICA_GROUP_ID": str(group), **env}
    log = traces / f"{group}.log"
    return Forked(train, host, str(group), bus, traces, steps, least, log=log, env=settings)


@pytest.mark.parametrize(("families", "listens_on"), [("6", "fd77::1"), ("46", "::")])
def test_ranks_on_two_hosts_heal_by_address(tmp_path: Path, families: str, listens_on: str) -> None:
    """The first epoch heals, because only group 0 has the weights that the job begins with."""
    with two_hosts(tmp_path, families) as (first, second):
        named = {"FFT_HOST_ADDRESS": BUS_IN_4} if "4" in families else {}
        with served(first, listens_on, tmp_path, **named) as bus:
            both = [started(host, n, bus, tmp_path, 3) for n, host in enumerate((first, second))]
            with ranks(*both):
                assert [one.wait(LONG_S) for one in both] == [0, 0], both[1].tail() + both[0].tail()
        output = [re.findall(r"weights (\S+)", one.tail()) for one in both]
        assert output[0] == output[1] != []
        assert [
            e["event"]["source"] for e in events(tmp_path, "healed") if e["event"]["bytes"]
        ] == ["0"]


def test_joiner_waits_outside_while_no_donor_can_be_reached(tmp_path: Path) -> None:
    """Group 0 advertises an address to which the other host has no route until it is added."""
    away = "10.78.0.1"
    with two_hosts(tmp_path, "4") as (first, second), served(first, BUS_IN_4, tmp_path) as bus:
        first.ip(f"addr add {away}/32 dev lo")
        donor = started(first, 0, bus, tmp_path, None, FFT_HOST_ADDRESS=away)
        with ranks(donor):
            wait_until(lambda: "step 3 of 1" in donor.tail(), "group 0 trains", LONG_S)
            joiner = started(second, 1, bus, tmp_path, None)
            with ranks(joiner):
                wait_until(lambda: "waits outside the job" in joiner.tail(), "it waits", LONG_S)
                assert f"{away}:" in joiner.tail()
                assert not events(tmp_path, "heal_failed")
                second.ip(f"route add {away} via {BUS_IN_4}")
                wait_until(lambda: " of 2" in joiner.tail(), "group 1 trains", LONG_S)
                (tmp_path / "end").touch()
                assert [one.wait(LONG_S) for one in (donor, joiner)] == [0, 0]
    assert not events(tmp_path, "heal_failed")
    assert "rolled back" not in donor.tail()


KNOWN = {
    ("serve", BUS_IN_4): ["bus"],
    ("nats-server", BUS_IN_4): ["NATS servers"],
    ("nats-server", "127.0.0.1"): ["NATS monitor"],
    ("run", "own"): ["store of a replica group", "copies in memory"],
    ("script_runner.py", "own"): ["gloo", "gloo", "heal"],
}
"""Listeners that networks.md describes, by program and address; a rank has two groups of gloo."""


@pytest.mark.parametrize("bus", ["tcp", pytest.param("nats", marks=pytest.mark.long)])
def test_job_listens_only_on_known_sockets_of_its_network(tmp_path: Path, bus: str) -> None:
    """All TCP listeners and UDP sockets of two hosts are compared with the list of networks.md.

    Each host has a further address, on which nothing listens.
    """
    page = (Path(__file__).parents[2] / "docs/guides/networks.md").read_text()
    for name in (name for names in KNOWN.values() for name in names):
        assert re.search(rf"^\| {name}\b", page, re.MULTILINE), f"networks.md lacks {name}"
    token = tmp_path / "token"
    with two_hosts(tmp_path, "4") as hosts:
        serving = ["serve", "--host", BUS_IN_4, "--token-file", str(token), "--bus", bus]
        server = Forked(run, hosts[0], *serving, log=tmp_path / "bus.log")
        with ranks(server):
            wait_until(lambda: "FFT_BUS=" in server.tail(), "the bus is served", LONG_S)
            url = re.findall(r"FFT_BUS=(\S+)", server.tail())[0]
            env = {"FFT_BUS": url, "FFT_TOKEN_FILE": str(token)}
            jobs = []
            for number, host in enumerate(hosts):
                host.ip(f"addr add 10.78.0.{number + 1}/32 dev lo")
                command = ["run", "--join", "--first-group", str(number), "--all-groups", "2"]
                command += ["--groups", "1", "--ranks", "2", "--no-progress", "--trace-dir"]
                command += [
                    str(tmp_path / f"traces-{number}"),
                    str(SCRIPT),
                    "least=2",
                    "bus_limit=30",
                ]
                jobs.append(Forked(run, host, *command, log=tmp_path / f"run-{number}", env=env))
            with ranks(*jobs):
                wait_until(lambda: committed(tmp_path) > 3, "both groups train", LONG_S)
                for number, host in enumerate(hosts):
                    listed = tmp_path / f"listeners-{number}"
                    assert Forked(list_listeners, host, listed).wait(LONG_S) == 0
                    found = Counter(
                        (program_of(line), "own" if at == f"10.77.0.{number + 1}" else at)
                        for at, line in json.loads(listed.read_text())
                    )
                    assert found == expected(number == 0, bus), found
                jobs[0].signal(signal.SIGTERM)
                jobs[1].signal(signal.SIGTERM)
                assert [one.wait(LONG_S) for one in jobs] == [75, 75]


def committed(folder: Path) -> int:
    """Return the newest step that both hosts have traced as decided."""
    traces = [folder / f"traces-{number}" for number in (0, 1)]
    if not all(list(each.glob("*.jsonl")) for each in traces):
        return 0
    records = [[e["event"]["record"] or {} for e in events(t, "decision")] for t in traces]
    return min(max((r.get("step", 0) for r in each), default=0) for each in records)


def program_of(line: list[str]) -> str:
    """Return which of the programs of `KNOWN` a command line starts, or the line."""
    words = [Path(word).name for word in line]
    return next((name for name, _ in KNOWN if name in words), " ".join(line))


def expected(serves: bool, bus: str) -> Counter[tuple[str, str]]:
    """Return the number of listeners of one host by program and address."""
    counts = {("run", "own"): 1, ("script_runner.py", "own"): 2}
    if serves and bus == "tcp":
        counts["serve", "own"] = 1
    if serves and bus == "nats":
        counts |= {("nats-server", "own"): 1, ("nats-server", "127.0.0.1"): 1}
    return Counter(
        {
            place: number * len(KNOWN.get(place) or KNOWN[place[0], BUS_IN_4])
            for place, number in counts.items()
        }
    )


@pytest.mark.long
def test_fft_run_heals_where_the_host_name_does_not_resolve(tmp_path: Path) -> None:
    """The tests above start their own ranks; here `fft run` starts all processes."""
    plan, traces = tmp_path / "plan.yaml", tmp_path / "traces"
    kill = "{name: kill, kind: kill, group: 1, rank: 0, step: 5, phase: backward}"
    plan.write_text(f"faults:\n  - {kill}\n")
    script = str(Path(__file__).with_name("fault_script.py"))
    fft = [sys.executable, "-m", "fft.cli", "run", "--groups", "2", "--no-progress"]
    fft += [
        "--faults",
        str(plan),
        "--trace-dir",
        str(traces),
        script,
        "steps=40",
        "least=2",
        "bus_limit=30",
    ]
    renamed = ["unshare", "-u", "sh", "-c", 'hostname nowhere-xyz && exec "$@"', "fft", *fft]
    done = subprocess.run(renamed, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    healed = [line["event"] for line in events(traces, "healed")]
    assert any(event["bytes"] for event in healed)
    assert not events(traces, "heal_failed")
    assert audit_dir(traces).ok


def test_route_that_is_lost_while_groups_are_built_ends_no_process(tmp_path: Path) -> None:
    """Rank 1's connection fails after its route is gone, so gloo cannot even try it again."""
    with two_hosts(tmp_path, "4") as (first, second):
        for number, host in enumerate((first, second), 1):
            host.ip(f"addr add 10.79.0.{number}/32 dev lo")
            host.ip(f"route add 10.79.0.{3 - number} via 10.77.0.{3 - number}")
        first.ip("rule add pref 100 lookup local")
        first.ip("rule del pref 0")
        first.ip(f"rule add pref 10 iif {first.link} to 10.79.0.1 blackhole")
        sniffer = Forked(refuse, first, tmp_path, log=tmp_path / "sniffer.log")
        with ranks(sniffer):
            wait_until((tmp_path / "listens").exists, "packets are read", LONG_S)
            both = [
                Forked(build, host, rank, tmp_path, log=tmp_path / f"{rank}.log")
                for rank, host in enumerate((first, second))
            ]
            with ranks(*both):
                wait_until((tmp_path / "syn").exists, "rank 1 connects", LONG_S)
                second.ip("route replace unreachable 10.79.0.1/32")
                (tmp_path / "go").touch()
                assert both[1].wait(LONG_S) == 0, both[1].tail()
                assert "refused: " in both[1].tail()


@pytest.mark.parametrize("limit_s", [5, pytest.param(100, marks=pytest.mark.long)])
def test_broken_link_between_two_hosts_ends_no_process(tmp_path: Path, limit_s: int) -> None:
    """The ranks reach the bus and the stores, but not each other, until the link is mended.

    A collective with a longer limit ends when the kernel has had no answer for 25 s.
    """
    logs = [tmp_path / f"{n}.log" for n in (0, 1)]

    def steps(log: Path) -> int:
        return log.read_text().count(" of 2")

    def says(text: str) -> bool:
        return any(text in log.read_text() for log in logs)

    with two_hosts(tmp_path, "4") as hosts, served(hosts[0], BUS_IN_4, tmp_path) as bus:
        for number, host in enumerate(hosts, 1):
            host.ip(f"addr add 10.79.0.{number}/32 dev lo")
            host.ip(f"route add 10.79.0.{3 - number} via 10.77.0.{3 - number}")
        both = [
            started(
                *(host, n, bus, tmp_path, None),
                FFT_HOST_ADDRESS=f"10.79.0.{n + 1}",
                STORE_ADDRESS=f"10.77.0.{n + 1}",
                OP_LIMIT_S=str(limit_s),
            )
            for n, host in enumerate(hosts)
        ]
        with ranks(*both):
            wait_until(lambda: min(map(steps, logs)) > 2, "both train", LONG_S)
            for number, host in enumerate(hosts, 1):
                host.ip(f"route replace blackhole 10.79.0.{3 - number}/32")
            link = "cannot reach another rank's gloo at 10.79.0."
            wait_until(lambda: says(link), "the link between the ranks is named", 60.0)
            for number, host in enumerate(hosts, 1):
                host.ip(f"route replace 10.79.0.{3 - number}/32 via 10.77.0.{3 - number}")
            seen = max(map(steps, logs))
            wait_until(lambda: min(map(steps, logs)) > seen, "both train again", LONG_S)
            (tmp_path / "end").touch()
            assert [one.wait(LONG_S) for one in both] == [0, 0], both[0].tail() + both[1].tail()
    assert not events(tmp_path, "crash")
    assert audit_dir(tmp_path).ok

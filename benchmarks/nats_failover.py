"""A NATS cluster whose leaders are killed, again and again, under a training job.

`python benchmarks/nats_failover.py [ROUNDS [DIRECTORY]]`: 3 groups x 1 rank train
`examples/hsdp_char_lm.py` under the supervisor. Each round SIGKILLs the server that leads the job's
registers (in even rounds) or its broadcasts (in odd ones), waits for the next commit, and restarts
the server. It prints for each round when the servers had elected new leaders and when the job had
committed, and audits the traces at the end. With `--bus` there is no training: four clients extend
a chain of heads, broadcast, vote and draw numbers, three listen, and all answers are checked. It
exits with an error if anything was split, lost or doubled.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "bus"))

from nats_trial import Trial

from fft.bus.natsserver import NatsServers
from fft.launch.services import start_services
from fft.launch.supervisor import RunConfig, Supervisor
from fft.messages.fault_plans import FaultPlan
from fft.trace.audit import audit_dir, read_lines
from fft.trace.tail import TraceTail

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "hsdp_char_lm.py"
GROUPS = 3
BETWEEN = 5
"""Commits between rounds."""
LIMIT_S = 120.0
DRAIN_S = 60.0


def until(true: Callable[[], bool], what: str) -> None:
    """Poll with a bound, because traces and servers have no event to wait for."""
    deadline = time.monotonic() + LIMIT_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(0.01)


@contextmanager
def training(directory: Path) -> Iterator[NatsServers]:
    """Run a job that trains until the end of the block, and then drains."""
    script = [str(EXAMPLE), "--steps", "1000000"]
    config = RunConfig(script, GROUPS, 1, directory, drain_timeout=DRAIN_S)
    services = start_services(bus_kind="nats", cluster=3)
    servers = services.bus
    assert isinstance(servers, NatsServers)
    supervisor = Supervisor(config, FaultPlan(faults=[]), services)
    thread = threading.Thread(target=supervisor.run, name="supervisor")
    thread.start()
    try:
        yield servers
    finally:
        supervisor.interrupt()
        thread.join(DRAIN_S)
        supervisor.interrupt()
        thread.join()
        services.close()


def train(rounds: int, directory: Path) -> list[tuple[float, float]]:
    """Return the seconds from each kill to the last election, and to the next commit."""
    times = []
    tail = TraceTail(directory)
    with training(directory) as servers:
        for number in range(rounds):
            goal = tail.poll().step + BETWEEN
            until(lambda goal=goal: tail.poll().step >= goal, f"step {goal}")  # type: ignore[misc]
            stream = f"fft-{servers.job}"
            leading = servers.leaders()
            rings = [name for name in leading if name.endswith("-ring")]
            leader = leading[rings[0] if number % 2 else stream]
            servers.kill(leader)
            killed, wall = time.monotonic(), time.time()
            step = tail.poll().step
            until(lambda step=step: tail.poll().step > step + 1, "a commit")  # type: ignore[misc]
            back = time.monotonic() - killed
            elected = max(servers.elections(since=wall), default=wall) - wall
            servers.start(leader)
            times.append((elected, back))
            print(f"round {number}: elected {elected:.2f} s, committed {back:.2f} s", flush=True)
            until(servers.whole, "all replicas are current")
    tail.close()
    return times


def judge(directory: Path) -> str:
    """Print the verdict of the traces' audit; raise an error if it is bad."""
    report = audit_dir(directory)
    if not report.ok:
        raise SystemExit(report.render())
    taken = Counter(
        line["data"]["slice"]
        for line in read_lines(directory)
        if line.get("note") == "consumed" and line["data"]["slice"] is not None
    )
    doubled = sum(count > 1 for count in taken.values())
    lost = max(taken) + 1 - len(taken)
    verdict = f"{report.commits} commits, {report.epochs} epochs, 0 splits, {lost} slices lost, "
    verdict += f"{doubled} doubled"
    if lost or doubled:
        raise SystemExit(verdict)
    return verdict


def ask(rounds: int) -> tuple[list[tuple[float, float]], str]:
    """Run the rounds without a job, with clients of the bus."""
    times = []
    with NatsServers(cluster=3) as servers:
        trial = Trial(servers)
        try:
            for number in range(rounds):
                times.append(trial.kill_leader(number))
                elected, back = times[-1]
                print(f"round {number}: elected {elected:.2f} s, served {back:.2f} s", flush=True)
            return times, trial.judge()
        finally:
            trial.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=50)
    parser.add_argument("directory", type=Path, nargs="?", help="for the traces; else temporary")
    parser.add_argument("--bus", action="store_true", help="clients of the bus, no training")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary)
        if args.bus:
            times, verdict = ask(args.rounds)
        else:
            times, verdict = train(args.rounds, directory), judge(directory)
    for what, seconds in zip(("elected", "back"), zip(*times, strict=True), strict=True):
        print(
            f"{what}: {min(seconds):.2f} to {max(seconds):.2f} s, "
            f"median {statistics.median(seconds):.2f} s"
        )
    print(f"{args.rounds} rounds: {verdict}")


if __name__ == "__main__":
    main()

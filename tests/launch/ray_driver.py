"""A driver for test_ray.py: ``python ray_driver.py FOLDER SCRIPT STEPS WHAT``.

It starts a Ray cluster of raylets on this machine, and runs a job of two groups. If WHAT is
``kill`` it kills a raylet that has a group; if it is ``interrupt`` it is interrupted, as by Ctrl-C;
if it is ``bus`` it kills the servers of the bus after a checkpoint, and if it is ``buses`` those of
the next bus, too. With ``server`` it kills one of them. It
prints how the job has ended. The cluster has three nodes or more, so three servers have the bus.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import ray
from ray._private import state
from ray.cluster_utils import Cluster
from waiting import wait_until

import fft.launch.ray

LIMIT_S = 240.0
BEFORE = 10
"""Steps of each group before the disturbance, and after it."""


def committed(traces: Path) -> list[int]:
    """Return the steps that the groups have committed, by their traces."""
    counts = []
    for group in (0, 1):
        found = traces.glob(f"g{group}r0i*.jsonl")
        counts.append(sum(p.read_text().count('"note":"consumed"') for p in found))
    return counts


def kill_node(cluster: Cluster, traces: Path) -> None:
    """Kill the raylet of a group, and wait until both groups train again."""
    groups = [a for a in state.actors().values() if a["ActorClassName"] == "_Group"]
    lost = next(a["Address"]["NodeID"] for a in groups if a["State"] == "ALIVE")
    (node,) = [n for n in cluster.worker_nodes if n.node_id == lost]
    cluster.remove_node(node, allow_graceful=False)
    print(f"killed the raylet {lost}", flush=True)
    wait_for_steps(traces, [count + BEFORE for count in committed(traces)])
    print("both groups train", flush=True)


def kill_buses(checkpoints: Path, count: int) -> None:
    """Kill the servers of the bus so many times, once there is a checkpoint.

    They are killed when the groups are being started that use it.
    """
    wait_until(lambda: any(checkpoints.glob("step-*/manifest.json")), "a checkpoint", LIMIT_S)
    for _ in range(count):
        wait_until(lambda: commands("run") > commands("serve") > [], "a group", LIMIT_S)
        for _, server in commands("serve"):
            psutil.Process(server).kill()
        wait_until(lambda: not commands("serve"), "the end of the bus", LIMIT_S)
        print("killed a bus", flush=True)


def commands(name: str) -> list[tuple[float, int]]:
    """Return start time and pid of this driver's `fft NAME` processes, the newest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.cmdline()[1:4] == ["-m", "fft.cli", name]:
                found.append((process.create_time(), process.pid))
    return sorted(found, reverse=True)


def disturb(cluster: Cluster, traces: Path, what: str) -> None:
    """Wait until both groups train, and do what was asked for."""
    wait_for_steps(traces, [BEFORE, BEFORE])
    if what == "kill":
        kill_node(cluster, traces)
    elif what == "server":
        _, server = commands("serve")[0]
        psutil.Process(server).kill()
        wait_for_steps(traces, [count + BEFORE for count in committed(traces)])
        print("both groups train", flush=True)
    elif what.startswith("bus"):
        kill_buses(traces.with_name("checkpoints"), 1 + (what == "buses"))
    else:
        os.kill(os.getpid(), signal.SIGINT)


def wait_for_steps(traces: Path, goals: list[int]) -> None:
    """Wait until each group has committed so many steps."""
    deadline = time.monotonic() + LIMIT_S
    while any(count < goal for count, goal in zip(committed(traces), goals, strict=True)):
        if time.monotonic() > deadline:
            print(f"only {committed(traces)} of {goals} steps", flush=True)
            return
        time.sleep(0.2)


def main(folder: str, script: str, steps: str, what: str) -> None:
    """Run the job."""
    traces = Path(folder, "traces")
    cluster = Cluster()
    for number in range(4):  # the first one is the head, without a group
        cluster.add_node(
            num_cpus=min(number, 1),
            node_ip_address=f"127.0.0.{number + 2}",
            object_store_memory=80 << 20,
            include_dashboard=False,
        )
    ray.init(address=cluster.address, log_to_driver=True)
    try:
        threading.Thread(target=disturb, args=(cluster, traces, what), daemon=True).start()
        outcome = fft.launch.ray.run(
            [script, steps, "0.1", "1"],
            groups=2,
            ranks=1,
            trace_dir=traces,
            checkpoint=str(traces.with_name("checkpoints")) if what.startswith("bus") else None,
            every="10",
        )
        print(json.dumps({"status": int(outcome.status), "step": outcome.step}), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The cost of a step without a lighthouse, with heartbeats to one, and with membership by one.

The three alternate in the same processes, one for each group, with a near-zero model on loopback;
it asserts nothing. On a busy machine use the processor time, which is that of a group's process.
Run ``python benchmarks/membership_cost.py [groups] [steps] [repetitions]``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

ARMS = ("register", "register, heartbeats", "lighthouse")
WARM_UP = 30
"""Steps of each turn that do not count: the lighthouse first forgets the previous turn's groups."""
LIMIT_S = 900


def child(path: str, group: str) -> None:
    """Run one group with one manager after the other."""
    import torch
    from torchft import ProcessGroupGloo

    import fft

    config: dict[str, Any] = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    found = []
    for turn in config["turns"]:
        with_lighthouse = turn["arm"] != ARMS[0]
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        manager = fft.ManagerFFT(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=config["groups"],
            replica_id=group,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=turn["stores"][int(group)],
            lighthouse_addr=config["lighthouse"] if with_lighthouse else None,
            config=fft.ManagerConfig(
                membership="lighthouse" if turn["arm"] == ARMS[2] else "register"
            ),
            init_sync=False,
            bus=turn["bus"],
        )
        manager.register(model, optimizer)
        manager.sync_gradients(model)
        loader = fft.CursorLoader(torch.utils.data.TensorDataset(torch.randn(4096, 8)), 4, seed=1)
        times: list[tuple[float, float]] = []
        for txn in manager.transactions(loader, max_steps=config["steps"] + WARM_UP):
            with txn:
                model(txn.batch[0]).square().mean().backward()
            if txn.committed:
                times.append((time.perf_counter(), time.process_time()))
        manager.shutdown()
        counted = times[WARM_UP:]
        steps = [(b[0] - a[0]) * 1e3 for a, b in pairwise(counted)]
        cpu = (counted[-1][1] - counted[0][1]) / len(steps) * 1e3
        found.append({"arm": turn["arm"], "steps": steps, "cpu": cpu})
    sys.stdout.write(json.dumps(found))


def main() -> None:
    """Start the services and the groups, and print a table."""
    os.environ["RUST_LOG"] = "error"  # before torchft is imported, which otherwise logs every call
    from torchft.coordination import LighthouseServer

    from fft.bus import serve_tcp
    from fft.bus.tcpserver import host_store

    numbers = [int(text) for text in sys.argv[1:]]
    groups, steps, repetitions = (*numbers, *(2, 300, 5)[len(numbers) :])
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=500)
    bus = serve_tcp()
    address, kept, turns = bus.url.rpartition("/")[0], [], []
    for number, arm in enumerate(ARMS * repetitions):
        stores = [host_store() for _ in range(groups)]
        kept.append(stores)
        ports = [port for _, port in stores]
        turns.append({"arm": arm, "bus": f"{address}/turn{number}", "stores": ports})
    port = lighthouse.address().rpartition(":")[2]
    config = {"turns": turns, "groups": groups, "steps": steps}
    config["lighthouse"] = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "config.json")
        path.write_text(json.dumps(config))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "FFT_MONITOR": "0"}
        command = [sys.executable, __file__, "--group", str(path)]
        children = [
            subprocess.Popen([*command, str(group)], env=env, stdout=subprocess.PIPE, text=True)
            for group in range(groups)
        ]
        try:
            said = [process.communicate(timeout=LIMIT_S)[0] for process in children]
        finally:
            for process in children:
                process.kill()
                process.wait()
            lighthouse.shutdown()
            bus.close()
    show([json.loads(text) for text in said], groups, steps)


def show(found: list[list[dict[str, Any]]], groups: int, steps: int) -> None:
    """Print the medians of the turns' medians, with their range, over all groups."""
    print(f"{groups} groups x 1 rank, {steps} steps a turn, ms per step")
    print(f"{'':<24}{'p50':>8}{'of turns':>18}{'p99':>8}{'cpu':>8}")
    for arm in ARMS:
        mine = [turn for group in found for turn in group if turn["arm"] == arm]
        turns, cpu = [turn["steps"] for turn in mine], statistics.median(t["cpu"] for t in mine)
        p50 = [statistics.median(turn) for turn in turns]
        p99 = [sorted(turn)[int(len(turn) * 0.99)] for turn in turns]
        spread = f"{min(p50):.2f} … {max(p50):.2f}"
        middle, high = statistics.median(p50), statistics.median(p99)
        print(f"{arm:<24}{middle:>8.2f}{spread:>18}{high:>8.2f}{cpu:>8.2f}")


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--group"] else main()

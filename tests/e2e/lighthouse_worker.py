"""One group of one rank, for test_lighthouse.py: ``lighthouse_worker.py CONFIG.json GROUP``.

It prints each commit on stdout. It trains until ``steps``, or until SIGTERM drains it, and writes
its final state into ``TRACES/end-GROUP.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from stage import Noisy, Numbers, batch_of, parameters, weights
from torchft import ProcessGroupGloo

import fft
from fft.bus.tcpserver import host_store

HOLD_S = 60.0


def say(**words: Any) -> None:
    """Print one line for the test."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def native_threads() -> list[str]:
    """Return the names of all threads of this process, including torchft's."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def hold(done: threading.Event) -> None:
    """Wait outside of collectives until a rollback interrupts, so that gloo can notice nothing."""
    if not done.is_set():
        done.set()
        threading.Event().wait(HOLD_S)


def main() -> None:
    """Train as configured."""
    config: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    group = sys.argv[2]
    torch.set_num_threads(1)
    _, port = host_store()
    model = Noisy(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        expected_groups=config["groups"],
        replica_id=group,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=port,
        lighthouse_addr=config.get("lighthouses", {}).get(group) or config.get("lighthouse"),
        config=fft.ManagerConfig(
            membership=config.get("membership", "register"),
            digest="commit",
            max_body_failures=config.get("max_body_failures", 5),
        ),
        init_sync=False,
        bus=config["bus"],
        trace_dir=config["traces"],
        quorum_timeout=timedelta(seconds=config.get("quorum_timeout", 30)),
        timeout=timedelta(seconds=30),
        timeouts={
            "join_window": 60.0,  # a busy machine starts them late
            "quorum": 120.0,
            "lighthouse_window": config.get("lighthouse_window", 1.0),
        },
    )
    manager.drain(on=signal.SIGTERM)
    manager.register(model, optimizer, generators=[model.generator])
    manager.sync_gradients(model)
    held = threading.Event()
    try:
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in manager.transactions(loader, max_steps=config.get("steps")):
            with txn:
                if txn.step == 0:
                    say(begun=True)
                if txn.step == config.get("dies_at", {}).get(group):
                    os.kill(os.getpid(), signal.SIGKILL)
                if txn.step == config.get("hold_at"):
                    hold(held)
                x = batch_of(txn.batch)
                model(x).sub(x.mean(1, keepdim=True)).square().mean().backward()
            if txn.committed:
                say(step=txn.step + 1)
        end = {
            "steps": manager.current_step(),
            "weights": weights(model),
            "parameters": parameters(model),
            "native": native_threads(),
            "threads": [thread.name for thread in threading.enumerate()],
        }
        Path(config["traces"], f"end-{group}.json").write_text(json.dumps(end))
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()

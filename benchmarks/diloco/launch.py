"""A launcher that runs the job of one system to its end, and restarts a group that died.

FFT runs under `fft run`; torchft's groups are started here, with a lighthouse. No process outlives
`run`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.diloco.plan import GROUPS, Schedule, System
from benchmarks.side_by_side.events import Event, Reader
from fft.bus.tcpserver import host_store
from fft.launch.supervisor.children import Child
from fft.launch.supervisor.script import Script

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
HOST = "127.0.0.1"
LIGHTHOUSE = {"join_timeout_ms": 2000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 2000}
"""Settings with which a dead group is noticed soon, and a slow one on a busy machine is waited
for."""
_END_S = 20.0
_RESTARTS = 100


class LaunchError(Exception):
    """The job did not reach its end; the message names its logs."""


def run(system: System, schedule: Schedule, directory: Path, limit_s: float) -> list[Event]:
    """Return all events of a job, in order. Raises LaunchError."""
    directory.mkdir(parents=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FFT_", "TORCHFT_"))}
    env |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "RUST_LOG": "error",
        "BENCH_SYSTEM": system,
        "BENCH_DIR": str(directory),
        "BENCH_OUTER": str(schedule.outer),
        "BENCH_FAULT_EVERY": str(schedule.every),
    }
    (_run_fft if system == "fft" else _run_torchft)(env, directory, limit_s)
    return Reader(directory).news()


def _run_fft(env: dict[str, str], directory: Path, limit_s: float) -> None:
    command = [sys.executable, "-m", "fft.cli", "run", "--no-progress", "--groups", str(GROUPS)]
    command += ["--ranks", "1", "--max-restarts", str(_RESTARTS), "--timeout", str(limit_s)]
    command += ["--trace-dir", str(directory / "traces"), str(WORKER)]
    log = directory / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            command, env=env, stdout=file, stderr=file, timeout=limit_s + 60, check=False
        )
    if done.returncode:
        raise LaunchError(f"fft run ended with {done.returncode}; see {log}")


def _run_torchft(env: dict[str, str], directory: Path, limit_s: float) -> None:
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer  # imports torch

    lighthouse = LighthouseServer(f"{HOST}:0", min_replicas=1, **LIGHTHOUSE)
    env = {**env, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    stores: list[Any] = []
    living: dict[int, Child] = {}
    deadline, starts = time.monotonic() + limit_s, 0
    try:
        for group in range(GROUPS):
            living[group] = _started(group, env, directory, stores)
        while living:
            left = deadline - time.monotonic()
            ready = select.select([c.fd for c in living.values()], [], [], max(0.0, left))[0]
            if not ready:
                raise LaunchError(f"torchft's job is not through in {limit_s:g} s: {directory}")
            for group in [g for g, child in living.items() if child.fd in ready]:
                if living.pop(group).reap() == 0:
                    continue
                starts += 1
                if starts > _RESTARTS:
                    raise LaunchError(f"group {group} of torchft dies too often: {directory}")
                living[group] = _started(group, env, directory, stores)
    finally:
        for child in living.values():
            child.signal(signal.SIGKILL)
        for child in living.values():
            if child.dies_within(_END_S):
                child.reap()
        lighthouse.shutdown()


def _started(group: int, env: dict[str, str], directory: Path, stores: list[Any]) -> Child:
    store, port = host_store(HOST)
    stores.append(store)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    place |= {"REPLICA_GROUP_ID": str(group), "NUM_REPLICA_GROUPS": str(GROUPS)}
    log = directory / f"log-{group}.txt"
    return Child(str(group), 0, 1, Script([str(WORKER)]), {**env, **place}, log)

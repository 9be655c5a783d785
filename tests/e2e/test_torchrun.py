"""Test of replica groups that torchrun starts: one on one host, one over two agents."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from fft.trace.audit import audit_dir

SCRIPT = Path(__file__).with_name("torchrun_script.py")
LIMIT_S = 200.0


@contextmanager
def started(*command: str, log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module of Python in the block, and end its processes when the block is left."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
        try:
            yield process
        finally:
            tree = [*psutil.Process(process.pid).children(True)] if process.poll() is None else []
            process.kill()
            process.wait()
            for each in tree:
                each.kill()


@contextmanager
def torchrun(
    group: int, folder: Path, env: Mapping[str, str], node: int | None = None, port: int = 0
) -> Iterator[subprocess.Popen[bytes]]:
    """Run an agent of a group with two ranks: all of it, or one rank on ``node`` of two."""
    size = ["--nproc-per-node", "2", "--rdzv-endpoint", "localhost:0"]
    if node is not None:
        size = ["--nnodes", "2", "--node-rank", f"{node}", "--nproc-per-node", "1"]
        size += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command = ["torch.distributed.run", *size, "--max-restarts", "3", "--rdzv-backend", "c10d"]
    command += ["--rdzv-id", f"group{group}", str(SCRIPT)]
    log = folder / f"group{group}.{node or 0}.log"
    with started(*command, log=log, REPLICA_GROUP_ID=str(group), **env) as process:
        yield process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def steps_of(traces: Path, group: int, incarnation: int) -> int:
    """Return the number of steps that both ranks of an incarnation of the group have committed."""
    files = [traces / f"g{group}r{rank}i{incarnation}.jsonl" for rank in (0, 1)]
    if not all(file.exists() for file in files):
        return 0
    return min(file.read_text().count('"note":"consumed"') for file in files)


@pytest.mark.long
@pytest.mark.multiprocess
def test_groups_of_torchrun_survive_a_kill_and_drain(tmp_path: Path) -> None:
    traces, token = tmp_path / "traces", tmp_path / "job.token"
    serve = ["fft.cli", "serve", "--no-lighthouse", "--token-file", str(token)]
    with started(*serve, log=tmp_path / "serve.log"):
        serve_log = tmp_path / "serve.log"
        wait_until(lambda: "FFT_BUS=" in serve_log.read_text(), "the bus", LIMIT_S)
        env = dict(re.findall(r"(FFT_BUS)=(\S+)", serve_log.read_text()))
        env |= {"FFT_TOKEN_FILE": str(token), "FFT_TRACE_DIR": str(traces)}
        env |= {"NUM_REPLICA_GROUPS": "2"}
        port = free_port()
        with (
            torchrun(0, tmp_path, env) as whole,
            torchrun(1, tmp_path, env, node=0, port=port) as first,
            torchrun(1, tmp_path, env, node=1, port=port) as second,
        ):
            wait_until(lambda: steps_of(traces, 1, 1) >= 5, "steps of both groups", LIMIT_S)
            (victim,) = psutil.Process(second.pid).children()
            victim.kill()
            wait_until(lambda: steps_of(traces, 1, 2) >= 10, "steps after the restart", LIMIT_S)
            for agent in (first, second):
                agent.send_signal(signal.SIGTERM)
            for agent in (first, second):
                agent.wait(LIMIT_S)
            so_far = steps_of(traces, 0, 1)
            wait_until(lambda: steps_of(traces, 0, 1) > so_far + 5, "steps of group 0", LIMIT_S)
            whole.send_signal(signal.SIGTERM)
            whole.wait(LIMIT_S)
    found = audit_dir(traces)
    assert found.ok, found.render()
    logs = {file.stem: file.read_text() for file in tmp_path.glob("group*.log")}
    assert {name: text.count("left at step") for name, text in logs.items()} == {
        "group0.0": 2,
        "group1.0": 1,
        "group1.1": 1,
    }

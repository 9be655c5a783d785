"""What a job loses when all of its trainers are killed at random moments.

A job of 2 x 2 FSDP2 ranks with 100 MB of state each runs under `fft run` with a copy in memory of
each step (``memory``), or with durable checkpoints (``disk``). All trainers are killed at random
moments, also in the midst of a copy, and once together with `fft run`, whose command is then given
again. For each kill the driver prints the steps lost and the seconds to the next commit; at the end
whether the state has the bits of an undisturbed run, and the verdict of the audit.

``python -m tests.acceptance.near_state --kills 20 --mb 100 --tier memory``
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fft
from fft.trace.audit import read_lines
from fft.trace.resumed import audit_job
from fft.trace.starts import start_folders

LIMIT_S = 1800
TIERS = {
    "memory": ["--memory", "1"],
    "auto": [],
    "disk": ["--memory", "off", "--checkpoint", "{}", "--every", "10"],
}


def train(out: Path, steps: int, mb: int, pause_s: float) -> None:
    """Train as one rank. Most of the state is frozen, so that a step is not a copy of it."""
    (out / f"pid-{os.getpid()}").touch()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shard_pg = fft.ShardProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = fft.ManagerFFT(shard_pg=shard_pg, min_replica_size=2)
    mesh = manager.shard_mesh()
    trained = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 1))
    fully_shard(trained, mesh=mesh)
    held = nn.ParameterList(nn.Parameter(torch.randn(mb * 10**6 // 32)) for _ in range(8))
    held.requires_grad_(False)
    model = nn.ModuleList([trained, held])
    manager.register(model, torch.optim.AdamW(trained.parameters(), lr=1e-3))
    manager.sync_gradients(model)
    data = torch.randn(4096, 64)
    for txn in manager.transactions(fft.CursorLoader(data, batch_size=8), max_steps=steps):
        with txn:
            trained(txn.batch).square().mean().backward()
            time.sleep(pause_s)
    rank = f"{os.environ['REPLICA_GROUP_ID']}-{os.environ['RANK']}"
    (out / f"final-{rank}").write_text(manager.digest())
    manager.shutdown()


def commits(traces: Path) -> dict[str, list[tuple[float, int]]]:
    """Return the commits of each start: the wall clock in s, and the number of committed steps."""
    found: dict[str, list[tuple[float, int]]] = {}
    for folder in filter(lambda folder: any(folder.glob("*.jsonl")), start_folders(traces)):
        lines = read_lines(folder, lambda line: line.get("note") == "consumed")
        times = sorted((line["wall"], line["data"]["step"] + 1) for line in lines)
        if times:
            found[folder.name] = times
    return found


def newest(traces: Path) -> tuple[float, int]:
    """Return the time and the number of the newest commit."""
    return max(itertools.chain(*commits(traces).values()), default=(0.0, 0))


def kill(out: Path) -> None:
    """SIGKILL all trainers."""
    for mark in out.glob("pid-*"):
        with suppress(ProcessLookupError):
            os.kill(int(mark.name.removeprefix("pid-")), signal.SIGKILL)
        mark.unlink()


def run(root: Path, args: argparse.Namespace, kills: int) -> dict[str, object]:
    """Run a job to its end with so many kills, and return what they cost."""
    out, traces, dice = root / "out", root / "traces", random.Random(args.seed)
    out.mkdir(parents=True)
    options = [each.format(root / "kept") for each in TIERS[args.tier]]
    command = [sys.executable, "-m", "fft.cli", "run", "--no-progress", "--groups", "2"]
    command += ["--ranks", "2", "--trace-dir", str(traces), "--resume", *options, __file__]
    command += ["--train", str(out), "--steps", str(args.steps), "--mb", str(args.mb)]
    log, costs = (root / "log").open("ab"), []
    start = partial(subprocess.Popen, command, stdout=log, stderr=log)
    process = start()
    try:
        for number in range(kills):
            began = newest(traces)[1]
            while newest(traces)[1] < began + 3:  # so that each start makes some progress
                assert process.poll() is None, "it ended before it was killed so often"
                time.sleep(0.02)
            time.sleep(dice.uniform(0.0, args.within))
            if number == kills // 2:
                process.kill()
            killed_at = time.time()
            kill(out)
            if number == kills // 2:
                process.wait()
                process = start()
            _, reached = newest(traces)
            known = set(commits(traces))
            while not (later := [c for n, c in commits(traces).items() if n not in known]):
                assert process.poll() is None, "it was not started again"
                time.sleep(0.02)
            at, step = min(later[0])
            costs.append({"at": reached, "lost": reached - step + 1, "s": at - killed_at})
            print(costs[-1], flush=True)
        code = process.wait(LIMIT_S)
    except AssertionError as error:
        error.add_note((root / "log").read_text()[-4000:])
        raise
    finally:
        process.kill()
        log.close()
    assert code == 0, f"exit status {code}"
    finals = {path.name: path.read_text() for path in sorted(out.glob("final-*"))}
    assert len(finals) == 4
    return {"costs": costs, "finals": finals, "audit": audit_job(traces).ok}


def main() -> None:
    """Run a job with kills, and one without for its bits; print a summary, exit 1 on a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mb", type=int, default=100, help="state of each rank")
    parser.add_argument("--tier", choices=TIERS, default="memory")
    parser.add_argument("--within", type=float, default=1.0, metavar="S", help="moment of a kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.steps, args.mb, 0.05)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder, "killed"), args, args.kills)
        still = run(Path(folder, "still"), args, 0)
    costs = found["costs"]
    assert isinstance(costs, list)
    lost, seconds = [cost["lost"] for cost in costs], sorted(cost["s"] for cost in costs)
    same = found["finals"] == still["finals"]
    summary = {"tier": args.tier, "mb": args.mb, "kills": len(costs), "same_bits": same}
    summary |= {"audit": found["audit"], "most_lost": max(lost), "lost": statistics.mean(lost)}
    summary |= {"median_s": statistics.median(seconds), "most_s": seconds[-1]}
    print(json.dumps(summary))
    sys.exit(0 if same and found["audit"] and (args.tier != "memory" or max(lost) <= 1) else 1)


if __name__ == "__main__":
    main()

"""The cost of a whole training step of a GPT of 6 and of 25 million parameters, under each system.

``python -m benchmarks.whole_step [--dir DIR] [--reps N] [--write]`` is a part of ``make bench``.
The step function is nanoGPT's: loss, backward, clipping of the gradients, AdamW. Every system
trains the same model on as many processes, one thread each. In each repetition every system has its
turn, in a rotating order. A ratio is the median of the repetitions' own ratios, so that other load
of the machine, and its drift, cancel.

Called with ``worker`` it is one such process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SIZES = {"6 M": (8, 256), "25 M": (8, 512)}
"""Number of blocks and width."""
CONTEXT, VOCABULARY, BATCH = 64, 96, 2
LAYOUTS = {"2 x 1": (2, 1), "2 x 2": (2, 2)}
"""Number of replica groups, and of ranks of each."""
SYSTEMS = {
    "torch": "torch alone (DistributedDataParallel; 2 x 2: FSDP2 on a 2 x 2 mesh)",
    "torchft": "torchft",
    "drop-in": "torchft's loop on ManagerFFT",
    "fft": "FFT's loop",
}
WARM_UP = 5
STEPS = {("6 M", 1): 75, ("6 M", 2): 25, ("25 M", 1): 25, ("25 M", 2): 15}
"""Measured steps after the first ones, by size and ranks of a group: about 10 s."""
LIMIT = timedelta(seconds=60)
WORKER_LIMIT_S = 180
PAGE = Path(__file__).parents[1] / "docs" / "whole_step.md"


class Block(nn.Module):
    """A block of causal self-attention and an MLP, each after a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads = width // 32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, 32)
        mixed = F.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A GPT that returns the loss, as nanoGPT's."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.token(text) + self.place.weight
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.flatten(0, 1), text.roll(-1, 1).flatten())


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """A data set of random text."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(VOCABULARY, (CONTEXT,), generator=generator)


class Clock:
    """A clock for the times of steps."""

    def __init__(self, steps: int) -> None:
        self.steps = WARM_UP + steps
        self.marks = [time.perf_counter()]

    def lap(self) -> bool:
        """Record the end of a step. Return whether there is another one."""
        self.marks.append(time.perf_counter())
        return len(self.marks) <= self.steps

    def steps_ms(self) -> list[float]:
        """Return the times of all but the first steps."""
        marks = self.marks[WARM_UP:]
        return [1000 * (b - a) for a, b in itertools.pairwise(marks)]


# --- one process ----------------------------------------------------------------------------------


def shard(model: nn.Module, mesh: Any) -> None:
    """Apply ``fully_shard`` as its users do: to each block, then to the whole."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def update_ms(body: Callable[[torch.Tensor], None], clock: Clock) -> list[float]:
    """Run a plain loop over the data."""
    loader = iter(torch.utils.data.DataLoader(Windows(), batch_size=BATCH))
    body(next(loader))
    while clock.lap():
        body(next(loader))
    return clock.steps_ms()


def train_torch(model: nn.Module, clock: Clock, group: int, rank: int, ranks: int) -> list[float]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world = 2 * ranks
    number = group * ranks + rank
    dist.init_process_group(
        "gloo", init_method=os.environ["BENCH_INIT"], rank=number, world_size=world
    )
    wrapped: nn.Module = model
    if ranks == 1:
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        shard(model, init_device_mesh("cpu", (2, ranks), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def body(batch: torch.Tensor) -> None:
        wrapped(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    times = update_ms(body, clock)
    dist.destroy_process_group()
    return times


def train_in_torchfts_loop(
    model: nn.Module, clock: Clock, group: int, rank: int, ranks: int, of_fft: bool
) -> list[float]:
    import torchft

    import fft

    shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT) if ranks > 1 else None
    kind: Any = fft.ManagerFFT if of_fft else torchft.Manager
    more: dict[str, Any] = {"shard_pg": shard_pg} if of_fft and shard_pg is not None else {}
    manager = kind(
        pg=torchft.ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=2,
        replica_id=str(group),
        init_sync=False,
        **more,
    )
    wrapped: nn.Module = model
    if ranks == 1:
        wrapped = torchft.DistributedDataParallel(manager, model)
    else:
        if of_fft:
            mesh = manager.shard_mesh()
        else:
            assert shard_pg is not None
            host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
            shard_pg.configure(f"{host}:{port}/shard", str(group), rank, ranks)
            mesh = shard_pg.mesh()
        shard(model, mesh)

        def reduce(tensor: torch.Tensor) -> None:
            manager.allreduce(tensor).wait()

        for module in model.modules():
            if hasattr(module, "set_all_reduce_hook"):
                module.set_all_reduce_hook(reduce)
    optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def body(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        wrapped(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    times = update_ms(body, clock)
    manager.shutdown()
    return times


def train_fft(model: nn.Module, clock: Clock, group: int, rank: int, ranks: int) -> list[float]:
    import torchft

    import fft

    shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT) if ranks > 1 else None
    manager = fft.ManagerFFT(
        pg=torchft.ProcessGroupGloo(timeout=LIMIT),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        replica_id=str(group),
        init_sync=False,
    )
    if ranks > 1:
        shard(model, manager.shard_mesh())
    manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Windows(), batch_size=BATCH)
    for txn in manager.transactions(loader, max_steps=clock.steps):
        with txn:
            model(txn.batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clock.lap()
    manager.shutdown()
    return clock.steps_ms()


def work(system: str, size: str, group: int, rank: int, ranks: int) -> None:
    """Run one process; print its step times."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = GPT(*SIZES[size])
    clock = Clock(STEPS[size, ranks])
    if system == "torch":
        times = train_torch(model, clock, group, rank, ranks)
    elif system == "fft":
        times = train_fft(model, clock, group, rank, ranks)
    else:
        times = train_in_torchfts_loop(model, clock, group, rank, ranks, system == "drop-in")
    print("TIMES", json.dumps(times), flush=True)


# --- all of them ----------------------------------------------------------------------------------


def repetition(system: str, size: str, layout: str) -> float:
    """Return the median step in ms, of the slowest process."""
    from torchft.coordination import LighthouseServer

    from fft.bus import serve_tcp
    from fft.bus.tcpserver import host_store

    groups, ranks = LAYOUTS[layout]
    bus = serve_tcp()
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=groups, join_timeout_ms=5000)
    keep: list[Any] = []
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for group in range(groups):
            store, port = host_store()
            keep.append(store)
            for rank in range(ranks):
                env = {
                    **os.environ,
                    "FFT_BUS": bus.url,
                    "TORCHFT_LIGHTHOUSE": lighthouse.address() if system == "torchft" else "",
                    "BENCH_INIT": f"file://{folder}/init",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "NUM_REPLICA_GROUPS": str(groups),
                    "OMP_NUM_THREADS": "1",
                }
                call = [sys.executable, "-m", "benchmarks.whole_step", "worker", system, size]
                call += [str(group), str(rank), str(ranks)]
                with open(Path(folder) / f"{group}.{rank}", "wb") as log:
                    processes.append((subprocess.Popen(call, env=env, stdout=log, stderr=log), log))
        deadline = time.monotonic() + WORKER_LIMIT_S
        try:
            for process, _ in processes:
                process.wait(max(1.0, deadline - time.monotonic()))
        finally:
            for process, _ in processes:
                process.kill()
                process.wait()
        texts = [Path(log.name).read_text() for _, log in processes]
    lighthouse.shutdown()
    bus.close()
    medians = [statistics.median(json.loads(_times(text))) for text in texts]
    return max(medians)


def _times(text: str) -> str:
    for line in text.splitlines():
        if line.startswith("TIMES "):
            return line.removeprefix("TIMES ")
    raise RuntimeError(f"a process ended without times:\n{text[-4000:]}")


def rows(reps: int, sizes: list[str], layouts: list[str]) -> list[dict[str, Any]]:
    """Return one row for each size and layout: all repetitions of each system, in ms."""
    found: list[dict[str, Any]] = [
        {"size": size, "layout": layout, "ms": {system: [] for system in SYSTEMS}}
        for size in sizes
        for layout in layouts
    ]
    for rep, row in itertools.product(range(reps), found):
        for turn in range(len(SYSTEMS)):
            system = list(SYSTEMS)[(rep + turn) % len(SYSTEMS)]
            row["ms"][system].append(repetition(system, row["size"], row["layout"]))
        last = ", ".join(f"{system} {row['ms'][system][-1]:.0f} ms" for system in SYSTEMS)
        print(f"{rep + 1} of {reps}: {row['size']} {row['layout']}: {last}", flush=True)
    return found


def ratio(times: dict[str, list[float]], system: str, beside: str) -> str:
    """Return the median of the repetitions' ratios."""
    pairs = zip(times[system], times[beside], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


def page(found: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = [
        "# Cost of a whole step",
        "",
        "Written by `python -m benchmarks.whole_step --write` (a part of `make bench`). A GPT "
        f"with clipping and AdamW, batch {BATCH} x {CONTEXT} a rank, CPU, gloo, one thread each; "
        f"{os.cpu_count()} cores, torch {torch.__version__}. Median step in ms, over "
        f"{len(found[0]['ms']['fft'])} repetitions of {min(STEPS.values())} to "
        f"{max(STEPS.values())} steps, the systems in turn; smallest and largest repetition in "
        "brackets. A ratio is the median of the repetitions' ratios.",
        "",
        "To torch's step FFT adds the vote of the slowest group and the decision (three round "
        "trips to the store, 2 to 3 ms on two busy cores; torchft's `should_commit` asks its own "
        "group only, 0.8 ms), and about 1 ms between two steps. Its backward takes as long as "
        "DDP's. At 2 x 2 four ranks share two cores, so what runs beside them counts in full: a "
        "monitor for each rank, and with FSDP2 two passes over the gradients, into the bucket and "
        "back.",
        "",
        "| model | groups x ranks | "
        + " | ".join(SYSTEMS.values())
        + " | FFT / torch | FFT / torchft | drop-in / torchft |",
        "|---|---|" + "---|" * (len(SYSTEMS) + 3),
    ]
    for row in found:
        middle = {system: statistics.median(times) for system, times in row["ms"].items()}
        cells = [
            f"{middle[s]:.0f} ({min(row['ms'][s]):.0f} … {max(row['ms'][s]):.0f})" for s in SYSTEMS
        ]
        cells += [
            ratio(row["ms"], *pair)
            for pair in (("fft", "torch"), ("fft", "torchft"), ("drop-in", "torchft"))
        ]
        lines.append(f"| {row['size']} | {row['layout']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        system, size, group, rank, ranks = sys.argv[2:]
        work(system, size, int(group), int(rank), int(ranks))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="for the raw results")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args()
    found = rows(args.reps, args.sizes, args.layouts)
    if args.dir is not None:
        args.dir.mkdir(parents=True, exist_ok=True)
        (args.dir / "whole_step.json").write_text(json.dumps(found))
    print(page(found))
    if args.write:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()

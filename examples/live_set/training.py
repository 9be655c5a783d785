"""Data-parallel training in which any process may be killed, come back, and catch up from a peer.

Four processes fit y = 10 x. Each step has 12 samples, which the members of the live set share. A
process that has been restarted is behind, and takes the weights and the step from a member that is
not. The result has the same bits as a training by one process, whoever was killed.

    fft run --groups 4 examples/live_set/training.py
"""

import argparse
import time

import torch
import torch.distributed as dist

import fft

SAMPLES = 12  # of one step: divisible by 1, 2, 3 and 4 members
RATE = 1e-6


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(42)
    x = torch.randperm(600, generator=generator) - 300.0
    return x, 10 * x + torch.randn(x.shape, generator=generator)


def gradients(weight: torch.Tensor, step: int, part: slice) -> torch.Tensor:
    """Return the gradient of each sample in a part of the step's samples."""
    x, y = data()
    at = [(step * SAMPLES + i) % len(x) for i in range(SAMPLES)][part]
    return 2 * (weight * x[at] - y[at]) * x[at]


def catch_up(weight: torch.Tensor, step: torch.Tensor, group: dist.ProcessGroup, n: int) -> None:
    """Give each member the weight and the step of the member with the highest step."""
    steps = [torch.zeros_like(step) for _ in range(n)]
    dist.all_gather(steps, step, group=group)
    source = max(range(n), key=lambda i: int(steps[i]))
    for tensor in (weight, step):
        dist.broadcast(tensor, group=group, group_src=source)


def main(steps: int, pause_s: float) -> None:
    live = fft.live_set()
    weight, step = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    while step < steps:
        try:
            with live() as members:
                new_weight, now = weight.clone(), step.clone()  # kept if the block fails
                catch_up(new_weight, now, live.group, len(members))
                share = SAMPLES // len(members)
                first = members.index(live.me) * share
                own = gradients(new_weight, int(now), slice(first, first + share))
                of_all = [torch.zeros(share) for _ in members]
                dist.all_gather(of_all, own, group=live.group)
                new_weight -= RATE * torch.cat(of_all).mean()
        except fft.LiveBlockFailed as failure:
            print(f"step {int(step)} failed: {[str(peer) for peer in failure.failed]}", flush=True)
            continue
        if now != step:
            print(f"caught up from step {int(step)} to {int(now)}", flush=True)
        weight, step = new_weight, now + 1
        print(f"round {int(step)}: {weight.item():.4f}, {len(members)} members", flush=True)
        time.sleep(pause_s)
    alone = torch.zeros(1)
    for k in range(steps):
        alone -= RATE * gradients(alone, k, slice(None)).mean()
    assert torch.equal(weight, alone), (weight, alone)
    print(
        f"done: after {steps} steps the weight is {weight.item()}, as without a fault", flush=True
    )
    live.close()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=60, help="steps")
    options.add_argument("--pause", type=float, default=0.1, help="seconds between two steps")
    args = options.parse_args()
    main(args.rounds, args.pause)

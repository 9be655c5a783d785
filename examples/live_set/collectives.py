"""Collectives that survive the death of any process.

Four processes add up one number each, 30 times. A process may be killed at any time; the others
continue without it, and it takes part again once it has been restarted.

    fft run --groups 4 examples/live_set/collectives.py
"""

import argparse
import time

import torch
import torch.distributed as dist

import fft


def main(rounds: int, pause_s: float) -> None:
    live = fft.live_set()
    done = torch.zeros(1, dtype=torch.int64)
    while done < rounds:
        try:
            with live() as members:
                # a process that has been restarted takes the count of the others
                agreed = done.clone()
                dist.all_reduce(agreed, dist.ReduceOp.MAX, group=live.group)
                number = torch.tensor([float(live.me.group) + 1])
                dist.all_reduce(number, group=live.group)
        except fft.LiveBlockFailed as failure:
            print(f"round {int(done)} failed: {[str(peer) for peer in failure.failed]}", flush=True)
            continue
        # all members get here, or none
        expected = sum(float(peer.group) + 1 for peer in members)
        assert number.item() == expected, (number, members)
        done = agreed + 1
        print(f"round {int(done)}: {number.item():g} from {len(members)} processes", flush=True)
        time.sleep(pause_s)
    assert done == rounds
    print(f"done after {rounds} rounds", flush=True)
    live.close()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--pause", type=float, default=0.1, help="seconds between two rounds")
    args = options.parse_args()
    main(args.rounds, args.pause)

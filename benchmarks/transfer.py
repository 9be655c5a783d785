"""Throughput of FFT's state transfer beside torchft's, over loopback in one process.

    python benchmarks/transfer.py [MIB] [ROUNDS]

Both send the same state, in turns. The ratio is the result; absolute figures depend on the machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torchft.checkpointing import CheckpointTransport, HTTPTransport

from fft.bus.token import JobToken
from fft.train.state.transfer import StateTransfer

LIMIT = timedelta(seconds=120)


def seconds(
    sender: CheckpointTransport[Any], receiver: CheckpointTransport[Any], state: Any
) -> float:
    """Return the time of one transfer, from the offer to the arrival."""
    began = time.perf_counter()
    sender.send_checkpoint([1], 7, state, LIMIT)
    got = receiver.recv_checkpoint(0, sender.metadata(), 7, LIMIT)
    took = time.perf_counter() - began
    sender.disallow_checkpoint()
    assert torch.equal(got["t3"], state["t3"])
    return took


def main() -> None:
    """Print MiB/s of each, and their ratio."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    state = {f"t{i}": torch.randn(size * 2**20 // 4 // 16) for i in range(16)}
    token = JobToken.fresh()
    kinds = {
        "torchft": [HTTPTransport[Any](LIMIT, 0) for _ in range(2)],
        "fft": [StateTransfer(token, LIMIT, address="127.0.0.1") for _ in range(2)],
    }
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, (sender, receiver) in kinds.items():
            took[name].append(seconds(sender, receiver, state))
    for name, (sender, receiver) in kinds.items():
        print(f"{name:8} {size / statistics.median(took[name]):7.0f} MiB/s (median of {rounds})")
        sender.shutdown()
        receiver.shutdown()
    pairs = zip(took["torchft"], took["fft"], strict=True)
    print(f"ratio    {statistics.median(a / b for a, b in pairs):7.2f} of torchft's throughput")


if __name__ == "__main__":
    main()

"""One replica group of a test job, which shares its device with the other. Run by ``fft run``.

At its end it writes ``end-<group>.json``: its step, the bits of its state, the times of its steps,
how many step functions failed, and in how many of these the device was still working.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft

import fft
from tests.acceptance.gpu.parts import nets
from tests.acceptance.gpu.parts.broken import Breaker

LIMIT = timedelta(seconds=60)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=0, help="0: until it is drained")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--digest", choices=["commit", "never"], default="commit")
    parser.add_argument("--busy", type=float, default=10.0, help="ms of the device, in each body")
    parser.add_argument("--breaks", default="", help="STEP=WAY,…: how the device fails group 1")
    args = parser.parse_args()
    group = os.environ["REPLICA_GROUP_ID"]
    manager = fft.ManagerFFT(
        pg=torchft.ProcessGroupGloo(LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 40.0},
        config=fft.ManagerConfig(digest=args.digest),
    )
    breaker = Breaker(args.breaks if group == "1" else "", args.device, args.out)
    torch.manual_seed(0)
    width = nets.width_of(args.small)
    model = nets.Net(width, dropout=args.dropout).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(nets.data(width), batch_size=nets.BATCH, seed=3)
    took, before = [], time.perf_counter()
    failed = in_flight = 0

    def body(txn: Any) -> None:
        x = txn.batch[0].to(args.device)
        nets.keep_busy(args.device, args.busy)  # all that follows waits behind it
        loss = nets.loss_of(model, x)
        breaker.at(txn.step)
        loss.backward()

    try:
        for txn in manager.transactions(loader, args.steps or None):
            with txn:
                try:
                    body(txn)
                except BaseException:
                    failed += 1
                    in_flight += nets.is_busy(args.device)
                    raise
            nets.synchronize(args.device)
            if txn.committed:
                took.append(time.perf_counter() - before)
            before = time.perf_counter()
        end = {"group": group, "step": manager.current_step(), "ms": [1e3 * s for s in took]}
        end |= {"failed": failed, "in_flight": in_flight}
        # each group has its own batch norm buffers
        end["bits"] = nets.bits(model.parameters())
        (args.out / f"end-{group}.json").write_text(json.dumps(end))
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()

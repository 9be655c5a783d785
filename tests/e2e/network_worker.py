"""Processes of test_networks.py: a bus, and ranks of one group each, on different hosts."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from namespaces import Host
from ranks import LIMIT, WIDTH, Samples
from torchft import ProcessGroupGloo

import fft
from fft.bus.addresses import own_address
from fft.bus.tcpserver import host_store
from fft.launch.services import start_services


def serve(host: Host, listens_on: str) -> None:
    """Serve a bus and write its URL."""
    host.enter()
    services = start_services(listens_on, with_lighthouse=False)
    print(services.bus_url, flush=True)
    threading.Event().wait()  # the test ends this process


def run(host: Host, *arguments: str) -> None:
    """Run the command ``fft ARGUMENT…`` on ``host``."""
    host.enter()
    os.execv(sys.executable, [sys.executable, "-m", "fft.cli", *arguments])


def list_listeners(host: Host, file: Path) -> None:
    """Write the TCP listeners and the UDP sockets of ``host``, as address and command line."""
    host.enter()
    found = [
        (each.laddr.ip, psutil.Process(each.pid).cmdline())
        for each in psutil.net_connections("inet")
        if each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM
    ]
    file.write_text(json.dumps(found))


def train(host: Host, group: str, bus: str, traces: Path, steps: int | None, least: int) -> None:
    """Train until ``steps``, or until a file ``end`` is in ``traces``, on weights with which only
    group 0 begins; write a digest of them."""
    host.enter()
    address = os.environ.get("STORE_ADDRESS") or own_address(bus)
    store, port = host_store(address)
    limit = timedelta(seconds=float(os.environ.get("OP_LIMIT_S", LIMIT.total_seconds())))
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=limit),
        timeout=limit,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=least,
        replica_id=group,
        store_addr=address,
        store_port=port,
        rank=0,
        world_size=1,
        bus=bus,
        trace_dir=traces,
        config=fft.ManagerConfig(monitor=False),
    )
    torch.manual_seed(int(group))
    model = torch.nn.Linear(WIDTH, 1)
    manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.sync_gradients(model)
    for txn in manager.transactions(fft.CursorLoader(Samples(), batch_size=4, seed=5), steps):
        with txn:
            model(txn.batch).square().mean().backward()
        print(f"step {txn.step} of {manager.num_participants()}", flush=True)
        if (traces / "end").exists():
            manager.drain(reason="the test is over")
    print("weights", model.weight.double().sum().item().hex(), flush=True)
    manager.shutdown()
    del store

"""Processes of test_networks.py: a bus, and ranks of one group each, on different hosts."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from namespaces import Host
from ranks import LIMIT, WIDTH, Samples
from torchft import ProcessGroupGloo
from waiting import wait_until

import fft
from fft.bus import open_bus
from fft.bus.addresses import own_address
from fft.bus.nats import NatsBus
from fft.bus.tcpserver import host_store
from fft.bus.token import JobToken
from fft.launch.services import start_services
from fft.train.process_groups import AbortableGroup


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


def leader(host: Host, bus: str, token: Path, file: Path) -> None:
    """Write the name of the NATS server that leads the registers of the job."""
    host.enter()
    name = f"STREAM.INFO.fft-{bus.rpartition('/')[2]}"
    with open_bus(bus, LIMIT.total_seconds(), token=JobToken.from_file(token)) as opened:
        assert isinstance(opened, NatsBus)
        link = opened._link
        info = link.run(lambda: link.repeat(lambda limit: link.api(name, {}, limit)))
    file.write_text(info["cluster"]["leader"])


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


def build(host: Host, rank: int, folder: Path) -> None:
    """Build a group of two ranks on 10.79.0.1 and .2; the store is rank 1's, on 10.77.0.2."""
    host.enter()
    if rank == 1:
        kept = host_store("10.77.0.2")
        (folder / "port.new").write_text(str(kept[1]))
        (folder / "port.new").rename(folder / "port")
    wait_until((folder / "port").exists, "the store is served", LIMIT.total_seconds())
    group = AbortableGroup(ProcessGroupGloo(timeout=LIMIT))
    group.address = f"10.79.0.{rank + 1}"
    try:
        place = f"10.77.0.2:{(folder / 'port').read_text()}/built"
        group.configure(place, str(rank), rank, 2, timeout=LIMIT)
    except (OSError, RuntimeError) as error:
        print("refused:", error, flush=True)
    group.close()


def refuse(host: Host, folder: Path) -> None:
    """When the file ``go`` exists, answer the first SYN to 10.79.0.1 with "host unreachable"."""
    host.enter()
    tcp, syn, target = socket.IPPROTO_TCP, 0x02, socket.inet_aton("10.79.0.1")
    seen = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
    answers = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    (folder / "listens").touch()
    packet = b""
    while not (packet[9:10] == bytes([tcp]) and packet[16:20] == target and packet[33] == syn):
        packet = seen.recv(2048)
    (folder / "syn").touch()
    wait_until((folder / "go").exists, "the route is gone", LIMIT.total_seconds())
    answer = struct.pack("!BBHI", 3, 1, 0, 0) + packet[:28]
    total = sum(struct.unpack(f"!{len(answer) // 2}H", answer))
    total = (total & 0xFFFF) + (total >> 16)
    check = struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF)
    answers.sendto(answer[:2] + check + answer[4:], ("10.77.0.2", 0))

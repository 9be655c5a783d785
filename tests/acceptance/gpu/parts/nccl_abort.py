"""Part 12: where the time of NCCL's abort goes, and which call is faster. One rank, one GPU.

Each way makes a communicator, starts an all-reduce behind a busy device, and ends it. Meanwhile
another thread samples all threads of the process: what they are called, how long they live, and in
which system call they wait.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fft.train.process_groups.nccl_library import configure_nccl_env
from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import nets
from tests.acceptance.gpu.parts.rings import LIMIT

ROUNDS = 3
BUSY_MS = 5.0
_EVERY_S = 0.005
_FLOAT, _SUM = 7, 0
"""NCCL's numbers of ncclFloat32 and ncclSum (nccl.h)."""


def run(pen: Pen, setting: Setting) -> None:
    """Try each way; the first is FFT's."""
    torch.cuda.set_device(0)
    torch.cuda.init()
    configure_nccl_env()
    ways: dict[str, Callable[[], Callable[[], None]]] = {
        "torch's abort, non-blocking communicator": lambda: _by_torch("abort", False),
        "torch's abort, blocking communicator": lambda: _by_torch("abort", True),
        "torch's shutdown, non-blocking communicator": lambda: _by_torch("shutdown", False),
        "ncclCommAbort": lambda: _by_nccl("ncclCommAbort"),
        "ncclCommRevoke, then ncclCommDestroy": lambda: _by_nccl("ncclCommRevoke"),
        "ncclCommFinalize, then ncclCommDestroy": lambda: _by_nccl("ncclCommFinalize"),
    }
    for name, begin in ways.items():
        with pen.trial(name):
            took, seen = [], Counter[str]()
            try:
                for _ in range(ROUNDS):
                    end = begin()
                    began = time.perf_counter()
                    with sampled(seen):
                        end()
                    took.append(1e3 * (time.perf_counter() - began))
                    nets.synchronize("cuda")
            except AttributeError as error:  # of ctypes: this NCCL has no such function
                pen.absent(name, str(error))
                continue
            text = ", ".join(
                f"{who} {count * _EVERY_S / ROUNDS * 1e3:.0f} ms"
                for who, count in seen.most_common(8)
            )
            pen.measured(
                f"{name} (ms)",
                f"threads: {text}",
                median=round(median(took), 1),
                most=round(max(took), 1),
            )


@contextmanager
def sampled(seen: Counter[str], task: Path = Path("/proc/self/task")) -> Iterator[None]:
    """Count the threads of this process by name and system call in ``seen`` until the end."""
    over = threading.Event()

    def sample() -> None:
        own = str(threading.get_native_id())
        while not over.wait(_EVERY_S):
            for thread in os.listdir(task):
                if thread == own:
                    continue
                try:
                    name = (task / thread / "comm").read_text().strip()
                    call = (task / thread / "syscall").read_text().split()[0]
                except OSError:  # it has ended meanwhile
                    continue
                seen[f"{name} in {'no call' if call == 'running' else f'system call {call}'}"] += 1

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        over.set()
        sampler.join()


def _by_torch(method: str, blocking: bool) -> Callable[[], None]:
    """Start a reduction over torch's group, and return what ends it."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.config.blocking = blocking
    options._timeout = LIMIT
    group = nccl(dist.HashStore(), 0, 1, options)
    tensor = torch.ones(1 << 22, device="cuda")
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    nets.synchronize("cuda")
    nets.keep_busy("cuda", BUSY_MS)
    group.allreduce([tensor], dist.AllreduceOptions())
    end: Callable[[], None] = getattr(group, method)
    return end


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def _by_nccl(function: str) -> Callable[[], None]:
    """Start a reduction over NCCL alone, and return what ends it by this function of NCCL.

    Raises AttributeError if the loaded NCCL has no such function.
    """
    nccl = _loaded()
    end = getattr(nccl, function)
    name, comm = _Id(), ctypes.c_void_p()
    _check(nccl.ncclGetUniqueId(ctypes.byref(name)))
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _Id, ctypes.c_int]
    _check(nccl.ncclCommInitRank(ctypes.byref(comm), 1, name, 0))
    tensor = torch.ones(1 << 22, device="cuda")
    data, stream = ctypes.c_void_p(tensor.data_ptr()), torch.cuda.current_stream().cuda_stream
    nets.keep_busy("cuda", BUSY_MS)
    count = ctypes.c_size_t(tensor.numel())
    _check(nccl.ncclAllReduce(data, data, count, _FLOAT, _SUM, comm, ctypes.c_void_p(stream)))

    def finish() -> None:
        _check(end(comm, 0) if function == "ncclCommRevoke" else end(comm))
        if function != "ncclCommAbort":
            _check(nccl.ncclCommDestroy(comm))

    return finish


def _loaded() -> ctypes.CDLL:
    """Return the NCCL that torch has loaded, or torch itself, which may contain it."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = next((line.split()[-1] for line in lines if "libnccl.so" in line), None)
    return ctypes.CDLL(found or str(Path(torch.__file__).parent / "lib/libtorch_cuda.so"))


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"NCCL's result is {result}")

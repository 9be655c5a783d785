"""Part 9: the time of a step under FFT, torch's DDP and torchft, on one device.

With one process, and with two that share the device.

The model is the same, over gloo, without faults. Ratios are of medians.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import TCPStore

from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import jobs

WARM = 5
_LIMIT_S = 35.0
"""Maximum seconds for all processes of a system together."""


def run(pen: Pen, setting: Setting) -> None:
    """Run the whole part."""
    for size, processes in ((1, "one process"), (2, "two processes")):
        _compare(pen, setting, size, processes)


def _compare(pen: Pen, setting: Setting, size: int, processes: str) -> None:
    steps = 12 if setting.small else 60
    found: dict[str, float] = {}
    for system in ("DDP", "torchft"):
        with pen.trial(f"steps under {system}, {processes}"):
            found[system] = _rival(setting, system.lower(), steps, size)
    with pen.trial(f"steps under FFT, {processes}"):
        options = {"dropout": "0", "digest": "never", "busy": "0"}
        ended = jobs.run(setting, f"fft{size}", [], steps=steps, groups=size, **options)
        pen.check(f"the job under FFT is whole, {processes}", ended.is_whole, ended.in_words())
        if not ended.words:
            return
        found["FFT"] = _median(ended.words)
        ratios = {f"to {s}": round(found["FFT"] / found[s], 3) for s in found if s != "FFT"}
        times = {f"{system} (ms)": round(ms, 3) for system, ms in found.items()}
        pen.measured(f"a step's time, {processes}", **times, **ratios)


def _median(words: list[dict[str, Any]]) -> float:
    return median(ms for word in words for ms in word["ms"][WARM:])


@contextmanager
def _lighthouse(system: str, size: int) -> Iterator[str]:
    """Yield the address of a lighthouse that waits for all groups, for torchft."""
    if system != "torchft":
        yield ""
        return
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("127.0.0.1:0", min_replicas=size)
    try:
        yield f"http://127.0.0.1:{urlsplit(server.address()).port}"
    finally:
        server.shutdown()


def _rival(setting: Setting, system: str, steps: int, size: int) -> float:
    """Return the milliseconds of a step of the processes of `tests.acceptance.gpu.parts.rival`."""
    folder = setting.folder / f"{system}{size}"
    folder.mkdir()
    words = [sys.executable, "-m", "tests.acceptance.gpu.parts.rival", "--system", system]
    words += ["--device", setting.device, "--steps", str(steps), "--out", str(folder)]
    words += ["--small"] if setting.small else []
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    words += ["--port", str(store.port), "--size", str(size)]
    with _lighthouse(system, size) as address:
        # one thread for each, as `fft run` has it
        env = {**os.environ, "TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"}
        processes, logs = [], [folder / f"log{rank}.txt" for rank in range(size)]
        for rank in range(size):
            with logs[rank].open("wb") as out:
                own = [*words, "--rank", str(rank)]
                processes.append(subprocess.Popen(own, env=env, stdout=out, stderr=out))
        try:
            ends = time.monotonic() + min(_LIMIT_S, setting.left())
            codes = [process.wait(max(0.0, ends - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(codes):
        said = "".join(log.read_text(errors="replace")[-500:] for log in logs)
        raise RuntimeError(f"{system} ended by {codes}: {said}")
    return _median([json.loads(p.read_text()) for p in sorted(folder.glob("end-*.json"))])

"""A runner of parts, each in a process with a time limit, so that a failure does not hide the
others.

A part may start processes, and die before them. So this process becomes the one that inherits them
(Linux: PR_SET_CHILD_SUBREAPER), and ends the remaining ones after each part.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.place import family
from tests.acceptance.gpu.findings import read
from tests.acceptance.gpu.part import FINDINGS
from tests.acceptance.gpu.plan import Device, Part

ROOT = Path(__file__).resolve().parents[3]
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 10.0
"""Seconds for a killed process to end; one that waits in a driver may stay."""
_LOG_TAIL = 1500
_LEAST_S = 3.0
"""Minimum seconds for which a part is begun."""
_RESOLVER = "timeout:1 attempts:1"
"""Options of the C library's resolver (resolv.conf(5)): torch looks up the name of each client of a
store, which takes 10 s each time if no name server answers. Every process reads this at its first
query."""

FAILED, DIED = 1, 3
"""Exit codes: a requirement does not hold, or nothing was tested; a part has crashed or hung, or
was not begun, which takes precedence."""


def run(
    parts: Iterable[Part],
    device: Device,
    small: bool,
    folder: Path,
    total_s: float,
    tell: Callable[[dict[str, Any]], None],
    command: Callable[[Part], list[str]] | None = None,
    gpus: int = 1,
) -> list[dict[str, Any]]:
    """Return the results of ``parts``: for each its status, its duration, and its findings.

    Args:
        tell: Called with each result as soon as it exists.
        command: The command that runs a part, for tests.
        gpus: Number of GPUs of this machine.
    """
    _inherit_orphans()
    began = time.monotonic()
    parts, results = list(parts), []
    deadline = began + total_s
    # the time after `began` until which all parts up to the previous one may last
    sure = max(0.0, total_s - sum(part.limit_s for part in parts))
    for part in parts:
        own = folder / part.name
        own.mkdir(parents=True)
        left = deadline - time.monotonic()
        if device == "cpu" and not part.on_cpu:
            result = _not_run(part, "skipped", "needs a GPU")
        elif device == "cuda" and part.gpus > gpus:
            result = _not_run(part, "skipped", "one GPU")
        elif left < _LEAST_S:
            why = f"the {total_s:g} s for all parts were over"
            result = _not_run(part, "not begun", why)
        else:
            saved = max(0.0, sure - (time.monotonic() - began))
            limit = min(part.limit_s + saved, left)
            words = _command(part, device, small, own, limit) if command is None else command(part)
            result = _run(part, words, own, limit)
            sure += part.limit_s
        results.append(result)
        tell(result)
    return results


def prepare_children() -> None:
    """Let child processes find FFT's source and the additional packages.

    Also make them query a name server that does not answer only once.
    """
    os.environ.setdefault("RES_OPTIONS", _RESOLVER)
    brought = ROOT / "gpu-packages" / f"{sys.version_info.major}.{sys.version_info.minor}"
    paths = [str(ROOT), *([str(brought)] if brought.is_dir() else [])]
    paths += [path] if (path := os.environ.get("PYTHONPATH")) else []
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def exit_code(results: Iterable[dict[str, Any]]) -> int:
    """Return the exit code; 0 if all tested requirements hold."""
    found = {result["status"] for result in results}
    if found & {"crashed", "hung", "not begun"}:
        return DIED
    return FAILED if "failed" in found or found == {"skipped"} else 0


def in_words(result: dict[str, Any]) -> str:
    """Return one line for a part, and one for each requirement that does not hold."""
    head = f"{result['number']}. {result['title']}: {result['status']}"
    lines = [f"{head} ({result['seconds']:.1f} s)" + (f": {why}" if (why := result["why"]) else "")]
    for finding in result["findings"]:
        if finding["status"] in ("failed", "not here"):
            text = finding["text"].strip().splitlines() or [""]
            lines.append(f"   {finding['status']}: {finding['what']}: {text[-1]}")
    return "\n".join(lines)


def _command(part: Part, device: Device, small: bool, own: Path, limit: float) -> list[str]:
    words = [sys.executable, "-m", "tests.acceptance.gpu.part", part.name, "--folder", str(own)]
    words += ["--device", device, "--limit", str(limit)]
    return words + (["--small"] if small else [])


def _run(part: Part, command: list[str], own: Path, limit: float) -> dict[str, Any]:
    log, others = own / "log.txt", frozenset(family(os.getpid()))
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=ROOT
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        finally:
            stays = _end_children(others)
    findings = read(own / FINDINGS)
    status, why = _judge(code, limit, findings)
    if stays:
        why += f"; processes {stays} do not end, killed as they are"
    if status in ("crashed", "hung"):
        why += f"\n{_last_words(log.read_text(errors='replace'))}"
    return {**_about(part), "status": status, "why": why, "findings": findings} | {
        "seconds": round(time.monotonic() - began, 1)
    }


def _judge(code: int | None, limit: float, findings: list[dict[str, Any]]) -> tuple[str, str]:
    if code is None:
        return "hung", f"not through after {limit:g} s"
    if code != 0:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "crashed", f"its process ended by {how}"
    statuses = {finding["status"] for finding in findings}
    if not statuses:
        return "crashed", "it ended without having found anything"
    if "failed" in statuses:
        return "failed", ""
    absent = [
        f"{each['what']}: {each['text']}" for each in findings if each["status"] == "not here"
    ]
    if "ok" not in statuses:
        return "skipped", "nothing was tried: " + ("; ".join(absent) or "it has only measured")
    return "ok", f"without {len(absent)} that cannot be tried here" if absent else ""


def _last_words(log: str) -> str:
    """Return the end of the log, or the stacks of a part that was stopped by its limit."""
    at = log.rfind("Timeout (")
    return log[-_LOG_TAIL:] if at < 0 else log[at : at + _LOG_TAIL]


def _not_run(part: Part, status: str, why: str) -> dict[str, Any]:
    return {**_about(part), "status": status, "why": why, "findings": [], "seconds": 0.0}


def _about(part: Part) -> dict[str, Any]:
    return {"number": part.number, "part": part.name, "title": part.title}


def _inherit_orphans() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the one who inherits orphans")


def _end_children(others: Set[int]) -> list[int]:
    """Kill all children of this process and their descendants; return those that do not end.

    ``others`` are spared: they existed before the part that has just ended.
    """
    deadline = time.monotonic() + _END_S
    while children := [pid for pid in family(os.getpid())[1:] if pid not in others]:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return children
        time.sleep(0.01)  # the kernel takes time, and does not notify of grandchildren
    return []

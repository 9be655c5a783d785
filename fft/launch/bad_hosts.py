"""A memory of bad hosts in the directory of a job: which were excluded, or lost more than others.

Supervisors on all hosts append to one file, `MARKS`, in the folder of all starts. `LIST` has the
names of the bad hosts alone, one on each line, for scripts of schedulers.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from fft.trace.starts import root_of

logger = logging.getLogger(__name__)

MARKS, LIST = "host-marks", "bad-hosts"  # `*.jsonl` are traces
_REPEATED = 3
"""Number of losses from which on a host is bad, if the median host has less than half as many."""
_SHOWN = 3

Kind = Literal["here", "lost", "excluded"]


def own_name() -> str:
    """Return the name of this host, as the scheduler knows it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def mark(folder: Path, host: str, kind: Kind, why: str = "") -> None:
    """Remember that a host takes part (``here``), had a loss, or was the cause of an exclusion."""
    line = json.dumps({"host": host, "kind": kind, "why": why, "at": round(time.time())})
    root = root_of(folder)
    new = root / f"{LIST}.{own_name()}.{os.getpid()}"
    try:
        with (root / MARKS).open("a") as file:
            file.write(f"{line}\n")  # one write, so lines of several hosts do not mix
        new.write_text("".join(f"{host}\n" for host in bad_hosts(root)))
        new.replace(root / LIST)
    except OSError as error:
        logger.warning("bad hosts are not remembered in %s: %s", root, error)


def bad_hosts(folder: Path) -> dict[str, list[str]]:
    """Return the bad hosts with the reasons, the worst first: at most half of all hosts."""
    marks = _read(folder)
    hosts = {mark["host"] for mark in marks}
    lost = Counter(mark["host"] for mark in marks if mark["kind"] == "lost")
    excluded = Counter(mark["host"] for mark in marks if mark["kind"] == "excluded")
    usual = statistics.median(lost[host] for host in hosts) if hosts else 0
    has_many = (host for host in hosts if lost[host] >= _REPEATED and lost[host] > 2 * usual)
    bad = [*{*excluded, *has_many}]
    bad.sort(key=lambda host: (-excluded[host], -lost[host], host))
    why = {h: [m["why"] for m in marks if m["host"] == h and m["kind"] != "here"] for h in bad}
    return {host: why[host] for host in bad[: len(hosts) // 2]}


def is_bad(folder: Path) -> bool:
    """Return whether this host is a bad one of the job."""
    return own_name() in bad_hosts(folder)


def lines(folder: Path) -> list[str]:
    """Describe each bad host in one line, with the newest reasons."""
    found = bad_hosts(folder).items()
    return [f"bad host {host} ({len(why)}): {'; '.join(why[-_SHOWN:])}" for host, why in found]


def _read(folder: Path) -> list[dict[str, Any]]:
    try:
        text = (root_of(folder) / MARKS).read_text()
    except FileNotFoundError:
        return []
    found = list[dict[str, Any]]()
    for line in text.splitlines():
        try:
            each = json.loads(line)
            found.append({name: str(each[name]) for name in ("host", "kind", "why")})
        except (ValueError, LookupError, TypeError):  # a line that a lost host has not finished
            continue
    return found

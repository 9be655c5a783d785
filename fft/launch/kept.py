"""The verdicts that supervisors keep beside the traces, for ``fft report``. Loads no supervisor."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from fft.launch.bad_hosts import lines
from fft.launch.exit_status import IN_A_WORD, ExitStatus
from fft.launch.verdict import WHOLE, Statuses, first

logger = logging.getLogger(__name__)


def keep(folder: Path, status: ExitStatus, told: Sequence[str]) -> None:
    """Keep the verdict of this supervisor beside the traces of its start."""
    path = folder / f"verdict-{socket.gethostname()}-{os.getpid()}.json"
    new = path.with_suffix(".new")
    try:
        new.write_text(json.dumps({"status": status, "lines": told}) + "\n")
        new.replace(path)
    except OSError as error:
        logger.warning("fft report will not show how the job has ended: %s", error)


def kept(folder: Path) -> list[str]:
    """Describe how a start has ended, by the verdicts of its supervisors, and name bad hosts."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("verdict-*.json"))]
    statuses = [ExitStatus(each["status"]) for each in found]
    whole = first(WHOLE, Statuses(statuses, has_progressed=True)).then
    ended = [f"the job has ended: {IN_A_WORD[whole]}"] if found else []
    return [*ended, *(line for each in found for line in each["lines"]), *lines(folder)]

"""Jobs of two replica groups under ``fft run``, both on the same device, and their results."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting

TRAINER = Path(__file__).with_name("trainer.py")
LIMITS_S = {"cuda": 60.0, "cpu": 180.0}
"""Maximum seconds for one job. Restarts take long on a machine with few cores."""
_AUDIT_S = 5.0
_TAIL = 600


@dataclass(frozen=True)
class Ended:
    """A job that is over."""

    code: int
    """Exit code of ``fft run``."""
    log: str
    words: list[dict[str, Any]]
    """The final report of each process: group, step, bits, step times, failed attempts."""
    audit: int
    """Exit code of ``fft audit``; 0 means that the traces meet all guarantees."""
    audit_text: str
    groups: int = 2

    @property
    def bits(self) -> set[str]:
        """Return the bits of the groups' states."""
        return {word["bits"] for word in self.words}

    @property
    def is_whole(self) -> bool:
        """Whether all groups ended with the same bits, and the audit found nothing."""
        all_ended = self.code == 0 and len(self.words) == self.groups
        return all_ended and len(self.bits) == 1 and self.audit == 0

    def in_words(self) -> str:
        """Return the reason for which it is not whole, if it is not."""
        if self.is_whole:
            return ""
        text = f"exit code {self.code}, {len(self.words)} groups at the end, bits {self.bits}"
        return f"{text}; audit {self.audit}: {self.audit_text[-_TAIL:]}\n{self.log[-_TAIL:]}"


def overlap(pen: Pen, setting: Setting, what: str, ended: Ended, demanded: bool) -> None:
    """Report in how many of the failed step functions the device was still working."""
    figures = {key: sum(word[key] for word in ended.words) for key in ("failed", "in_flight")}
    if demanded and setting.device == "cuda":
        what = f"{what}: work of the device was in flight"
        pen.check(what, figures["in_flight"] > 0, **figures)
    else:
        pen.measured(f"{what}: bodies that failed", **figures)


def run(
    setting: Setting,
    name: str,
    faults: list[dict[str, Any]],
    steps: int = 0,
    groups: int = 2,
    **options: str,
) -> Ended:
    """Train with the faults up to ``steps``; with 0 until some steps after all faults have fired.

    Raises ModuleNotFoundError if a package that the job's processes need is not installed.
    """
    words = ["--device", setting.device, "--out", "{folder}", "--steps", str(steps)]
    words += ["--small"] if setting.small else []
    words += [part for key, value in options.items() for part in (f"--{key}", value)]
    return run_script(setting, name, faults, TRAINER, words, not steps, groups)


def run_script(
    setting: Setting,
    name: str,
    faults: list[dict[str, Any]],
    script: Path,
    arguments: list[str],
    ends_after_plan: bool = False,
    groups: int = 2,
) -> Ended:
    """Run ``script`` in the groups with the faults, in a new folder ``{folder}``.

    Raises ModuleNotFoundError if a package that the job's processes need is not installed.
    """
    for room in ("fft.train.api.manager", "fft.launch.supervisor", "fft.cli.run"):
        importlib.import_module(room)
    folder = setting.folder / name
    folder.mkdir()
    limit_s = max(1.0, min(LIMITS_S[setting.device], setting.left() - _AUDIT_S))
    words = ["run", "--groups", str(groups), "--no-progress", "--no-lighthouse"]
    words += ["--trace-dir", str(folder / "traces"), "--timeout", str(limit_s)]
    if faults:
        plan = folder / "faults.json"
        plan.write_text(json.dumps({"faults": faults}))
        words += ["--faults", str(plan)]
    if ends_after_plan:
        words += ["--stop-after-plan", "5"]
    words += [str(script), *(str(folder) if word == "{folder}" else word for word in arguments)]
    done = _fft(words, limit_s + 20)  # extra time to print the reason and to end all its processes
    audit = _fft(["audit", str(folder / "traces")], 60)
    ends = [json.loads(path.read_text()) for path in sorted(folder.glob("end-*.json"))]
    logs = "".join(p.read_text(errors="replace") for p in sorted(folder.glob("traces/logs/*.log")))
    return Ended(
        done.returncode, done.stdout + logs, ends, audit.returncode, audit.stdout.strip(), groups
    )


def _fft(words: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fft.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
    )

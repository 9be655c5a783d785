"""Tests of a whole job under ``fft run`` with an outsider who can reach its bus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from stage import notes, records
from waiting import wait_until

from fft.bus import open_bus, open_job_bus
from fft.bus.token import JobToken
from fft.launch.exit_status import ExitStatus
from fft.messages.protocol import Death, Drain, encode
from fft.operate.job_file import JobFile
from fft.trace.audit import audit_dir
from fft.trace.tail import TraceTail

SCRIPT = Path(__file__).with_name("kill_script.py")
LIMIT_S = 200


def pids(traces: Path) -> dict[str, int]:
    """Return the process of each group's only rank, from the headers of the traces."""
    lines = (path.open().readline() for path in traces.glob("g*.jsonl"))
    return {head["group"]: head["config"]["pid"] for head in map(json.loads, lines)}


@pytest.mark.long
@pytest.mark.multiprocess
def test_commands_need_the_token(tmp_path: Path) -> None:
    traces = tmp_path / "run"
    command = [sys.executable, "-m", "fft.cli", "run", "--groups", "2", "--ranks", "1"]
    command += ["--no-progress", "--timeout", str(LIMIT_S), "--trace-dir", str(traces), str(SCRIPT)]
    traces.mkdir()
    tail = TraceTail(traces)
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: tail.poll().step >= 3, "three steps", LIMIT_S)
        job = JobFile.read(traces)
        assert job is not None and job.settings["FFT_TOKEN_FILE"] == str(traces / "job.token")
        bus, token = job.settings["FFT_BUS"], JobToken.from_file(traces / "job.token")
        processes = psutil.Process(run.pid).children(recursive=True)
        assert token.text() not in " ".join(" ".join(p.cmdline()) for p in processes)
        with open_bus(bus) as outsider:
            for group, pid in pids(traces).items():
                word = Death(group, 0, pid, os.uname().nodename, "mallory")
                outsider.broadcast(encode(word))
            outsider.broadcast(encode(Drain(("0", "1"), "mallory")))
        refused = lambda: len(notes(traces, "refused"))  # noqa: E731
        wait_until(lambda: refused() >= 2, "both ranks refuse it", LIMIT_S)
        step = tail.poll().step
        wait_until(lambda: tail.poll().step >= step + 5, "the job goes on", LIMIT_S)
        with open_job_bus(bus, token) as insider:
            insider.broadcast(encode(Drain(("0", "1"), "its owner")))
        output, _ = run.communicate(timeout=LIMIT_S)
        assert run.returncode == ExitStatus.DRAINED, output
    finally:
        run.kill()
        run.communicate()
        tail.close()
    assert not any(record["kind"] == "abort" for record in records(traces))
    assert {n["data"]["reason"] for n in notes(traces, "refused")} == {"unsealed"}
    assert [n["data"] for n in notes(traces, "dropped_messages")] == [{"unsealed": 3}] * 2
    assert audit_dir(traces).ok
    assert not (traces / "job.token").exists()
    written = [p.read_text(errors="replace") for p in traces.rglob("*") if p.is_file()]
    assert not any(token.text() in text for text in [*written, output])

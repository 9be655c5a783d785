"""Tests of a whole job under ``fft run`` with an outsider who can reach its bus."""

from __future__ import annotations

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
from fft.messages.protocol import Death, Drain, encode
from fft.trace.audit import audit_dir
from fft.trace.tail import TraceTail

SCRIPT = Path(__file__).with_name("kill_script.py")
LIMIT_S = 200


def ranks_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes that have the environment of a rank, and train."""
    found = psutil.Process(run.pid).children(recursive=True)
    return [p for p in found if str(SCRIPT) in p.cmdline() and "FFT_BUS" in p.environ()]


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
        ranks = ranks_of(run)
        env = ranks[0].environ()
        token = JobToken.from_file(traces / "job.token")
        assert env["FFT_TOKEN"] == token.text()
        assert token.text() not in " ".join(" ".join(p.cmdline()) for p in ranks)
        with open_bus(env["FFT_BUS"]) as outsider:
            for p in ranks:
                e = p.environ()
                word = Death(e["FFT_GROUP"], 0, p.pid, os.uname().nodename, "mallory")
                outsider.broadcast(encode(word))
            outsider.broadcast(encode(Drain(("0", "1"), "mallory")))
        refused = lambda: len(notes(traces, "refused"))  # noqa: E731
        wait_until(lambda: refused() >= 2, "both ranks refuse it", LIMIT_S)
        step = tail.poll().step
        wait_until(lambda: tail.poll().step >= step + 5, "the job goes on", LIMIT_S)
        with open_job_bus(env["FFT_BUS"], token) as insider:
            insider.broadcast(encode(Drain(("0", "1"), "its owner")))
        output, _ = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 0, output
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

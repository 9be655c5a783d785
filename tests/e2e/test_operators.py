"""Tests of operators on real jobs: faults commanded during training, and the commands themselves.

The first tests run managers in threads; the last one runs `fft run` and the `fft` command.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import Job, Member, aborts, job, notes
from typer.testing import CliRunner
from waiting import wait_until

from fft.cli import app
from fft.operate import inject
from fft.operate.client import JobClient, OperatorError
from fft.trace.audit import audit_dir

SCRIPT = Path(__file__).with_name("fault_script.py")
LIMIT_S = 90.0


class Training:
    """Two groups that train until they are asked to stop."""

    def __init__(self, made: Job) -> None:
        self.job = made
        self.groups = [made.member(str(g)) for g in range(2)]
        self._enough = threading.Event()
        for member in self.groups:
            member.start(self._work)

    def _work(self, member: Member) -> None:
        def body(_: Member, txn: Any) -> None:
            if self._enough.is_set():
                member.manager.drain()

        member.train(None, body=body)

    def end(self) -> None:
        self._enough.set()
        for member in self.groups:
            member.end()
        assert [m.error for m in self.groups] == [None, None]

    def inject(self, kind: str, **options: Any) -> inject.Said:
        with JobClient(self.job.bus) as desk:
            wait_until(lambda: len(desk.job().groups) == 2, "both groups in one epoch")
            state = desk.job()
            plan = inject.single(state, kind, None, options)
            (output,) = inject.send(desk, state, plan)
        return output


@pytest.fixture
def training(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Training]:
    if getattr(request, "param", True):
        monkeypatch.setenv("FFT_INJECT", "1")
    with job(tmp_path / "traces", 2) as made:
        yield Training(made)


def test_faults_are_commanded_in_the_middle_of_training(training: Training) -> None:
    traces = training.job.traces
    for kind in ("exception", "one_sided", "network_cut"):
        answer = training.inject(kind, group="1")
        assert answer.ok and answer.text.endswith(f"({kind}): group 1 rank 0 accepted: armed")
        wait_until(lambda k=kind: k in [n["data"]["kind"] for n in notes(traces, "inject")], kind)
    training.end()
    training.job.audit()
    found = notes(traces, "inject")
    assert [n["data"]["kind"] for n in found] == ["exception", "one_sided", "network_cut"]
    steps = {record["step"] for record in aborts(traces)}
    assert {n["data"]["step"] for n in found} <= steps, "each was rolled back"
    commands = notes(traces, "command")
    assert [(n["group"], n["data"]["refused"]) for n in commands] == [("1", None)] * 3
    keys_of_injected = [n["data"]["name"] for n in found]
    assert all(name.startswith("injected-") for name in keys_of_injected)


@pytest.mark.parametrize("training", [False], indirect=True)
def test_injection_into_a_job_without_fft_inject_is_refused(training: Training) -> None:
    answer = training.inject("kill", group="0")
    assert not answer.ok
    assert "group 0 rank 0 refused: fault injection is disabled in this process" in answer.text
    training.end()
    training.job.audit()
    (note,) = notes(training.job.traces, "command")
    assert note["group"] == "0" and "fault injection is disabled" in note["data"]["refused"]
    assert notes(training.job.traces, "inject") == []


def test_impossible_fault_is_refused_before_sending(training: Training) -> None:
    for kind, options, why in (
        ("boom", {}, "no kind 'boom'; the kinds: exception"),
        ("kill", {}, "a kill needs --group; the groups: 0, 1"),
        ("kill", {"group": "7"}, "no group '7'; the groups: 0, 1"),
        ("kill", {"group": "1", "rank": 3}, "no rank 3 in group 1"),
        ("kill", {"group": "1", "holding_gil": True}, "a kill has no --holding-gil"),
        ("hang", {"group": "1", "phase": "lunch"}, "phase: Input should be 'forward'"),
        ("hang", {"group": "1", "seconds": -1.0}, "seconds: Input should be greater than 0"),
    ):
        with pytest.raises(OperatorError, match=why):
            training.inject(kind, **options)
    training.end()
    assert notes(training.job.traces, "command") == []


# --- the command, on real processes ------------------------------------------------------


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield its lines, each within the limit."""
    assert process.stdout is not None
    while True:
        assert select.select([process.stdout], [], [], LIMIT_S)[0], "nothing was written"
        line = process.stdout.readline()
        assert line, "it has ended"
        yield line


@pytest.mark.multiprocess
@pytest.mark.long
def test_an_operator_at_a_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It watches, injects, evicts and drains while two groups train. Takes half a minute."""
    traces = tmp_path / "run"
    command = [sys.executable, "-m", "fft.cli", "run", "--groups", "2", "--injectable"]
    command += ["--trace-dir", str(traces), "--no-progress", "--timeout", "200", str(SCRIPT)]
    with (tmp_path / "stderr").open("w") as errors:
        run = subprocess.Popen(command, stderr=errors, stdout=errors, text=True, env=os.environ)
    try:
        pattern = re.compile(r"FFT_BUS=(\S+) FFT_TOKEN_FILE=(\S+)\n")
        wait_until(lambda: pattern.search((tmp_path / "stderr").read_text()), "its bus", LIMIT_S)
        url, token = pattern.search((tmp_path / "stderr").read_text()).groups()
        monkeypatch.setenv("FFT_TOKEN_FILE", token)
        watch = subprocess.Popen(
            [sys.executable, "-m", "fft.cli", "watch", "--json", "--bus", url],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            _operate(url, watch, monkeypatch)
        finally:
            watch.terminate()
            watch.communicate(timeout=LIMIT_S)
        assert run.wait(LIMIT_S) == 75, (tmp_path / "stderr").read_text()  # all groups were drained
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    report = audit_dir(traces)
    assert report.ok, report.render()
    assert {n["data"]["kind"] for n in notes(traces, "inject")} == {"exception", "kill"}
    assert (traces / "g1r0i3.jsonl").exists(), "killed once, evicted once"


def _operate(url: str, watch: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    events = (json.loads(line) for line in lines_of(watch))

    def until_members(*peers: str) -> None:
        assert next(e for e in events if e.get("members") == list(peers))

    def output_of(*arguments: str) -> str:
        # in this process, as a new one would spend seconds on importing torch each time
        done = CliRunner().invoke(app, [*arguments, "--bus", url])
        assert done.exit_code == 0, done.output
        return done.output

    until_members("0/0#1", "1/0#1")
    assert "group 0 rank 0 accepted" in output_of("dev", "inject", "exception", "--group", "0")
    abort = next(e for e in events if e["event"] == "abort")
    assert "injected fault" in abort["cause"]
    output_of("dev", "inject", "kill", "--group", "1", "--phase", "vote")
    until_members("0/0#1", "1/0#2")
    printed = output_of("evict", "1", "--restart")
    assert "ending pid" in printed and "it is started again" in printed
    until_members("0/0#1", "1/0#3")
    with monkeypatch.context() as outside:
        outside.delenv("FFT_TOKEN_FILE")
        refused = CliRunner().invoke(app, ["watch", "--once", "--bus", url])
        assert refused.exit_code == 2 and "the job's token: set FFT_TOKEN_FILE" in refused.output
    state = json.loads(output_of("watch", "--once", "--json"))
    assert state["groups"]["1"]["0"]["state"] == "in epoch"
    assert "group 1 has left at step" in output_of("drain", "1")
    assert next(e for e in events if e.get("leavers") == ["1"])["event"] == "commit"
    assert "has left" in output_of("drain", "0")

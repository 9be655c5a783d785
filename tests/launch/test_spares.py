"""Tests of spares: what they load before they get a place, and the handling of those that died."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from supervisor_stage import Stage
from test_supervisor import at_work, record, trace
from waiting import wait_until

from fft.launch import script_runner
from fft.launch.supervisor import reforming
from fft.launch.supervisor.children import Child
from fft.launch.supervisor.config import RunConfig
from fft.launch.supervisor.groups import Group
from fft.launch.supervisor.reforming import Spares
from fft.launch.supervisor.script import Script
from fft.trace.history import RankView
from fft.trace.tail import JobView

SCRIPT = """\
'''What the script is.'''
from __future__ import annotations
import colorsys, not_there_at_all
import ours
LOADED = 1
import mimetypes
print(ours.RANK, LOADED, flush=True)
"""
WAIT_S = 30


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "ours.py").write_text("import os\nRANK = os.environ['RANK']\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def start_spare(script: Path, number: int, fd: int) -> Child:
    """Start a spare as the supervisor does; its log is next to the script."""
    env = {**os.environ, "FFT_ROLE_FD": str(fd)}
    log = script.with_name(f"spare-{number}.log")
    return Child("spare", number, 1, Script([str(script)]), env, log, (fd,))


def test_spare_preloads_installed_packages_and_no_user_modules(
    script: Path,
) -> None:
    """A user's module may depend on the rank's place, or on what the script does before."""
    code = f"""
import sys
sys.path.insert(0, {str(script.parent)!r})
from fft.launch import script_runner
script_runner._load_imports_of({str(script)!r})
print(sorted({{"colorsys", "mimetypes", "ours"}} & {{*sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['colorsys']"


def test_spare_runs_the_script_with_the_given_rank_and_log(script: Path) -> None:
    script.write_text("import json, os\nprint('rank', os.environ['RANK'], flush=True)\n")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        env = {**os.environ, "FFT_ROLE_FD": str(theirs.fileno()), "RANK": "none"}
        command = [sys.executable, script_runner.__file__, str(script)]
        spare = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
        ours.settimeout(WAIT_S)
        assert ours.recv(1) == b"r"
        log = script.parent / "log"
        word = {"env": {"RANK": "3"}, "log": str(log)}
        ours.sendall(json.dumps(word).encode() + b"\n")
        assert spare.wait(WAIT_S) == 0
    assert log.read_text() == "rank 3\n"


def test_released_spare_ends(script: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        env = {**os.environ, "FFT_ROLE_FD": str(theirs.fileno())}
        command = [sys.executable, script_runner.__file__, str(script)]
        spare = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
    ours.close()
    assert spare.wait(WAIT_S) == 0


def test_a_spare_that_is_never_ready_is_late(script: Path, tmp_path: Path) -> None:
    """It lacks the means to report its readiness, which the supervisor treats like any other
    hang."""
    script.write_text("import threading\nthreading.Event().wait()\n")

    def start(number: int, fd: int) -> Child:
        log = tmp_path / f"spare-{number}.log"
        return Child("spare", number, 1, Script([str(script)]), dict(os.environ), log, (fd,))

    spares = Spares(1, start)
    (child,) = spares.started()
    try:
        assert spares.late(WAIT_S) == []
        assert spares.late(0.0) == [child]
    finally:
        spares.end()
        assert child.dies_within(WAIT_S)
        child.reap()


def test_no_spare_is_started_while_the_job_drains(
    run_job: Any, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reforming, "_REFILL_S", 0.0)
    with run_job(groups=1, ranks=1, spares=1) as job:
        (actor,) = stage.enter(1).values()
        log = tmp_path / "run" / "logs" / "spare-1.log"
        wait_until(log.exists, "a spare was started")
        job.supervisor.interrupt()
        assert actor.says() == {"heard": "sigterm"}
        (spare,) = job.supervisor._reforming.spares
        spare.signal(signal.SIGKILL)
        wait_until(lambda: not spare.alive, "its end was noticed")
        actor.order("exit 0")
        assert job.verdict().ok
    assert not log.with_name("spare-2.log").exists()


def test_no_place_is_given_to_a_spare_that_has_died(script: Path, tmp_path: Path) -> None:
    script.write_text("import json\n")
    spares = Spares(2, partial(start_spare, script))
    first, second = spares.started()
    try:
        deadline = time.monotonic() + WAIT_S
        while not all(spare.is_ready for spare in spares._spares):
            assert time.monotonic() < deadline
        first.signal(signal.SIGKILL)
        assert first.dies_within(WAIT_S)
        assert spares.take({"RANK": "1"}, tmp_path / "log") is second
        assert spares.take({"RANK": "1"}, tmp_path / "log") is None
        assert spares.started() == [], "the job has the processor for itself for a while"
    finally:
        spares.end()
        for child in (first, second):
            assert child.dies_within(WAIT_S)
            child.reap()


def test_spares_that_have_ended_in_vain_count_only_in_a_row(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of weeks loses one now and then."""
    monkeypatch.setattr(reforming, "_REFILL_S", 0.0)
    script.write_text("import json\n")
    children: list[Child] = []

    def start(number: int, fd: int) -> Child:
        children.append(start_spare(script, number, fd))
        return children[-1]

    def lose(spares: Spares) -> None:
        (child,) = spares.started()
        child.signal(signal.SIGKILL)
        assert child.dies_within(WAIT_S)
        spares.ended(child)

    spares = Spares(1, start)
    try:
        lose(spares)
        lose(spares)
        assert spares.started()
        wait_until(lambda: spares.ready == 1, "the spare has loaded everything")
        assert spares.take({"RANK": "1"}, tmp_path / "log") is children[-1]
        lose(spares)
        assert spares.started(), "the third in vain, but not in a row"
    finally:
        spares.end()
        for child in children:
            assert child.dies_within(WAIT_S)
            child.reap()


def test_next_spare_is_called_for_a_successor_that_took_no_part(
    run_job: Any, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spare is used before its group is restarted as a whole."""
    monkeypatch.setattr(reforming, "_REFILL_S", 600.0)
    with run_job(groups=2, ranks=2, spares=2) as job:
        actors = stage.enter(4)
        spares = job.supervisor._reforming.spares
        wait_until(lambda: spares.ready == 2, "the spares have loaded everything")
        for group, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            header = record(kind="header", reforms=True)
            trace(job, group, rank, 1, header, at_work(5, 1, ["0", "1"]))
        view = job.supervisor._tail.view
        wait_until(lambda: len(view.ranks) == 4, "the supervisor has read the traces")
        lost = actors["1", "1"]
        for _ in range(2):
            os.kill(lost.pid, signal.SIGKILL)
            lost.gone()
            (lost,) = stage.enter(1).values()
            assert lost.place == ("1", "1")
        os.kill(lost.pid, signal.SIGKILL)  # no spare is left, so the group is restarted
        actors["1", "0"].gone()
        for actor in (*stage.enter(2).values(), actors["0", "0"], actors["0", "1"]):
            actor.order("exit 0")
        assert job.verdict().ok


@pytest.mark.parametrize(
    ("lost_commits", "mate_commits", "may"), [(1, 1, True), (1, 0, False), (0, 1, False)]
)
def test_rank_is_replaced_only_after_a_commit_of_rank_and_mate(
    tmp_path: Path, lost_commits: int, mate_commits: int, may: bool
) -> None:
    """Without a mate that has committed, no process of the group has a state to go on with."""
    script = tmp_path / "waits.py"
    script.write_text("import sys; sys.stdin.read()\nimport time; time.sleep(60)\n")
    groups, view = [Group(name, 2) for name in "01"], JobView()
    commits = {("0", 0): mate_commits, ("0", 1): lost_commits, ("1", 0): 1, ("1", 1): 1}
    for (name, rank), count in commits.items():
        seen = RankView(1, commits=count, role="training", reforms=True)
        view.ranks[name, rank] = seen
    config = RunConfig([str(script)], 2, 2, tmp_path)
    try:
        for group in groups:
            for rank in range(2):
                log = tmp_path / f"{group.name}-{rank}.log"
                start = Script([str(script)])
                group.children.append(Child(group.name, rank, 1, start, dict(os.environ), log))
        no_launcher: Any = None  # nothing is started
        mender = reforming.Reforming(config, no_launcher)
        lost = groups[0].children[1]
        assert mender.may_replace(groups[0], lost, view, groups) is may
    finally:
        for group in groups:
            for child in group.children:
                child.signal(signal.SIGKILL)
                child.exit_code()
                child.reap()

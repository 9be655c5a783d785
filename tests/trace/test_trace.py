"""Tests of the trace on a full disk: training continues, and the audit does not claim
completeness."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from forked import Forked, as_main

from fft.messages.protocol import Peer
from fft.trace.audit import audit_dir
from fft.trace.format import scope_folder
from fft.trace.read import TraceFile
from fft.trace.report import RunReport
from fft.trace.writer import TraceWriter

LIMITED = """
import logging, resource, sys
from pathlib import Path
from fft.messages.protocol import Peer
from fft.trace.writer import TraceWriter

logging.basicConfig(format="%(message)s")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
writer = TraceWriter(Path(sys.argv[1]), Peer("0", 0, 1))
note = lambda n: writer.note("n", {"n": n})
room = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
"""
"""A limit on the sizes of files fails a write as a full disk does, and can be lifted."""


def written(directory: Path, script: str) -> tuple[list[dict], str]:
    """Return the lines of the trace after ``script``, complete and chained, and its stderr."""
    code = LIMITED + textwrap.dedent(script) + "\nwriter.close()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    trace = TraceFile(directory / "g0r0i1.jsonl")
    lines = [line for _, line in trace.lines()]
    assert trace.damage is None and not trace.torn, trace
    return lines, done.stderr


def numbers(lines: list[dict]) -> list[object]:
    """Return the numbers of the notes, and for a gap the number of lost lines as text."""
    return [x["data"]["n"] if x["kind"] == "note" else f"lost {x['lost']}" for x in lines]


def test_lines_that_find_no_room_are_counted_and_the_gap_is_marked(tmp_path: Path) -> None:
    lines, errors = written(
        tmp_path,
        """
        for n in range(3): note(n)
        room(writer.path.stat().st_size + 10)  # half a line would fit
        for n in range(3, 8): note(n)
        room(hard)
        for n in range(8, 10): note(n)
        """,
    )
    # the line before the gap was overwritten to make room for the mark
    assert numbers(lines) == [0, 1, "lost 2", "lost 4", 8, 9]
    assert errors.count("cannot be written") == 1 and errors.count("written again") == 1


def test_a_gap_with_room_for_its_mark_costs_no_other_line(tmp_path: Path) -> None:
    lines, _ = written(
        tmp_path,
        """
        note(0)
        room(writer.path.stat().st_size + 200)
        writer.note("long", {"n": 1, "text": "x" * 300})
        note(2)
        room(hard)
        note(3)
        room(writer.path.stat().st_size)
        note(4)
        """,
    )
    assert numbers(lines) == [0, "lost 1", "lost 3"]  # 2 and 3, which was sacrificed, and 4


def test_disk_that_stays_full_is_reported_at_the_end(tmp_path: Path) -> None:
    lines, errors = written(
        tmp_path,
        """
        note(0); note(1)
        room(writer.path.stat().st_size)
        for n in range(2, 6): note(n)
        """,
    )
    assert numbers(lines) == [0, "lost 2"]
    assert "ends without its last 3 lines" in errors


def test_a_disk_that_was_full_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "g0r0i1.jsonl").symlink_to("/dev/full")
    writer = TraceWriter(tmp_path, Peer("0", 0, 1))
    for n in range(3):
        writer.note("n", {"n": n})
    writer.close()


def test_listener_is_notified_once_per_gap(tmp_path: Path) -> None:
    """The call comes at once if lines are already lost."""
    (tmp_path / "g0r0i1.jsonl").symlink_to("/dev/full")
    early, late = list[str](), list[str]()
    writer = TraceWriter(tmp_path, Peer("0", 0, 1))
    writer.on_lost(early.append)
    for n in range(3):
        writer.note("n", {"n": n})
    writer.on_lost(late.append)
    writer.close()
    assert early == late == ["[Errno 28] No space left on device"]


def test_a_gap_of_a_further_stage_is_reported(tmp_path: Path) -> None:
    for folder in (tmp_path, scope_folder(tmp_path, "stage1")):
        writer = TraceWriter(folder, Peer("0", 0 if folder == tmp_path else 1, 1))
        writer.note("n", {})
        if folder != tmp_path:
            writer.write("gap", {"lost": 7})
        writer.close()
    assert RunReport(tmp_path).damages == ["g0r1i1.jsonl:2: 7 lines are missing here"]


TRAINS = """
import os, resource, sys
from datetime import timedelta
import torch
from torch import nn
from torchft import ProcessGroupGloo
import fft

os.dup2(1, 2)  # a pipe: the limit is for files
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
manager = fft.ManagerFFT(pg=ProcessGroupGloo(timeout=timedelta(seconds=60)), load_state_dict=None,
                         state_dict=None, min_replica_size=1, init_sync=False,
                         trace_dir=sys.argv[1])
model = nn.Linear(4, 1)
manager.register(model, torch.optim.SGD(model.parameters(), lr=1e-2))
manager.sync_gradients(model)
loader = fft.CursorLoader(torch.randn(64, 4), batch_size=4, seed=5)
for txn in manager.transactions(loader, max_steps=12):
    if txn.step == 3:
        size = manager._parts.job.trace.path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    if txn.step == int(sys.argv[2]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    with txn:
        model(txn.batch).square().mean().backward()
manager.shutdown()
print("done at step", manager.current_step())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("room_again_at", [7, 99])
def test_training_goes_on_and_the_audit_is_incomplete(tmp_path: Path, room_again_at: int) -> None:
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    trainer = Forked(as_main, str(script), str(tmp_path / "run"), str(room_again_at), talks=True)
    try:
        code = trainer.wait(120)
        output = trainer.stdout.read()
    finally:
        trainer.close()
    assert code == 0, output
    assert "done at step 12\n" in output
    # A short line may fit where a longer one did not; it is then written once more.
    lost, again = (output.count(word) for word in ("cannot be written", "can be written again"))
    assert lost >= 1 and lost - again == (room_again_at == 99), output
    report = audit_dir(tmp_path / "run")
    assert not report.ok and report.gaps
    assert all(finding.violation is None for finding in report.findings), report.render()
    assert "verdict: INCOMPLETE" in report.render()
    assert json.loads(json.dumps(report.to_json()))["ok"] is False

"""Tests of several starts of a job: each resumes from an earlier start's commit, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import Node
from forged import nth_note, rewrite
from traced import TracedJob, peak_of

from fft.messages.protocol import Applied, Event, Healed, Peer, Record
from fft.trace import resumed
from fft.trace.audit import NO_END, audit_dir
from fft.trace.last_lines import forget_ends, note_ends
from fft.trace.report import RunReport
from fft.trace.resumed import audit_job
from fft.trace.starts import start_folders
from fft.trace.writer import TraceWriter


class Start(TracedJob):
    """One start, in whose traces each state has a digest."""

    def post(self, node: Node, event: Event) -> None:
        if isinstance(event, Applied):
            event = replace(event, digest=f"bits of {node.local.step + 1}")
        elif isinstance(event, Healed):
            assert self.head is not None
            event = replace(event, digest=f"bits of {self.head.step}")
        super().post(node, event)


def start(
    directory: Path,
    steps: int,
    origin: Record | None = None,
    lineage: str | None = None,
    files: Mapping[str, Any] | None = None,
) -> list[Record]:
    """Write a start that begins with the state of ``origin``, perhaps under another lineage.

    ``files``: data of a copy in memory that it begins with, or else writes.
    """
    names = ("lineage", "step", "cursor", "batches")
    state = {} if origin is None else {name: getattr(origin, name) for name in names}
    if lineage is not None:
        state["lineage"] = lineage
    job = Start(directory, **state)
    for node in job.nodes.values():
        if origin is not None:
            resumed_data = {"lineage": origin.lineage, "as": state["lineage"], **(files or {})}
            job.writers[node.peer].note("resumed", resumed_data, node.local)
        elif files is not None:
            job.writers[node.peer].note("memory_copy", files, node.local)
    for _ in range(steps):
        job.step()
    job.close()
    return [record for record in job.history if record.kind == "commit"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four starts; the last one resumes from the first, many commits later."""
    first = start(tmp_path, 9)
    second = start(tmp_path / "start2", 4, first[5])
    start(tmp_path / "start3", 4, second[1])
    start(tmp_path / "start4", 4, first[2])
    return tmp_path


def test_each_start_may_go_on_from_any_that_came_before(root: Path) -> None:
    found = audit_job(root)
    assert found.ok, found.render()
    assert found.resumed.checks == 2 + 3 * 2, "nothing is missing; a place in the data, and bits"


@pytest.mark.parametrize("name", ["g0r0.safetensors", "g1r0.safetensors"])
def test_file_of_a_copy_in_memory_must_be_as_a_rank_has_written_it(
    name: str, tmp_path: Path
) -> None:
    """It may be that of the same rank of another group."""
    first = start(tmp_path, 9, files={"attempt": "a", "files": {"g0r0.safetensors": "12"}})
    for number, digest in ((2, "12"), (3, "13")):
        found = {"attempt": "a", "files": {name: digest}}
        start(tmp_path / f"start{number}", 4, first[5], files=found)
        report = audit_job(tmp_path)
        assert report.ok == (digest == "12"), report.render()
    assert "a file of rank 0 from a copy in memory has SHA-256 13" in report.render()


def test_resharded_state_is_looked_up_under_its_original_lineage(
    tmp_path: Path,
) -> None:
    """The lineage changes when a state is loaded for another number of ranks; several starts may
    resume from it."""
    first = start(tmp_path, 9)
    for number in (2, 3):
        start(tmp_path / f"start{number}", 4, first[5], "resharded")
    found = audit_job(tmp_path)
    assert found.ok, found.render()
    assert found.resumed.checks == 1 + 3, "the bits of the second were told by the first alone"
    for path in (tmp_path / "start3").glob("*.jsonl"):
        rewrite(path, lambda line: [_healed_to_others(line)])
    found = audit_job(tmp_path)
    assert "begins with digest others of lineage resharded" in str(found.resumed.violation)


def test_starts_with_gaps_are_judged_by_the_existing_records(root: Path) -> None:
    """They are reported neither as without commits nor as begun from the start."""
    for path in (root / "start2").glob("*.jsonl"):
        with_a_gap(path)
    (root / "start3" / "g7r0i1.jsonl").touch()
    text = audit_job(root).render()
    assert "verdict: no step could be checked; INCOMPLETE: no violation in what was written" in text
    assert "note: g7r0i1.jsonl is empty: its process ended before it joined, or found" in text
    assert "started again at a step that its traces do not tell: fft report" in str(
        RunReport(root).went_on()
    )
    assert "had come to step 9 when it ended" in str(RunReport(root).went_on())
    assert "at least when it ended" in str(RunReport(root / "start2").went_on())


def with_a_gap(path: Path) -> None:
    """Put a gap in the place of the first records and of those that came then."""
    group, rank, inc = path.stem[1:].replace("r", " ").replace("i", " ").split()
    path.unlink()
    writer = TraceWriter(path.parent, Peer(group, int(rank), int(inc)))
    writer.write("gap", {"lost": 9})
    writer.close()


def test_a_start_may_begin_where_the_one_before_has_begun(tmp_path: Path) -> None:
    """It was resumed with its own trace folder, and lost before its first commit."""
    origin = start(tmp_path / "elsewhere", 4)[2]
    start(tmp_path / "traces", 0, origin)
    start(tmp_path / "traces" / "start2", 3, origin)
    found = audit_job(tmp_path / "traces")
    assert found.ok, found.render()
    assert found.resumed.checks
    for path in (tmp_path / "traces" / "start2").glob("*.jsonl"):
        rewrite(path, lambda line: [_begins_elsewhere(line, "cursor")])
    assert not audit_job(tmp_path / "traces").ok


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("name", ["step", "cursor", "batches", "lineage"])
def test_a_start_from_another_state_is_found(number: int, name: str, root: Path) -> None:
    path = root / f"start{number}" / "g1r0i1.jsonl"
    rewrite(path, lambda line: [_begins_elsewhere(line, name)])
    found = audit_job(root).resumed
    assert "where no earlier start has committed" in str(found.violation)
    assert found.place == f"{root.name}/start{number}/g1r0i1.jsonl:1"


def _begins_elsewhere(line: dict[str, Any], name: str) -> dict[str, Any]:
    if line["kind"] != "header":
        return line
    was = line["start"][name]
    return {**line, "start": {**line["start"], name: was + 1 if name != "lineage" else "0" * 24}}


@pytest.mark.parametrize(("number", "source"), [(2, "g0r0i1"), (3, "start2/g0r0i1")])
def test_a_start_with_other_bits_is_found(number: int, source: str, root: Path) -> None:
    for path in (root / f"start{number}").glob("*.jsonl"):
        rewrite(path, lambda line: [_healed_to_others(line)])
    found = audit_job(root).resumed
    assert "rank 0 begins with digest others of lineage " in str(found.violation)
    assert f"{source}.jsonl:" in str(found.violation)
    assert found.place.startswith(f"{root.name}/start{number}/g0r0i1.jsonl:")


def _healed_to_others(line: dict[str, Any]) -> dict[str, Any]:
    event = line.get("event") or {}
    is_state = event.get("type") == "healed"
    return {**line, "event": {**event, "digest": "others"}} if is_state else line


def test_commits_of_a_later_start_are_no_resume_point(root: Path) -> None:
    (root / "start4").rename(root / "start9")
    (root / "start3").rename(root / "start4")
    (root / "start2").rename(root / "start3")
    (root / "start9").rename(root / "start2")
    assert audit_job(root).ok, "both start from the first"
    (root / "start3").rename(root / "start9")
    (root / "start4").rename(root / "start3")
    (root / "start9").rename(root / "start4")
    found = audit_job(root).resumed
    assert found.place == f"{root.name}/start3/g0r0i1.jsonl:1"
    assert "where no earlier start has committed" in str(found.violation)


def test_start_after_the_end_is_reported_as_empty(tmp_path: Path) -> None:
    """The same command was given again for a job that has all its steps."""
    start(tmp_path / "start2", 0, start(tmp_path, 3)[-1])
    found = audit_job(tmp_path)
    assert found.ok
    verdicts = [x for x in found.render().splitlines() if x.startswith("verdict")]
    nothing = "this start committed nothing, and no step was checked; "
    assert verdicts == [
        f"verdict: no violation{NO_END}",
        f"verdict: {nothing}no violation{NO_END}",
        "verdict of all: ok",
    ]


@pytest.mark.long
def test_abandoned_histories_use_no_memory(tmp_path: Path) -> None:
    """This holds for any number of steps: only the states from which a later start resumes are
    kept."""
    peaks = []
    for steps in (100, 100, 800):  # the first round fills the shared caches
        root = tmp_path / f"{len(peaks)} of {steps}"
        first = start(root, steps)
        second = start(root / "start2", steps, first[steps // 2])
        start(root / "start3", 2, second[steps // 2])
        judges = partial(resumed._judge, root, [root / "start2", root / "start3"])
        peaks.append(peak_of(lambda judges=judges: judges().checks == 1 + 2 * 2))
    assert peaks[2] < 1.2 * peaks[1], peaks


@pytest.mark.parametrize("line", [{}, {"config": {}}, {"config": {"world": 1}, "start": None}])
def test_header_without_a_state_digest_is_found(line: dict[str, Any], root: Path) -> None:
    path = root / "start2" / "g0r0i1.jsonl"
    rewrite(path, lambda old: [{**old, **line, "format": 1} if old["kind"] == "header" else old])
    found = audit_job(root)
    assert not found.ok
    json.dumps(found.to_json())


def test_empty_resumed_note_is_ignored(root: Path) -> None:
    path = root / "start2" / "g0r0i1.jsonl"
    rewrite(path, nth_note("resumed", 0, lambda note: [{**note, "data": {}}]))
    assert audit_job(root).ok, "the lineage is the one that was committed"


def test_ranks_that_begin_with_different_checkpoints_are_found(root: Path) -> None:
    """This holds whatever lineages one of their messages names."""
    other = {"lineage": "other", "as": "other"}
    path = root / "start2" / "g1r0i1.jsonl"
    rewrite(path, nth_note("resumed", 0, lambda note: [{**note, "lineage": "", "data": other}]))
    assert "begins with the checkpoint other" in str(audit_job(root).resumed.violation)


def note_all_ends(root: Path) -> None:
    for folder in start_folders(root):
        note_ends(folder, "box-7")


def test_audit_accepts_traces_that_end_as_noted(root: Path) -> None:
    note_all_ends(root)
    found = audit_job(root)
    assert found.ok and found.ends.checks == 8
    with (root / "g0r0i1.jsonl").open("a") as file:
        file.write("{")  # a torn line of a process that was killed
    note_ends(root, "box-7")
    assert audit_job(root).ok


@pytest.mark.parametrize("name", ["g1r0i1.jsonl", "start3/g0r0i1.jsonl"])
def test_audit_reports_a_removed_last_line(root: Path, name: str) -> None:
    note_all_ends(root)
    path = root / name
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    found = audit_job(root)
    assert not found.ok and found.ends.violation is not None
    assert (
        f"{path} ended with line" in found.render() and "verdict of all: NOT OK" in found.render()
    )


def test_audit_reports_a_removed_last_start(root: Path) -> None:
    note_all_ends(root)
    assert (root / "start4").is_dir()
    shutil.rmtree(root / "start4")
    found = audit_job(root)
    assert not found.ok and str(root / "start4") in str(found.ends.violation)


def test_audit_reports_notes_of_ends_that_cannot_be_read(root: Path) -> None:
    note_all_ends(root)
    (root / "ends" / "start2-box-7.json").write_text('{"g0r0i1.jsonl": 1}')
    assert "it is not readable" in audit_job(root).render()


def test_new_start_drops_the_notes_on_earlier_traces_of_its_folder(root: Path) -> None:
    note_all_ends(root)
    shutil.rmtree(root / "start4")
    forget_ends(root / "start4")
    assert audit_job(root).ok


def test_next_start_resolves_the_doubt_in_which_the_bus_left_a_rank(tmp_path: Path) -> None:
    job = Start(tmp_path)
    for _ in range(3):
        job.step()
    job.bus_up = False
    job.compute()
    job.settle()
    for timer in ("vote_window", "bus_limit"):
        job.fire(timer)
        job.settle()
    job.close()
    alone = audit_dir(tmp_path)
    assert [each.name for each in alone.findings if each.violation] == ["decided"]
    assert not audit_job(tmp_path).ok
    start(tmp_path / "start2", 4, [record for record in job.history if record.kind == "commit"][-1])
    found = audit_job(tmp_path)
    assert found.ok and "the next start replaced the states" in found.render()

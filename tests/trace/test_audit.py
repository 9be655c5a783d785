"""Tests of the audit: real traces pass, and every manipulation of a trace is reported with its
place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import Node
from forged import rewrite
from traced import TracedJob, peak_of
from typer.testing import CliRunner

from fft.cli import app
from fft.errors import FftError
from fft.messages.fault_plans import FaultPlan
from fft.messages.protocol import Applied, Event, Fault, Healed, Peer, Prepared, Stop, Token
from fft.trace import audit, ends, flow
from fft.trace.audit import NO_END, audit_dir, read_lines
from fft.trace.barriers import Barriers
from fft.trace.format import chain
from fft.trace.report import RunReport, fault_table, history_of, save_plan
from fft.trace.writer import TraceWriter, trace_path


@pytest.fixture(autouse=True, params=[8, pytest.param(1024, marks=pytest.mark.long)])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of records kept at once; with few, facts of these short runs are forgotten
    early."""
    monkeypatch.setattr(audit, "_WINDOW", request.param)
    return request.param


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Traces of two groups with a fault, a kill, a rejoin, a drain, and at least 9 commits."""
    job = TracedJob(tmp_path)
    for _ in range(3):
        job.step()
    job.fail(next(iter(job.nodes.values())), "boom")
    for _ in range(3):
        job.step()
    job.kill_group("1")
    job.step()
    job.start_group("1")
    for _ in range(3):
        job.step()
    job.drain("1")
    for _ in range(3):
        job.step()
    job.close()
    return tmp_path


@pytest.mark.parametrize("digest", ["equal", None])
def test_invariant_without_checks_is_not_reported_as_ok(tmp_path: Path, digest: str | None) -> None:
    """Without digests the equality of bits is unknown, whatever the lineages are."""
    job = TracedJob(tmp_path)
    job.digest = digest
    for _ in range(3):
        job.step()
    job.close()
    text = audit_dir(tmp_path).render()
    lines = text.splitlines()
    assert "verdict: no violation" in text
    (equal,) = (line for line in lines if "replicas_equal" in line)
    (divergence,) = (line for line in lines if "divergence" in line)
    if digest is None:
        assert "by lineage; bits not compared" in equal
        assert divergence.startswith("  not checked, because the run has nothing of the kind: ")
    else:
        assert "3 digests compared" in equal
        assert divergence.startswith("  ok ") and divergence.endswith("(6 checks)")


@pytest.mark.parametrize("diverges", ["update", "epoch", "neither"])
def test_audit_compares_epoch_states_separately_from_update_states(
    tmp_path: Path, diverges: str
) -> None:
    """Between the two a script may change the state, whose digest then differs."""

    class Diverging(TracedJob):
        def post(self, node: Node, event: Event) -> None:
            kind = {Applied: "update", Healed: "epoch"}.get(type(event))
            is_other = node.peer.group == "1" and node.local.step == 2 and kind == diverges
            self.digest = "others" if is_other else "equal"
            super().post(node, event)

    job = Diverging(tmp_path, owes=True)
    for _ in range(2):
        job.step()
    job.fail(next(iter(job.nodes.values())), "boom")
    for _ in range(2):
        job.step()
    job.close()
    report = audit_dir(tmp_path)
    (finding,) = (f for f in report.findings if f.name == "replicas_equal")
    assert report.ok == (diverges == "neither") and bool(finding.violation) != report.ok
    assert report.ok or "the state of 1/0#1" in str(finding.violation) + report.render()


@pytest.mark.parametrize("silent", [(), ("1",), ("0", "1")], ids=str)
def test_digests_owed_by_the_header_are_missed_by_group(
    tmp_path: Path, silent: tuple[str, ...]
) -> None:
    job = TracedJob(tmp_path, owes=True, silent=silent)
    job.digest = "equal"
    for _ in range(3):
        job.step()
    job.close()
    report = audit_dir(tmp_path)
    (finding,) = (f for f in report.findings if f.name == "digests")
    assert finding.checks == 2 * 4, "one heal and three commits of each group"
    assert report.ok == (not silent)
    for group in silent:
        assert f"group {group} rank 0 lacks 4 of 4 digests" in str(finding.violation)
        assert finding.place.startswith(f"g{silent[0]}r0i1.jsonl:")


def test_audit_misses_no_digests_in_traces_without_owes(tmp_path: Path) -> None:
    """Traces of older versions have no owed digests."""
    job = TracedJob(tmp_path, silent=("1",))
    job.digest = "equal"
    job.step()
    job.close()
    report = audit_dir(tmp_path)
    assert report.ok
    assert next(f for f in report.findings if f.name == "digests").checks == 0


def test_digests_that_only_some_headers_state_are_a_finding(tmp_path: Path) -> None:
    job = TracedJob(tmp_path, owes=True)
    job.digest = "equal"
    job.step()
    job.close()
    path = tmp_path / "g1r0i1.jsonl"
    rewrite(path, lambda r: [{**r, "owes": {"digests": False}} if r["kind"] == "header" else r])
    (finding,) = (f for f in audit_dir(tmp_path).findings if f.violation)
    assert finding.name == "digests" and finding.place == "g1r0i1.jsonl:1"
    assert "group 1 rank 0 states that it owes no digests" in str(finding.violation)


@pytest.mark.parametrize("ends", [False, True])
def test_verdict_reports_a_trace_without_a_final_record(tmp_path: Path, ends: bool) -> None:
    job = TracedJob(tmp_path, 2)
    job.step()
    if ends:
        job.drain("1")
        for _ in range(3):
            job.step()
    else:
        job.kill_group("1")
    job.close()
    report = audit_dir(tmp_path)
    assert report.ok and report.to_json()["ended"] == ends
    assert report.render().endswith(NO_END) != ends


def _apart(directory: Path, groups: int, **config: Any) -> None:
    """Write a job in which one group's digest differs from the others' in the votes of step 2."""

    class Apart(TracedJob):
        def post(self, node: Node, event: Event) -> None:
            if isinstance(event, Prepared) and node.local.step in (0, 2):
                is_bad = node.peer.group == "1" and node.local.step == 2
                event = replace(event, digest="bad" if is_bad else "good")
            super().post(node, event)

    job = Apart(directory, groups, **config)
    for _ in range(5):
        job.step()
    job.close()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("incarnation", [1, 2])
def test_truncated_trace_causes_no_violation_in_others(traces: Path, incarnation: int) -> None:
    """The gap may begin anywhere: the lost lines may be the only record of votes, barriers and
    records."""
    path = traces / f"g1r0i{incarnation}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    header = json.loads(lines[0])
    who = {name: header[name] for name in ("wall", "mono", "group", "rank", "inc")}
    for kept, next_one in enumerate(map(json.loads, lines)):
        if next_one["kind"] == "transition" and next_one["event"] is None:
            continue  # the rows of one event are written, or lost, together
        link = json.loads(lines[kept - 1])["h"] if kept else ""
        gap = json.dumps({"seq": kept + 1, "kind": "gap", **who, "lost": 9}, separators=(",", ":"))
        end = f'{gap[:-1]},"h":"{chain(link, gap)}"}}\n'
        path.write_bytes(b"".join(lines[:kept]) + end.encode())
        report = audit_dir(traces)
        assert [f.violation for f in report.findings if f.violation] == [], kept
        assert report.gaps and not report.ok


@pytest.mark.parametrize("groups", [2, 3])
def test_a_job_that_ended_for_its_replicas_differ_is_no_good_run(
    tmp_path: Path, groups: int
) -> None:
    _apart(tmp_path, groups)
    report = audit_dir(tmp_path)
    assert [f.violation for f in report.findings if f.violation] == [], "FFT did what it shall"
    assert report.diverged and not report.ok and not report.to_json()["ok"]
    text = report.render()
    good = "good on 0/0#1" if groups == 2 else "good on 0/0#1 2/0#1"
    assert f"replicas differ after step 2: rank 0: {good}; bad on 1/0#1" in text
    most = "no state has a majority" if groups == 2 else "most agree, and 1/0#1 differ"
    assert most in text
    assert "ended with Diverged; steps 1 to 2 are tainted" in text
    assert report.to_json()["tainted_steps"] == [1, 2]
    assert "steps 1 to 2 are tainted" in str(RunReport(tmp_path).taint())
    assert text.splitlines()[-1].startswith("verdict: DIVERGED: the job ended")
    assert CliRunner().invoke(app, ["audit", str(tmp_path)]).exit_code == 1


def test_replicas_that_differed_and_were_healed_are_reported(tmp_path: Path) -> None:
    _apart(tmp_path, 3, on_divergence="heal")
    report = audit_dir(tmp_path)
    assert report.ok and not report.diverged
    assert report.tainted is None and RunReport(tmp_path).taint() is None
    assert "bad on 1/0#1; the job went on, and the state of 1/0#1 was given up" in report.render()


@pytest.mark.parametrize("committed", [False, True])
def test_end_without_state_is_reported_with_the_fix(tmp_path: Path, committed: bool) -> None:
    job = TracedJob(tmp_path, 1)
    if committed:
        for _ in range(3):
            job.step()
    else:
        job.until_running()
    job.kill_group("0")
    job.start_group("0", lineage="fresh:other")
    for timer in ("join_window", "quorum"):
        job.settle()
        job.fire(timer)
    job.settle()
    job.close()
    report = audit_dir(tmp_path)
    assert report.ok, "nothing that FFT does wrong"
    text = report.render()
    assert "the end: 0/0#2 ended with NoState: all processes that had" in text
    if committed:
        assert f"the state of step {report.commits}, the last that was committed" in text
    else:
        assert "before a step was committed" in text and "start the job again" in text
    kept = "no violation; the job ended with NoState"
    nothing = "" if committed else "NOTHING COMMITTED, so no step was checked; "
    assert text.splitlines()[-1] == f"verdict: {nothing}{kept}"
    ended = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert ended.exit_code == (0 if committed else 1) and nothing in ended.output
    as_json = CliRunner().invoke(app, ["audit", str(tmp_path), "--json"])
    assert json.loads(as_json.output)["ok"] == committed


def test_the_report_names_the_faults_that_did_not_fire(tmp_path: Path) -> None:
    fault = {"name": "x", "kind": "exception", "step": 9, "group": 0, "rank": 0, "phase": "vote"}
    save_plan(tmp_path, FaultPlan.model_validate({"faults": [fault]}))
    trace = TraceWriter(tmp_path, Peer("0", 0, 1))
    trace.note("metrics", {"loss": 1.0})
    printed = CliRunner().invoke(app, ["report", str(tmp_path)]).output
    assert "1 of 1 faults did not fire" in printed
    assert "x (exception, step 9, phase vote, group 0 rank 0)" in printed
    trace.note("inject", {"name": "x", "kind": "exception", "phase": "vote", "step": 9})
    trace.close()
    assert RunReport(tmp_path).fired() == "all 1 requested faults have fired"
    save_plan(tmp_path, FaultPlan(faults=[]))
    assert RunReport(tmp_path).fired() is None


def first(directory: Path) -> Path:
    return sorted(directory.glob("*.jsonl"))[0]


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def test_traces_of_a_whole_job_pass(traces: Path) -> None:
    report = audit_dir(traces)
    assert report.ok, report.render()
    assert report.files == 3
    assert report.commits >= 9
    assert report.bytes_healed == 100
    assert {f.name for f in report.findings if f.checks} >= {
        "trace_whole", "replay", "agreement", "validity", "exactly_once", "samples_once",
        "shard_unity", "replicas_equal", "fencing", "live_set", "drain", "decided",
    }  # fmt: skip
    reported = json.loads(json.dumps(report.to_json()))
    assert reported["ok"] is True
    assert all(i["violation"] is None for i in reported["invariants"])


def _change_a_byte(lines: list[str]) -> list[str]:
    lines[9] = lines[9].replace('"seq":10', '"seq":10 ', 1)
    return lines


def _delete(lines: list[str]) -> list[str]:
    del lines[9]
    return lines


def _insert(lines: list[str]) -> list[str]:
    return [*lines[:9], lines[5], *lines[9:]]


def _swap(lines: list[str]) -> list[str]:
    lines[9], lines[10] = lines[10], lines[9]
    return lines


def _cut_in_the_middle(lines: list[str]) -> list[str]:
    lines[9] = lines[9][: len(lines[9]) // 2] + "\n"
    return lines


def _append_behind_the_digest(lines: list[str]) -> list[str]:
    lines[9] = lines[9].replace('"}\n', '","cause":"another"}\n')
    return lines


DAMAGE: dict[str, Callable[[list[str]], list[str]]] = {
    "a byte changed": _change_a_byte,
    "a line deleted": _delete,
    "a line inserted": _insert,
    "lines swapped": _swap,
    "a line cut": _cut_in_the_middle,
    "something behind the digest": _append_behind_the_digest,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_named_with_file_and_line(traces: Path, how: str) -> None:
    path = first(traces)
    path.write_text("".join(DAMAGE[how](lines_of(path))))
    report = audit_dir(traces)
    assert not report.ok
    (whole,) = [f for f in report.findings if f.name == "trace_whole"]
    assert whole.violation is not None
    assert whole.violation.startswith(f"{path.name}:10: ")
    assert "VIOLATION" in report.render()


@pytest.mark.parametrize("text", ["größer", "half a \udcff character", "two\nlines", "\u2028"])
def test_note_with_any_content_is_read_back_and_keeps_the_chain(tmp_path: Path, text: str) -> None:
    job = TracedJob(tmp_path)
    node = next(iter(job.nodes.values()))
    content = {"loss": float("inf"), "none": None, "text": text, text: [1, 2.5, True]}
    job.writers[node.peer].note("metrics", content, node.local)
    job.step()
    job.close()
    (note,) = read_lines(tmp_path, lambda line: line.get("note") == "metrics")
    assert note["data"] == content
    assert audit_dir(tmp_path).ok


def test_incomplete_trace_is_named_and_no_guarantee_is_violated(traces: Path, window: int) -> None:
    """The trace may be cut between any two lines, as by an incomplete copy."""
    path = traces / "g1r0i1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    named = []
    for kept in range(1, len(lines)):
        path.write_bytes(b"".join(lines[:kept]))
        report = audit_dir(traces)
        odd = {f.name: f.violation for f in report.findings if f.violation}
        assert odd.keys() <= {"trace_whole"}, (kept, odd)
        if odd:
            named.append(kept)
            assert odd["trace_whole"].startswith("the trace of 1/0#1 ends before "), odd
    assert named[:3] == [1, 2, 3] and len(named) > len(lines) / 2


def peak_of_audit(directory: Path) -> int:
    return peak_of(lambda: audit_dir(directory).ok)


@pytest.mark.long
def test_the_audit_of_a_long_run_takes_no_more_memory(tmp_path: Path, window: int) -> None:
    if window > 8:
        pytest.skip("the run is short against it")
    peaks = []
    for steps in (200, 800):
        job = TracedJob(tmp_path / str(steps))
        for _ in range(steps):
            job.step()
        job.close()
        peaks.append(peak_of_audit(job.directory))
    assert peaks[1] < 1.2 * peaks[0], peaks


@pytest.mark.long
def test_the_audit_takes_a_little_memory_for_each_trace(tmp_path: Path, window: int) -> None:
    """A long run has a trace for each process that was restarted."""
    if window > 8:
        pytest.skip("the runs are short against it")
    peaks, lives = [], (4, 24)
    for count in lives:
        job = TracedJob(tmp_path / str(count))
        for _ in range(count):
            job.step()
            job.kill_group("1")
            job.step()
            job.start_group("1")
        job.close()
        assert len(list(job.directory.iterdir())) == 2 + count
        peaks.append(peak_of_audit(job.directory))
    assert (peaks[1] - peaks[0]) / (lives[1] - lives[0]) < 200 << 10, peaks


@pytest.mark.long
def test_the_audit_of_many_epochs_takes_no_more_memory(
    tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each synchronization of an asynchronous job ends an epoch."""
    if window > 8:
        pytest.skip("the runs are short against it")
    for page in (ends, flow):
        monkeypatch.setattr(page, "RUNS", 16)
    monkeypatch.setattr(Barriers, "SOME", 32)
    peaks, epochs = [], (120, 240)
    for count in epochs:
        job = TracedJob(tmp_path / str(count))
        for _ in range(count):
            job.step()
            job.fail(next(iter(job.nodes.values())), "boom")
        job.close()
        peaks.append(peak_of_audit(job.directory))
    # pydantic's cache of strings still fills; one epoch's moves take some 10 KiB
    assert (peaks[1] - peaks[0]) / (epochs[1] - epochs[0]) < 500, peaks


def test_a_torn_last_line_is_accepted_and_reported(traces: Path) -> None:
    path = first(traces)
    path.write_bytes(path.read_bytes()[:-20])
    report = audit_dir(traces)
    whole = next(f for f in report.findings if f.name == "trace_whole")
    assert whole.violation is None
    assert report.torn == [path.name]
    assert "torn" in report.render()


def test_last_event_with_a_missing_row_is_accepted_and_reported(traces: Path) -> None:
    """A SIGKILL came between two lines of one event, none of whose effects was carried out."""
    path = first(traces)
    lines = lines_of(path)
    numbers = [n for n, line in enumerate(lines) if _is_later_row(json.loads(line))]
    assert numbers, "no event of this trace took two rows"
    path.write_text("".join(lines[: numbers[-1]]))
    before = audit_dir(traces)
    assert before.torn == [path.name]
    replayed = next(f for f in before.findings if f.name == "replay")
    assert replayed.violation is None


def _is_later_row(record: dict[str, object]) -> bool:
    return record["kind"] == "transition" and record["event"] is None


def _forge(path: Path, change: Callable[[dict[str, object]], bool]) -> int:
    """Change the first record that ``change`` accepts, and relink the file; return its line
    number."""
    place = 0

    def first_taken(record: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal place
        if not place and change(record):
            place = record["seq"]
        return [record]

    rewrite(path, first_taken)
    assert place, "nothing was changed"
    return place


def test_a_forged_decision_is_found_although_the_chain_is_right(traces: Path) -> None:
    def forge(record: dict[str, object]) -> bool:
        event = record.get("event")
        held = event.get("record") if isinstance(event, dict) else None
        if not held or held["kind"] != "commit" or record.get("from") != "PREPARED":
            return False
        held["lineage"] = "0" * 24
        return True

    _forge(first(traces), forge)
    report = audit_dir(traces)
    assert not report.ok
    names = {f.name for f in report.findings if f.violation}
    assert names & {"replay", "agreement", "exactly_once"}


def test_transition_missing_from_the_table_is_found_with_its_line(traces: Path) -> None:
    def forge(record: dict[str, object]) -> bool:
        if record.get("to") != "PREPARED":
            return False
        record["to"] = "COMMIT"
        return True

    path = first(traces)
    place = _forge(path, forge)
    report = audit_dir(traces)
    (replay,) = [f for f in report.findings if f.name == "replay"]
    assert replay.violation is not None
    assert replay.place == f"{path.name}:{place}"


@pytest.mark.parametrize(
    "name",
    ["epoch", "txn", "step", "lineage", "state", "members", "from", "to", "roles", "on", "guards",
     "effects", "cause"],
)  # fmt: skip
def test_any_change_of_a_transition_is_found_with_its_line(traces: Path, name: str) -> None:
    def forge(record: dict[str, object]) -> bool:
        if record.get("to") != "PREPARED":
            return False
        record[name] = "other"
        return True

    path = first(traces)
    place = _forge(path, forge)
    (replay,) = [f for f in audit_dir(traces).findings if f.name == "replay"]
    assert replay.place == f"{path.name}:{place}" and "'other'" in str(replay.violation)


@pytest.mark.parametrize(
    "name", ["epoch", "txn", "step", "lineage", "state", "members", "kind", "reason"]
)
def test_any_change_of_a_fenced_event_is_found_with_its_line(tmp_path: Path, name: str) -> None:
    job = TracedJob(tmp_path)
    job.step()
    node = job.live()[0]
    job.post(node, Fault(Token(0, 0), "late"))
    job.step()
    job.close()
    path = first(tmp_path)

    def forge(record: dict[str, object]) -> bool:
        if record["kind"] != "fenced":
            return False
        record[name] = "refused"
        return True

    assert audit_dir(tmp_path).ok
    place = _forge(path, forge)
    (replay,) = [f for f in audit_dir(tmp_path).findings if f.name == "replay"]
    assert replay.place == f"{path.name}:{place}" and "'refused'" in str(replay.violation)


def test_a_missing_trace_is_found(traces: Path) -> None:
    first(traces).unlink()
    report = audit_dir(traces)
    validity = next(f for f in report.findings if f.name == "validity")
    assert validity.violation is not None
    assert "there is no trace of" in validity.violation


@pytest.mark.parametrize("content", ["hello\n", '{"seq":1}\n', "[]\n", "\x00\x01\n"])
def test_a_file_that_is_no_trace_is_named(traces: Path, content: str) -> None:
    (traces / "stranger.jsonl").write_text(content)
    report = audit_dir(traces)
    whole = next(f for f in report.findings if f.name == "trace_whole")
    assert whole.violation is not None
    assert "stranger.jsonl:1" in whole.violation


def test_another_format_is_refused(traces: Path) -> None:
    def forge(record: dict[str, object]) -> bool:
        record["format"] = 99
        return True

    _forge(first(traces), forge)
    replay = next(f for f in audit_dir(traces).findings if f.name == "replay")
    assert replay.violation is not None
    assert "format" in replay.violation


def test_a_directory_without_traces_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FftError, match="--trace-dir"):
        audit_dir(tmp_path)


def test_the_report_has_a_row_for_each_incident(traces: Path) -> None:
    found = RunReport(traces).incidents
    assert [i.attempts_lost for i in found].count(1) == 2
    assert sum(i.bytes_healed for i in found) == 100
    assert any("boom" in i.noticed for i in found)
    assert any("group 1" in i.noticed for i in found)


def test_report_shows_injected_faults_that_end_one_epoch_in_one_row(tmp_path: Path) -> None:
    job = TracedJob(tmp_path)

    def inject(name: str, node: Node) -> None:
        data = {"name": name, "kind": "exception", "step": node.local.step}
        job.writers[node.peer].note("inject", data, node.local)

    job.step()
    first, second = job.live()
    inject("early", second)
    job.add("2")
    for _ in range(3):  # the new group joins
        job.step()
    inject("cut", first)
    inject("stop", second)
    job.refuse(second, "boom")
    job.settle()
    job.step()
    inject("late", first)
    job.close()
    found = [each for each in RunReport(tmp_path).incidents if not each.is_planned]
    assert [each.fault.partition(" ")[0] for each in found] == ["early", "cut", "stop", "late"]
    early, cut, stop, late = found
    assert "boom" in early.noticed and early.n == cut.n == stop.n > 0, "no join is its consequence"
    assert late.n == 0 and late.noticed == "no epoch ended because of it"
    table = fault_table(found, history_of(tmp_path).course)
    assert table is not None and len(table.rows) == 2


@pytest.mark.parametrize("goes_on", [False, True])
def test_report_counts_no_fault_at_the_end_of_a_torchft_loop(tmp_path: Path, goes_on: bool) -> None:
    """Its ranks shut down one after the other, each after the last step or in the next txn."""
    job = TracedJob(tmp_path)
    job.until_running()
    a, b = job.live()
    job.compute()
    while a.state != "COMMIT" or b.state != "NORMAL":
        job.deliver(next(node for node in (b, a) if node.inbox))
    job.post(b, Stop("shut down"))
    while b.inbox:
        job.deliver(b)
    a.inbox.rotate()  # the message arrives before the update is finished
    job.settle()
    if goes_on:
        job.step()
    job.post(a, Stop("shut down"))
    job.settle()
    job.close()
    assert [i.noticed for i in RunReport(tmp_path).incidents] == (
        [f"{a.peer}: {b.peer} left: shut down"] if goes_on else []
    )


def test_report_states_the_input_wait_of_steps(tmp_path: Path) -> None:
    for group, waits in (("0", range(100)), ("1", [250.0, 1.0])):
        trace = TraceWriter(tmp_path, Peer(group, 0, 1))
        for ms in waits:
            data = {"slice": 0, "step": 0, "token": [1, 1], "input_ms": ms}
            trace.note("consumed", data)
        trace.close()
    assert RunReport(tmp_path).input_wait() == (
        "wait for batches: p50 49.0 ms, p99 99.0 ms; longest on group 1 rank 0: p99 250.0 ms"
    )
    (tmp_path / "none").mkdir()
    TraceWriter(tmp_path / "none", Peer("0", 0, 1)).close()
    assert RunReport(tmp_path / "none").input_wait() == "wait for batches: no step has measured it"


def test_trace_files_are_named_by_participant(tmp_path: Path) -> None:
    job = TracedJob(tmp_path)
    job.close()
    for peer in job.nodes:
        assert trace_path(tmp_path, peer).exists()

"""Tests of stages that step by themselves: 2 groups x 2 stages under ``fft run``, with faults or
without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forged import Change, nth_note, rewrite, saying, without
from forked_run import fft
from stage import aborts, job, notes

from benchmarks.slices import slices
from fft.errors import FftError
from fft.trace.audit import AuditReport, audit_dir, read_lines, trace_files

SCRIPT = Path(__file__).with_name("ahead_script.py")
LIMIT_S = 150
STEPS = 16
AHEAD = 2

TRANSIENT = """
faults:
  - {name: first-forward, kind: exception, step: 3, group: 0, rank: 0, phase: forward}
  - {name: last-backward, kind: exception, step: 5, group: 1, rank: 1, phase: backward}
  - {name: one-sided-first, kind: one_sided, step: 7, group: 1, rank: 0}
  - {name: one-sided-last, kind: one_sided, step: 9, group: 0, rank: 1}
  - {name: first-vote, kind: exception, step: 11, group: 0, rank: 0, phase: vote}
  - {name: cut, kind: network_cut, step: 13, group: 1, rank: 1, phase: during_allreduce}
"""
KILLS = """
faults:
  - {name: kill-last, kind: kill, step: 6, group: 1, rank: 1, phase: forward}
  - {name: kill-first, kind: kill, step: 12, group: 0, rank: 0, phase: during_allreduce,
     with_groups: 2, settled_steps: 12}
"""


class Ended:
    """A job that was run to its end."""

    def __init__(
        self,
        folder: Path,
        plan: str = "",
        steps: int = STEPS,
        seconds: float = 0.0,
        status: int = 0,
        **more: float,
    ) -> None:
        folder.mkdir()
        (folder / "plan.yaml").write_text(plan or "faults: []")
        self.traces = folder / "run"
        command = ["run", "--groups", "2", "--ranks", "2", "--trace-dir", str(self.traces)]
        command += ["--no-progress", "--faults", str(folder / "plan.yaml")]
        command += ["--timeout", str(LIMIT_S - 20), str(SCRIPT), str(folder)]
        command += [f"{steps}", f"{seconds}", json.dumps(more)]
        done = fft(*command, folder=folder, within=LIMIT_S)
        assert done.returncode == status, done.stdout + done.stderr
        assert "did not fire" not in done.stderr
        self.most = {path.name: int(path.read_text()) for path in folder.glob("?.?.most")}
        """Maximum number of entries that a rank had."""
        self.ranks = {p.name: json.loads(p.read_text()) for p in folder.glob("?.?.json")}

    @property
    def last_stage(self) -> Path:
        return self.traces / "scopes" / "stage1"

    def audited(self) -> AuditReport:
        report = audit_dir(self.traces)
        assert report.ok, report.render()
        assert [scope.directory.name for scope in report.stages] == ["stage1"]
        found = {f.name: f.checks for f in (*report.findings, *report.stages[0].findings)}
        assert found["flow_order"] and found["entries"] and found["inputs"]
        return report


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return Ended(tmp_path_factory.mktemp("ahead") / "clean")


def assert_few(ended: Ended) -> None:
    """Check that the first stage has the entries that the flow allows, and the last one its own and
    the next."""
    assert len(ended.most) == 4
    assert all(0 < most <= (2 if "1.most" in name else 3) for name, most in ended.most.items())


def versions(traces: Path) -> list[int]:
    """Return by how much the taken entries are behind the steps that took them."""
    return [note["step"] - note["data"]["version"] for note in notes(traces, "entry")]


@pytest.mark.long
def test_faults_in_either_stage_change_no_bit(clean: Ended, tmp_path: Path) -> None:
    faulty = Ended(tmp_path / "faulty", TRANSIENT)
    assert len(clean.ranks) == 4
    assert faulty.ranks == clean.ranks
    assert_few(faulty)
    report = faulty.audited()
    assert (report.commits, report.stages[0].commits) == (STEPS, STEPS)
    for scope, least in ((faulty.traces, 3), (faulty.last_stage, 3)):
        assert len(aborts(scope)) >= least


ODD: dict[str, tuple[str, Callable[[], Change], str]] = {
    "none consumed": ("inputs", lambda: without("consumed"), "0 notes 'consumed'"),
    "no entry": ("inputs", lambda: nth_note("entry", 3, lambda note: []), "0 notes 'entry'"),
    "another entry": (
        "inputs",
        lambda: nth_note("entry", 3, saying(slice=1)),
        "a note 'entry' of slice 1",
    ),
    "too old": ("entries", lambda: nth_note("entry", 9, saying(version=0)), "with version 0"),
    "too new": ("entries", lambda: nth_note("entry", 3, saying(version=15)), "with version 15"),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("how", ODD)
def test_audit_finds_an_entry_that_no_stage_gave(how: str, clean: Ended, tmp_path: Path) -> None:
    """The traces of the last stage are modified and linked anew."""
    traces = shutil.copytree(clean.traces, tmp_path / "traces")
    clean.audited()
    name, change, text = ODD[how]
    rewrite(trace_files(traces / "scopes" / "stage1")[0], change())
    report = audit_dir(traces)
    found = [*report.findings, *report.stages[0].findings]
    assert {f.name for f in found if f.violation} == {name}
    assert text in str([f.violation for f in found])
    assert not report.ok


def test_rollback_of_one_stage_does_not_reach_the_other(clean: Ended, tmp_path: Path) -> None:
    """Epochs are formed in the stage with the fault; the other stage's steps continue in its own.

    In one step the first stage forgets to give anything: the entry is recomputed and reported.
    """
    plan = "faults:\n  - {name: one, kind: exception, step: 4, group: 0, rank: 1, phase: forward}\n"
    ended = Ended(tmp_path / "one", plan, forget=8)
    report = ended.audited()
    assert report.epochs == 1
    assert report.stages[0].epochs == 2
    forgotten = notes(ended.traces, "entry_forgotten")
    assert sorted(note["data"]["slice"] for note in forgotten) == [16, 17]
    anew = {note["data"]["slice"] for note in notes(ended.traces, "entry_made_anew")}
    assert {16, 17} <= anew
    # computations beside the steps leave no trace in generators or buffers
    for name in ("0.0.json", "1.0.json"):
        assert ended.ranks[name] == clean.ranks[name]
    for version in (0, 6, 12):  # of a process without the job's weights; old; not there yet
        for path in trace_files(ended.traces):
            rewrite(path, nth_note("entry_made_anew", 0, saying(version=version)))
        reported = audit_dir(ended.traces).render()
        assert f"was made anew with version {version}, by a rank at step " in reported


@pytest.mark.long
def test_the_first_stage_is_held_at_its_bound(tmp_path: Path) -> None:
    """The last stage is slow: the first commits as many additional steps as it may, and no more."""
    slow = Ended(tmp_path / "slow", steps=6, seconds=0.6, flow_interval=0.1)
    slow.audited()
    held = notes(slow.traces, "held")
    assert held
    assert {note["data"]["scope"] for note in held} == {"stage1"}
    # before the last stage has begun it may be held a step earlier
    ahead = [note["data"]["step"] - note["data"]["cursor"] / 2 for note in held]
    assert set(ahead) - {1} == {AHEAD}
    behind = versions(slow.last_stage)
    # an entry that waited in the queue has the version of its own step
    assert behind
    assert set(behind) == {0}


@pytest.mark.long
def test_a_frozen_stage_feeds_the_next_one_and_steps_nothing(tmp_path: Path) -> None:
    plan = "faults:\n  - {name: one, kind: exception, step: 3, group: 0, rank: 0, phase: forward}\n"
    ended = Ended(tmp_path / "frozen", plan, steps=8, frozen=1)
    assert ended.audited().commits == 8
    assert {rank["step"] for rank in ended.ranks.values()} == {8}
    assert len({r["digest"] for name, r in ended.ranks.items() if name.endswith(".0.json")}) == 1


@pytest.mark.long
def test_stage_with_more_steps_ends_with_the_one_before_and_logs_it(
    tmp_path: Path,
) -> None:
    ended = Ended(tmp_path / "more", steps=4, more_steps=2)
    ended.audited()
    assert {rank["step"] for rank in ended.ranks.values()} == {4}
    for log in (ended.traces / "logs").glob("g?r1-1.log"):
        reported = log.read_text()
        assert "stage 'stage0' has ended after 8 slices of the data" in reported
        assert "at step 4, before max_steps=6" in reported


@pytest.mark.long
def test_a_stage_that_wants_fewer_steps_ends_alone(tmp_path: Path) -> None:
    ended = Ended(tmp_path / "fewer", steps=9, more_steps=-4)
    ended.audited()
    steps = {name[2]: rank["step"] for name, rank in ended.ranks.items()}
    assert steps == {"0": 9, "1": 5}
    assert_few(ended)


@pytest.mark.long
def test_a_stage_that_is_left_by_break_lets_the_other_one_go_on(tmp_path: Path) -> None:
    """All of its groups leave, without a record of it.

    The first one continues alone to its last step.
    """
    ended = Ended(tmp_path / "last", break_1=3)
    ended.audited()
    steps = {name[2]: rank["step"] for name, rank in ended.ranks.items()}
    assert steps == {"0": STEPS, "1": 4}
    assert_few(ended)


@pytest.mark.long
@pytest.mark.parametrize("late", [0.0, 1.0])
def test_stage_after_one_left_by_break_takes_the_remaining_entries(
    late: float, tmp_path: Path
) -> None:
    """It then ends normally, because its data have ended.

    If one group leaves later, its ranks may take what the other's have given: the ranks that have
    left already recompute that.
    """
    ended = Ended(tmp_path / "first", seconds=0.2, status=75, break_0=6, late=late)
    ended.audited()
    assert {name: ended.ranks[name]["step"] for name in ("0.0.json", "1.0.json")} == {
        "0.0.json": 7,
        "1.0.json": 7,
    }
    data = slices(read_lines(ended.last_stage))
    assert (data.exact, data.once) == (True, 14), str(data)
    # depends on which group is the last one there
    reported = [log.read_text() for log in (ended.traces / "logs").glob("g?r1-1.log")]
    assert "stage 'stage0' has ended after 14 slices of the data" in "".join(reported)


@pytest.mark.long
def test_a_loop_that_is_left_by_break_may_be_begun_again(clean: Ended, tmp_path: Path) -> None:
    """No group leaves the job by that; the next stage connects anew."""
    ended = Ended(tmp_path / "again", break_0=4, break_1=6, again=1)
    ended.audited()
    assert ended.ranks == clean.ranks


@pytest.mark.long
def test_group_that_breaks_from_the_first_stage_leaves_the_last_too(
    tmp_path: Path,
) -> None:
    ended = Ended(tmp_path / "group", seconds=0.1, break_0=4, break_by=0)
    ended.audited()
    steps = {name[:3]: rank["step"] for name, rank in ended.ranks.items()}
    assert (steps["0.0"], steps["1.0"], steps["1.1"]) == (5, STEPS, STEPS)
    assert 0 < steps["0.1"] < STEPS


SKIPS: dict[str, dict[str, float]] = {
    "first": {"overflow_0": 0.05},
    "last": {"overflow_1": 0.05},
    "both": {"overflow_0": 0.08, "overflow_1": 0.04},
    "first, nothing given in a step": {"overflow_0": 0.05, "forget": 6},
}
PACES = {
    "last stage slow, with faults": (TRANSIENT.replace("step: 13", "step: 8"), {"seconds": 0.1}),
    "first stage slow": ("", {"first_seconds": 0.1}),
}


@pytest.mark.long
@pytest.mark.parametrize("where", SKIPS)
def test_skipped_steps_change_no_bit_under_any_timing(where: str, tmp_path: Path) -> None:
    """A scaler skips steps of one stage or of both: the flow counts the slices that they take."""
    runs = [Ended(tmp_path / "fast", **SKIPS[where])]
    for plan, more in PACES.values():
        runs.append(Ended(tmp_path / f"run{len(runs)}", plan, **more, **SKIPS[where]))
    taken, is_forgetful = [], "forget" in SKIPS[where]
    for run in runs:
        report = run.audited()
        skipped = [report.commits - run.ranks["0.0.json"]["step"]]
        skipped += [report.stages[0].commits - run.ranks["0.1.json"]["step"]]
        stages = [name in where or where == "both" for name in ("first", "last")]
        assert [number > AHEAD for number in skipped] == stages
        assert bool(notes(run.traces, "entry_made_anew")) is is_forgetful
        assert_few(run)
        entries = notes(run.last_stage, "entry")
        taken.append({(each["data"]["slice"], each["data"]["version"]) for each in entries})
        # the stage that has its last step first ends the data of the other one
        assert run.ranks["0.0.json"]["step"] == STEPS
        assert report.stages[0].commits == min(report.commits, STEPS + skipped[1])
    assert all(run.ranks == runs[0].ranks for run in runs)
    assert all(entries == taken[0] for entries in taken)


@pytest.mark.long
def test_stages_that_need_all_groups_wait_for_the_one_that_was_killed(tmp_path: Path) -> None:
    """Its first stage is held by its last one, which comes when the first has the state."""
    plan = "faults:\n  - {name: one, kind: kill, step: 5, group: 1, rank: 1, phase: forward}\n"
    ended = Ended(tmp_path / "all", plan, seconds=0.2, groups=2)
    report = ended.audited()
    assert (report.commits, report.stages[0].commits) == (STEPS, STEPS)
    assert {rank["step"] for rank in ended.ranks.values()} == {STEPS}


@pytest.mark.long
def test_consumed_outputs_are_not_kept_for_an_absent_rank(tmp_path: Path) -> None:
    """The last stage continues with one group, while the other's rank is stopped: no rank requests
    anything from that group's first stage, which continues."""
    plan = (
        "faults:\n  - {name: one, kind: stop, step: 4, group: 0, rank: 1, phase: forward, "
        "seconds: 8}\n"
    )
    ended = Ended(
        tmp_path / "away", plan, steps=40, seconds=0.05, hang_limit=1.0, flow_interval=0.1
    )
    report = ended.audited()
    assert report.stages[0].epochs > 1
    alone = [note for note in notes(ended.last_stage, "entry") if note["step"] > 10]
    assert len(alone) > 4 * AHEAD
    assert 0 < ended.most["0.0.most"] <= AHEAD + 1


@pytest.mark.long
def test_killed_stages_come_back_and_every_sample_counts_once_in_each(tmp_path: Path) -> None:
    steps = 80
    killed = Ended(tmp_path / "killed", KILLS, steps=steps, seconds=0.02, alone=0.25)
    report = killed.audited()
    for scope in (killed.traces, killed.last_stage):
        data = slices(read_lines(scope))
        assert data.exact, str(data)
        assert data.once >= steps
    assert {rank["step"] for rank in killed.ranks.values()} == {steps}
    first, last = (
        {r["digest"] for name, r in killed.ranks.items() if name.endswith(f"{rank}.json")}
        for rank in range(2)
    )
    assert len(last) == 1  # its batches have no statistics of their own
    assert report.bytes_healed > 0
    assert report.stages[0].bytes_healed > 0
    # A stage of one group takes fewer slices per step than one of two, so entries may wait longer
    # than AHEAD steps. None is made with the weights that a newcomer starts with, version 0.
    late = [
        note["data"]["version"] for note in notes(killed.last_stage, "entry") if note["step"] >= 12
    ]
    assert late
    assert min(late) > 0
    assert first


def test_torchfts_loop_is_refused_where_stages_step_by_themselves(tmp_path: Path) -> None:
    """It would neither take nor give entries."""
    with job(tmp_path, 1) as made:
        settings = {"spec": "pipeline_ahead", "rank": 0, "ranks": 2, "register": False}
        with pytest.raises(FftError, match=r"use manager\.transactions"):
            made.member("0", **settings).manager.start_quorum()

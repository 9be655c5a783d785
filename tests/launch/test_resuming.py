"""Tests of consecutive starts of a job: when the job gives up, and which faults remain for the
next.

They use real checkpoints on disk; the test dictates the result of each start. `test_durable.py`
runs whole jobs.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_files import manifest_of, published, written
from forked import Forked
from refused_calls import refuse

from fft.bus import serve_tcp
from fft.checkpoints.files import Checkpoints
from fft.checkpoints.plan import Checkpointing
from fft.checkpoints.stores import NoRoom, open_store
from fft.launch.exit_status import ExitStatus
from fft.launch.resuming import Resumptions, begun, held
from fft.launch.supervisor import JobOutcome, RunConfig
from fft.messages.fault_plans import FaultPlan, load_plan
from fft.trace.ends import Taint

RESTARTS = 2
LOST = JobOutcome(False, lost="the bus has forgotten the job")
PLAN = FaultPlan.model_validate(
    {
        "faults": [
            {"name": name, "kind": "exception", "step": 9, "group": 0, "rank": 0, "phase": "vote"}
            for name in ("one", "other")
        ]
    }
)


class Job:
    """The starts of a job, and the messages about them."""

    def __init__(self, root: Path, start: Callable[[Job], JobOutcome]) -> None:
        self.root, self._start = root, start
        self.began: list[int | None] = []
        self.faults: list[list[str]] = []
        self.folders: list[Path] = []
        self.said: list[str] = []
        script = root / "script.py"
        script.touch()
        self.config = RunConfig(
            [str(script)],
            2,
            2,
            root / "traces",
            max_restarts=RESTARTS,
            checkpoint=Checkpointing(root / "checkpoints", 2),
        )

    def run(self) -> JobOutcome:
        traces = self.config.trace_dir
        outcome, _ = Resumptions(self._one, self.said.append).run(self.config, PLAN, traces)
        return outcome

    def publish(self, step: int) -> None:
        published(open_store(str(self.root / "checkpoints")), step)

    def _one(self, config: RunConfig, plan: FaultPlan) -> JobOutcome:
        self.began.append(config.resume_step)
        if len(self.began) > 1:  # the ranks read the file
            there = [] if config.faults is None else load_plan(config.faults).faults
            assert there == plan.faults
        self.faults.append([fault.name for fault in plan.faults])
        self.folders.append(config.trace_dir)
        (config.trace_dir / "g0r0i1.jsonl").touch()
        assert len(self.began) < 10, "it is not given up"
        return self._start(self)


@pytest.mark.parametrize("step", [None, 4])
def test_starts_that_come_no_further_are_given_up(step: int | None, tmp_path: Path) -> None:
    def first_only(job: Job) -> JobOutcome:
        if step is not None and len(job.began) == 1:
            job.publish(step)
        return LOST

    job = Job(tmp_path, first_only)
    assert job.run() == replace(LOST, status=ExitStatus.NO_PROGRESS)
    assert job.began == [None] * (step is not None) + [step] * (RESTARTS + 1)
    (output,) = [line for line in job.said if "starts in a row" in line]
    assert f"{RESTARTS + 1} starts in a row have published no checkpoint" in output
    assert str(job.folders[-1] / "logs") in output


def test_preempted_starts_do_not_use_up_the_restarts(tmp_path: Path) -> None:
    """They are given up later, as a chain of starts that come no further."""
    preempted = replace(LOST, ended_by_error=False)
    job = Job(tmp_path, lambda job: preempted)
    assert job.run() == replace(preempted, status=ExitStatus.NO_PROGRESS)
    assert len(job.began) == 3 * RESTARTS + 1


def diverged(sound: int, bad: int) -> JobOutcome:
    return JobOutcome(False, lost="the replicas differ", taint=Taint(sound, bad))


def test_job_returns_to_the_newest_checkpoint_before_the_tainted_steps(tmp_path: Path) -> None:
    def once(job: Job) -> JobOutcome:
        if len(job.began) > 1:
            return JobOutcome(True)
        for step in (2, 4, 6, 8):
            job.publish(step)
        return diverged(5, 8)

    job = Job(tmp_path, once)
    assert job.run().ok
    assert job.began == [None, 4]
    store = open_store(str(tmp_path / "checkpoints"))
    assert [e.step for e in Checkpoints(store).found() if e.step is not None] == [2, 4]


def test_start_diverging_before_a_comparison_resumes_its_checkpoint(
    tmp_path: Path,
) -> None:
    def second(job: Job) -> JobOutcome:
        start = len(job.began)
        if start < 3:
            job.publish((4, 6)[start - 1])
        return (LOST, diverged(0, 6), JobOutcome(True))[start - 1]

    job = Job(tmp_path, second)
    assert job.run().ok
    assert job.began == [None, 4, 4]


def test_job_with_only_tainted_checkpoints_keeps_them_and_ends(tmp_path: Path) -> None:
    def late(job: Job) -> JobOutcome:
        job.publish(6)
        job.publish(8)
        return diverged(5, 8)

    job = Job(tmp_path, late)
    assert not job.run().ok and job.began == [None]
    assert "steps 6 to 8 are tainted, and all checkpoints at " in job.said[-1]
    assert open_store(str(tmp_path / "checkpoints")).directories() == ["step-6", "step-8"]


def test_job_that_diverges_again_from_the_same_checkpoint_ends(tmp_path: Path) -> None:
    def always(job: Job) -> JobOutcome:
        if len(job.began) == 1:
            job.publish(4)
        return diverged(4, 5)

    job = Job(tmp_path, always)
    assert not job.run().ok
    assert job.began == [None, 4]
    assert "two starts in a row from step 4 have ended because the replicas differ" in job.said[-1]


def test_failed_resume_is_a_failed_job(tmp_path: Path) -> None:
    """It is not reported as a job that was not started."""

    def damaging(job: Job) -> JobOutcome:
        job.publish(2)
        for file in (tmp_path / "checkpoints" / "step-2").iterdir():
            file.write_text("damaged")
        return LOST

    job = Job(tmp_path, damaging)
    outcome = job.run()
    assert outcome.exit_status == ExitStatus.FAILED
    assert outcome.lines[0].startswith("the job cannot be started again: ")


def test_starts_that_come_further_go_on_however_many_they_are(tmp_path: Path) -> None:
    """Every second start takes no checkpoint."""

    def every_other(job: Job) -> JobOutcome:
        if len(job.began) == 7:
            return JobOutcome(True)
        if len(job.began) % 2:
            job.publish(2 * len(job.began))
        return LOST

    job = Job(tmp_path, every_other)
    assert job.run().ok
    assert job.began == [None, 2, 2, 6, 6, 10, 10]
    assert [folder.name for folder in job.folders] == [
        "traces", *(f"start{number}" for number in range(2, 8))
    ]  # fmt: skip


def test_a_fault_that_has_fired_does_not_fire_again_in_the_next_start(tmp_path: Path) -> None:
    fired = [(), ("one",), ("other",)]

    def fires(job: Job) -> JobOutcome:
        begun = len(job.began)
        job.publish(2 * begun)
        if begun > len(fired):
            return JobOutcome(True)
        return replace(LOST, fired=frozenset(fired[begun - 1]))

    job = Job(tmp_path, fires)
    assert job.run().ok
    assert job.faults == [["one", "other"], ["one", "other"], ["other"], []]


def test_start_removes_leftovers_of_earlier_ones_unless_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes the first start of a new job, and one that resumes by itself; a host that joins
    removes nothing."""
    job = Job(tmp_path, lambda job: JobOutcome(True))
    store = open_store(str(tmp_path / "checkpoints"))
    attempt = written(store, 3)
    assert store.directories() == [attempt]
    resuming = replace(job.config, checkpoint=Checkpointing(tmp_path / "checkpoints", resume=True))
    with serve_tcp() as server:
        monkeypatch.setenv("FFT_BUS", server.url)
        begun(resuming, joins=True)
    with store.at_work():
        begun(job.config)
    assert store.directories() == [attempt]
    begun(job.config)
    assert store.directories() == []
    found = published(store, 4, 8)
    directory = written(store, 6)
    found.publish(directory, manifest_of(store, directory, "a1", 6))
    written(store, 9)
    assert begun(resuming).resume_step == 6
    assert store.directories() == ["step-4", "step-6", "step-8.partial-given-up"]


def test_unfinished_attempts_are_removed_first_on_a_full_disk(tmp_path: Path) -> None:
    """The kernel fails the writes of one process as a full disk does."""
    store = open_store(str(tmp_path / "checkpoints"))
    attempt = written(store, 3)
    published(store, 2)
    assert store.directories() == ["step-2", attempt]
    process = Forked(_hold_without_room, tmp_path, log=tmp_path / "log")
    try:
        assert process.wait(60) == 0
    finally:
        process.end()
    assert store.directories() == ["step-2"]


def _hold_without_room(root: Path) -> None:
    job = Job(root, lambda job: JobOutcome(True))
    refuse("write", errno.ENOSPC)
    with pytest.raises(NoRoom), held(job.config, joins=False):
        pass


def test_start_removes_nothing_without_knowing_the_writers(tmp_path: Path) -> None:
    job = Job(tmp_path, lambda job: JobOutcome(True))
    place = f"memory://{tmp_path.name}"
    store = open_store(place)
    attempt = written(store, 3)
    begun(replace(job.config, checkpoint=Checkpointing(place)))
    assert store.directories() == [attempt]


def test_start_resumes_beside_links_that_a_removal_left(tmp_path: Path) -> None:
    """Earlier versions stopped at such a link, and left it under the name of a removal."""
    job = Job(tmp_path, lambda job: JobOutcome(True))
    root, cold = tmp_path / "checkpoints", tmp_path / "cold"
    store = open_store(str(root))
    published(store, 2, 4)
    (root / "step-2").rename(cold)
    (root / "step-2").symlink_to(cold)
    (root / "step-1.partial-removed-1").symlink_to(cold)
    (root / "step-9").symlink_to(tmp_path / "nowhere")
    resuming = replace(job.config, checkpoint=Checkpointing(root, resume=True))
    assert begun(resuming).resume_step == 4
    assert store.directories() == ["step-2", "step-4", "step-9"]
    assert len(list(cold.iterdir())) == 13


NAN = frozenset({("ResultRefused", "train.py:13 <module>")})


def test_start_that_ends_twice_soon_after_a_state_begins_with_an_older_one(tmp_path: Path) -> None:
    """The state of step 10 is whole and verifies, but each start from it ends at step 13."""

    def bad_state(job: Job) -> JobOutcome:
        if job.began == [None]:
            job.publish(5), job.publish(10)
            return LOST
        if job.began[-1] == 10:
            return replace(LOST, errors=NAN, step=13)
        return JobOutcome(True)

    job = Job(tmp_path, bad_state)
    assert job.run().ok
    assert job.began == [None, 10, 10, 5]
    assert any("with a state of step 10 or later, which may be bad" in line for line in job.said)
    store = open_store(str(tmp_path / "checkpoints"))
    assert store.directories() == ["step-10", "step-5"], "a later checkpoint replaces it"


def test_states_that_follow_from_a_bad_one_are_left_as_well(tmp_path: Path) -> None:
    def bad_state(job: Job) -> JobOutcome:
        if job.began == [None]:
            job.publish(5), job.publish(10)
            return LOST
        if job.began[-1] == 10:
            job.publish(12)
        return replace(LOST, errors=NAN, step=13) if job.began[-1] != 5 else JobOutcome(True)

    job = Job(tmp_path, bad_state)
    assert job.run().ok
    assert job.began == [None, 10, 12, 5]


def test_start_that_ends_in_the_same_way_from_all_states_is_given_up(tmp_path: Path) -> None:
    def hopeless(job: Job) -> JobOutcome:
        if job.began == [None]:
            job.publish(5), job.publish(10)
            return LOST
        return replace(LOST, errors=NAN, step=13)

    job = Job(tmp_path, hopeless)
    assert not job.run().ok
    assert job.began == [None, 10, 10, 5]
    assert "there is no older state to begin with, and the job is not started again" in job.said[-1]


def test_kills_soon_after_a_resume_do_not_make_its_state_suspect(tmp_path: Path) -> None:
    def killed(job: Job) -> JobOutcome:
        if job.began == [None]:
            job.publish(5), job.publish(10)
        ended = len(job.began) > 3
        deaths = frozenset({(f"step 1{len(job.began) % 2}", "SIGKILL")})
        return JobOutcome(True) if ended else replace(LOST, step=10, deaths=deaths)

    job = Job(tmp_path, killed)
    assert job.run().ok
    assert job.began == [None, 10, 10, 10]

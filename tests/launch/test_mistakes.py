"""Tests that tell a mistake in the script from a fault of a machine: the rule, and real
processes."""

from __future__ import annotations

import gzip
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from supervisor_stage import Job, Stage
from test_supervisor import at_work, record, supervised_children, trace, two_at_work

from fft.errors import (
    CheckpointError,
    GradientLayoutMismatch,
    GradientMissing,
    NoState,
    OtherSettings,
    ResultRefused,
    StateMismatch,
    StepRetriesExceeded,
    UnequalData,
    UnfitCheckpoint,
)
from fft.launch import script_runner
from fft.launch.verdict import Mistakes, is_the_scripts
from fft.train.session.error_reports import text_of
from fft.train.step.step_failures import StepFailures
from fft.util.error_places import LONGEST_TEXT, Place, fingerprint, may_pass, place_of

StartJob = Callable[..., AbstractContextManager[Job]]


def place(kind: type[BaseException] = ValueError, where: str = "train.py:3 f") -> Place:
    kinds = tuple(k.__name__ for k in kind.__mro__)
    return Place(kinds[0], kinds, "no", where, "", "Traceback …")


# --- the rule -------------------------------------------------------------------------------------


def test_failure_of_all_groups_before_the_first_commit_is_a_mistake() -> None:
    mistakes = Mistakes(["0", "1"], 2)
    assert mistakes.ended("0", place(), False) is None
    found = mistakes.ended("1", place(), False)
    assert found is not None and found.ends == "job" and found.place == place()


def test_failure_at_one_of_several_supervisors_is_no_mistake_yet() -> None:
    """The cause may be this machine, as the groups of the other supervisors have not failed."""
    mistakes = Mistakes(["0", "1"], 4)
    assert mistakes.ended("0", place(), False) is None
    assert mistakes.ended("1", place(), False) is None


def test_repeated_failure_before_the_first_commit_is_a_mistake() -> None:
    mistakes = Mistakes(["0", "1"], 4)
    assert mistakes.ended("0", place(), False) is None
    assert mistakes.ended("0", place(where="elsewhere.py:1 g"), False) is None
    assert mistakes.ended("0", place(KeyError), False) is None
    found = mistakes.ended("0", place(KeyError), False)
    assert found is not None and found.ends == "job"


@pytest.mark.parametrize("kind", [UnequalData, ResultRefused, GradientMissing])
def test_error_that_a_resumed_job_would_repeat_ends_the_job(kind: type[Exception]) -> None:
    found = Mistakes(["0", "1"], 2).ended("1", place(kind), job_committed=True)
    assert found is not None and found.ends == "job"
    assert is_the_scripts(found.place), "a start from a checkpoint would compute the same"


def test_an_item_that_cannot_be_loaded_ends_the_job() -> None:
    permanent = replace(place(KeyError), item="item 7")
    found = Mistakes(["0", "1"], 2).ended("1", permanent, job_committed=True)
    assert found is not None and found.ends == "job"
    assert found.reason == "item 7 of the data cannot be loaded"


def test_an_item_behind_a_connection_ends_the_job_after_one_restart() -> None:
    mistakes = Mistakes(["0", "1"], 2)
    lost = replace(place(ConnectionError), item="item 7")
    assert mistakes.ended("1", lost, job_committed=True) is None
    assert mistakes.ended("1", replace(lost, item="item 9"), job_committed=True) is None
    found = mistakes.ended("1", replace(lost, item="item 9"), job_committed=True)
    assert found is not None and found.ends == "job"


@pytest.mark.parametrize("kind", [GradientLayoutMismatch, OtherSettings])
def test_groups_that_are_not_alike_are_a_mistake_at_once(kind: type[BaseException]) -> None:
    found = Mistakes(["0", "1"], 2).ended("1", place(kind), False)
    assert found is not None and found.ends == "job"
    found = Mistakes(["0", "1"], 2).ended("1", place(kind), True)
    assert found is not None and found.ends == "group"


def test_unloadable_script_is_not_started_twice() -> None:
    for kind in (SyntaxError, IndentationError, ImportError, ModuleNotFoundError):
        found = Mistakes(["0", "1"], 2).ended("0", place(kind), False)
        assert found is not None and found.ends == "job"


@pytest.mark.parametrize("kind", [UnfitCheckpoint, StateMismatch])
def test_a_checkpoint_of_another_script_needs_no_second_start(kind: type[BaseException]) -> None:
    """A checkpoint that could not be read may be readable the next time, and a rank that does
    not fit the state of a running job may be a fault of its host."""
    found = Mistakes(["0", "1"], 4).ended("0", place(kind), False)
    assert found is not None and found.ends == "job"
    assert Mistakes(["0", "1"], 4).ended("0", place(CheckpointError), False) is None
    assert Mistakes(["0", "1"], 4).ended("0", place(kind), True) is None


def test_one_group_that_fails_while_others_commit_is_left_out_alone() -> None:
    mistakes = Mistakes(["0", "1"], 2)
    assert mistakes.ended("1", place(), True) is None
    found = mistakes.ended("1", place(), True)
    assert found is not None and found.ends == "group"


def test_equal_failures_after_commits_are_a_mistake_without_recovery() -> None:
    mistakes = Mistakes(["0", "1", "2"], 3)
    assert mistakes.ended("0", place(), True) is None
    mistakes.progressed("0")
    assert mistakes.ended("1", place(), True) is None
    found = mistakes.ended("2", place(), True)
    assert found is not None and found.ends == "job" and "1, 2" in found.reason


def test_signals_connection_errors_and_exit_codes_are_no_mistakes() -> None:
    for kind in (ConnectionResetError, TimeoutError, OSError):
        mistakes = Mistakes(["0"], 1)
        for _ in range(3):
            assert mistakes.ended("0", place(kind), False) is None
    mistakes = Mistakes(["0"], 1)
    for _ in range(3):
        assert mistakes.ended("0", None, False) is None
        assert mistakes.ended("0", place(SystemExit), True) is None
    assert mistakes.ended("0", place(FileNotFoundError), False) is not None


# --- the failures of a body -----------------------------------------------------------------------


def raised(make: Callable[[], object]) -> Exception:
    try:
        make()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError


def test_same_error_ends_after_two_tries_and_others_after_five() -> None:
    def same() -> Exception:
        return raised(lambda: object().missing)  # type: ignore[attr-defined]  # its message contains an address

    failures = StepFailures(None)
    assert failures.failed(3, "01", same()) is None
    assert "2 times in a row by the same error" in str(failures.failed(3, "01", same()))
    for between in (failures.committed, lambda: failures.failed(3, "0", same())):
        failures.committed()
        assert failures.failed(3, "01", same()) is None
        between()
        assert failures.failed(3, "01", same()) is None
    failures.committed()
    others = [ValueError(str(n)) for n in range(5)]
    reported = [failures.failed(3, "01", error) for error in others]
    assert reported[:4] == [None] * 4 and "5 times" in str(reported[4])
    failures.committed()
    assert [failures.failed(3, "01", TimeoutError()) for _ in range(4)] == [None] * 4


def test_error_with_a_failing_str_is_reported_with_a_placeholder() -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise KeyError("no words")

    error = raised(lambda: (_ for _ in ()).throw(Mute()))
    assert place_of(error).message == "<Mute whose __str__ raises KeyError>"
    assert fingerprint(error) == fingerprint(error)
    assert text_of(error) == "Mute: <Mute whose __str__ raises KeyError>"


def test_a_limit_that_is_given_holds_for_every_sort() -> None:
    failures = StepFailures(3)
    error = ValueError("always")
    assert [failures.failed(0, "0", error) is None for _ in range(3)] == [True, True, False]


# --- places ---------------------------------------------------------------------------------------


def test_a_place_is_the_innermost_line_of_the_users_code() -> None:
    def mine() -> None:
        os.listdir("/no/such folder")

    error = raised(mine)
    found = place_of(error)
    assert found.where == f"{__file__}:{mine.__code__.co_firstlineno + 1} mine"
    assert found.type == "FileNotFoundError" and "OSError" in found.kinds and not found.may_pass
    assert Place.from_json(found.to_json()) == found
    assert may_pass(OSError(5, "input/output")) and not may_pass(error)
    assert may_pass(socket.gaierror(-3, "name resolution")) and not may_pass(gzip.BadGzipFile())
    error.fft_place = "allreduce of (3,) in group 1"  # type: ignore[attr-defined]
    assert place_of(error).operation == error.fft_place and may_pass(error)  # type: ignore[attr-defined]
    first, second, other = [fingerprint(raised(f)) for f in (mine, mine, lambda: mine())]
    assert first == second != other


def test_error_that_stands_for_its_cause_has_one_traceback() -> None:
    def fails() -> None:
        try:
            raise ValueError("boom")
        except ValueError as error:
            raise StepRetriesExceeded("again and again") from error

    found = place_of(raised(fails))
    assert (found.type, found.text.count("Traceback")) == ("ValueError", 1)
    assert found.text.endswith("StepRetriesExceeded: again and again\n")


def test_long_traceback_loses_its_middle_and_surrogates_are_replaced() -> None:
    found = place_of(raised(lambda: int("x" * 20_000 + "\udcff")))
    assert len(found.text) < LONGEST_TEXT + 20
    assert found.text.startswith("Traceback") and found.text.endswith("\n")
    found.to_json().encode()


def test_invalid_place_is_refused() -> None:
    for text in ("", "{}", "[]", '{"type": "x"', place().to_json().replace('"no"', "3", 1)[:-9]):
        with pytest.raises(ValueError):
            Place.from_json(text)


# --- the runner -----------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
assert sys.modules["__main__"].__dict__ is globals() and __name__ == "__main__"
assert Path(__file__) == Path({path!r}) and __spec__ is None
assert sys.path[0] == {folder!r}, sys.path
import trace, beside
assert "fft" not in trace.__file__ and "fft" not in sys.modules
print(sys.argv[1:], beside.VALUE)
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "1 / 0",
        "sys.exit(3)",
        "sys.exit('words')",
        "def f(:",
        "import no_such_module",
        "sys.excepthook = lambda *a: print('mine', a[0].__name__); raise KeyError(1)",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_a_script_under_the_runner_ends_as_under_python(tmp_path: Path, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=str(script), folder=str(tmp_path), end=end))
    (tmp_path / "beside.py").write_text("VALUE = 7")
    ends = []
    for before in ([], [script_runner.__file__]):
        command = [sys.executable, *before, str(script), "a", "--b"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
        ends.append((done.returncode, done.stdout))
        if end != "raise KeyboardInterrupt":  # its traceback contains the runner
            ends[-1] += (done.stderr,)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_into_a_file_is_as_under_python(tmp_path: Path, unbuffered: str) -> None:
    """This also holds if another object has replaced stdout before the script starts."""
    script, found = tmp_path / "script.py", []
    script.write_text(
        "import sys\n"
        "for file in (sys.stdout, sys.stderr):\n"
        "    sys.stdout.write(f'{file.mode} {file.name} {file.encoding} {file.errors}\\n')\n"
    )
    (tmp_path / "tee").mkdir()
    (tmp_path / "tee" / "sitecustomize.py").write_text(
        "import sys\nclass Tee:\n    mode, name, encoding, errors = 'a', 'b', 'c', 'd'\n"
        "    def write(self, text): sys.__stdout__.write(text)\n"
        "    def flush(self): sys.__stdout__.flush()\n"
        "sys.stdout = Tee()\n"
    )
    for before in ([], [script_runner.__file__]):
        for path in ("", str(tmp_path / "tee")):
            env = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": path}
            with (tmp_path / "log").open("wb") as log:
                command = [sys.executable, *before, str(script)]
                subprocess.run(command, stdout=log, stderr=log, timeout=60, check=True, env=env)
            found.append((tmp_path / "log").read_text())
    assert found[:2] == found[2:]
    assert "w <stdout>" in found[0] and "a b c d" in found[1]


FILLS_ITS_LOG = """
import os, resource, sys
def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
print("first", flush=True)
room(1)
for n in range(50):
    print("x" * 99, flush=True)
sys.stderr.write("y" * 199 + "\\n")
room(resource.RLIM_INFINITY)
print("last", flush=True)
sys.stderr.write("and last\\n")
"""


def test_a_script_does_not_end_because_its_log_finds_no_room(tmp_path: Path) -> None:
    """Dropped output is counted.

    A limit on the sizes of files fails the write as a full disk does.
    """
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(FILLS_ITS_LOG)
    with log.open("ab") as output:
        command = [sys.executable, script_runner.__file__, str(script)]
        done = subprocess.run(command, stdout=output, stderr=output, timeout=60, check=False)
    assert done.returncode == 0, log.read_text()
    dropped = "[fft: {} bytes of output were lost here because the disk was full]"
    lines = [line for line in log.read_text().splitlines() if line]
    assert lines == ["first", dropped.format(5000), "last", dropped.format(200), "and last"]


# --- real processes -------------------------------------------------------------------------------


def test_a_mistake_at_the_start_ends_the_job_with_its_traceback_once(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=2, ranks=2) as job:
        actors = stage.enter(4)
        for actor in actors.values():
            actor.order("raise bug")
        verdict = job.verdict()
    assert not verdict.ok
    text = "\n".join(verdict.lines)
    assert text.count("Traceback") == 1 and text.count("RuntimeError: bug") == 1
    assert f'File "{stage.script}", line' in text and "no group reached its first step" in text
    assert supervised_children() == []


def test_script_exit_with_a_code_shows_its_output(run_job: StartJob, stage: Stage) -> None:
    """After a wrong argument, for example, the place in argparse that raised it is of no help."""
    with run_job(groups=2, ranks=1) as job:
        for actor in stage.enter(2).values():
            actor.order("print script.py: error: unrecognized arguments: --workers")
            actor.says()
            actor.order("exit 2")
        verdict = job.verdict()
    text = "\n".join(verdict.lines)
    assert not verdict.ok and "no group reached its first step" in text
    assert text.count("unrecognized arguments: --workers") == 1 and "Traceback" not in text


def test_mistake_at_the_start_of_a_group_ends_the_job_when_repeated(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = stage.enter(2)
        actors["1", "0"].order("raise bug")
        (again,) = stage.enter(1).values()
        again.order("raise bug")
        verdict = job.verdict()
        actors["0", "0"].gone()
    assert len(verdict.lines) == 1 and "after a restart it failed in the same place" in str(verdict)


def test_other_errors_and_signals_are_started_again(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=2, ranks=1) as job:
        (one, other) = stage.enter(2).values()
        for order in ("raise bug", "raise other", "raise bug", "kill"):
            if order == "kill":
                os.kill(one.pid, signal.SIGKILL)
            else:
                one.order(order)
            (one,) = stage.enter(1).values()
        one.order("exit 0")
        other.order("exit 0")
        assert job.verdict().ok


def test_group_that_cannot_continue_is_dropped_and_the_others_finish(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 5)
        actors["1", "0"].order("raise bug")
        (again,) = stage.enter(1).values()
        again.order("raise bug")
        again.gone()
        actors["0", "0"].order("exit 0")
        verdict = job.verdict()
        assert stage.nobody()
    assert not verdict.ok
    assert "group 1 was given up" in verdict.lines[0]
    assert str(verdict).count("RuntimeError: bug") == 1


def test_state_lost_by_a_script_error_is_placed_at_that_error() -> None:
    try:
        try:
            raise ValueError("a schedule that fails after the commit")
        except ValueError as error:
            raise NoState("nobody has the state") from error
    except NoState as lost:
        found = place_of(lost)
    assert found.type == "ValueError" and not found.may_pass
    assert "NoState: nobody has the state" in found.text
    assert place_of(NoState("nobody has the state")).type == "NoState"


def test_job_left_with_too_few_groups_ends_with_the_mistake_alone(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = stage.enter(2)
        for group in (0, 1):
            trace(job, group, 0, 1, record(kind="header", config={"min_groups": 2}))
            trace(job, group, 0, 1, at_work(5, 1, ["0", "1"]))
        actors["1", "0"].order("raise bug")
        (again,) = stage.enter(1).values()
        again.order("raise bug")
        innocent = actors["0", "0"]
        assert innocent.says() == {"heard": "sigterm"}
        innocent.order("raise other")  # the error with which its last operation was aborted
        verdict = job.verdict()
    assert not verdict.ok
    assert "group 1 was given up" in verdict.lines[0]
    assert "2 groups are needed" in verdict.lines[1]
    assert len(verdict.lines) == 2


def test_error_is_reported_by_its_first_nonempty_line() -> None:
    """Errors of torch's pipelines begin with an empty line."""
    error = RuntimeError("\n        Failed to run stage backward:\n  …")
    assert text_of(error) == "RuntimeError: Failed to run stage backward:"
    assert place_of(error).message == "Failed to run stage backward:"

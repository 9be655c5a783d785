"""Tests of `fft checkpoint`, and of the checkpoints that `fft run` refuses before it starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_files import manifest_of, published, written
from rich.console import Console
from typer.testing import CliRunner

from fft.checkpoints.files import partial_name
from fft.checkpoints.stores import REMOVED, open_store
from fft.cli import app, checkpoints

ended = CliRunner()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three checkpoints, the newest of them damaged, and an unfinished one."""
    store = open_store(str(tmp_path / "checkpoints"))
    published(store, 2, 4, 6)
    written(store, 7)
    (tmp_path / "checkpoints" / "step-6" / "g0r1.json").write_text("{}")
    return tmp_path / "checkpoints"


def run_checkpoint(*arguments: object) -> tuple[int, str]:
    found = ended.invoke(app, ["checkpoint", *map(str, arguments)])
    return found.exit_code, found.output


def test_list_shows_the_problem_of_each_checkpoint(place: Path) -> None:
    code, text = run_checkpoint("list", place, "--json")
    entries = {entry["name"]: entry for entry in json.loads(text)}
    assert code == 0 and len(entries) == 4
    assert entries["step-4"]["cursor"] == 8 and entries["step-4"]["problem"] is None
    assert "step-6/g0r1.json: it has 2 bytes" in entries["step-6"]["problem"]
    assert "was not finished" in entries["step-7.partial-a1"]["problem"]
    code, text = run_checkpoint("list", place)
    assert code == 0 and "step-7.partial-a1" in text and "complete" not in text
    assert f"their contents were not read: fft checkpoint verify {place}\n" in text


def test_missing_checkpoint_is_reported(tmp_path: Path) -> None:
    assert run_checkpoint("list", tmp_path) == (0, f"no checkpoint at {tmp_path}\n")
    published(open_store(str(tmp_path)), 2, 4)
    expected = f"fft: {tmp_path}: no checkpoint of step 7; there are: 2, 4\n"
    for arguments in (("verify", tmp_path, "--step", 7), ("export", tmp_path, 7, tmp_path / "x")):
        code, text = run_checkpoint(*arguments)
        assert code == 2 and expected in text


def test_checkpoint_step_is_accepted_by_its_directory_name(place: Path, tmp_path: Path) -> None:
    code, text = run_checkpoint("export", place, "step-7", tmp_path / "x")
    assert code == 2 and "no checkpoint of step 7" in text
    code, text = run_checkpoint("export", place, "seven", tmp_path / "x")
    assert code == 2 and "seven" in text


def test_a_name_is_on_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = written(open_store(str(place)), 70, "8d689556-c6d317f86529cdc1")
    monkeypatch.setattr(checkpoints, "console", lambda: Console(width=80))
    assert attempt in run_checkpoint("list", place)[1]


def test_prune_with_keep_0_removes_only_unfinished_checkpoints(place: Path) -> None:
    written(open_store(str(place)), 70, "a1")
    code, text = run_checkpoint("prune", place, "--keep", 0)
    assert code == 0 and "removed step-70.partial-a1" in text
    assert "removed step-2" not in text and "removed step-4" not in text


def test_list_cuts_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any width; a long name is folded."""
    attempt = written(open_store(str(place)), 70, "8d689556-c6d317f86529cdc1")
    for width in (130, 80):
        monkeypatch.setattr(checkpoints, "console", lambda width=width: Console(width=width))
        table = run_checkpoint("list", place)[1].partition("by manifests")[0]
        cells = [line.split("│")[1].strip() for line in table.splitlines() if "│" in line]
        assert attempt in "".join(cells) and "…" not in table


def test_verify_reads_all_checkpoints_and_fails_on_a_damaged_one(place: Path) -> None:
    code, text = run_checkpoint("verify", place)
    assert code == 1
    assert "step-2: whole, 8 files" in text and "DAMAGED: step-6/g0r1.json" in text
    assert run_checkpoint("verify", place, "--step", 4)[0] == 0
    assert run_checkpoint("verify", place, "--step", 5)[0] == 2  # this step does not exist
    assert run_checkpoint("verify", place / "nothing")[0] == 2  # nor does this directory
    code, text = run_checkpoint("verify", place / "step-2" / "manifest.json")
    assert code == 2 and "manifest.json is no directory" in text


def test_prune_keeps_whole_checkpoints_and_removes_unfinished_ones(place: Path) -> None:
    code, text = run_checkpoint("prune", place, "--keep", 1)
    assert code == 0 and "removed step-2\nremoved step-7.partial-a1\n" in text
    assert "DAMAGED: step-6/g0r1.json: it has 2 bytes" in text
    assert "nothing to remove\n" in run_checkpoint("prune", place, "--keep", 1)[1]
    assert open_store(str(place)).directories() == ["step-4", "step-6"]


def test_prune_never_removes_the_newest_that_is_whole(place: Path) -> None:
    """A newer one is complete by its manifest, but damaged."""
    file = place / "step-6" / "g0r1.json"
    shutil.copy(place / "step-4" / "g0r1.json", file)
    code, text = run_checkpoint("prune", place, "--keep", 1)
    assert code == 0 and "DAMAGED: step-6/g0r1.json: its SHA-256" in text
    assert "the newest that is whole is step-4; it stays" in text
    assert open_store(str(place)).directories() == ["step-4", "step-6"]
    (place / "step-4" / "g0r1.json").unlink()
    assert "none is whole; all that have been published stay" in run_checkpoint("prune", place)[1]
    assert open_store(str(place)).directories() == ["step-4", "step-6"]


def test_prune_removes_unfinished_checkpoints_without_a_whole_one(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    left = written(store, 7), partial_name(3, f"{REMOVED}77")
    (tmp_path / left[1]).mkdir()
    assert run_checkpoint("prune", tmp_path) == (0, f"removed {left[1]}\nremoved {left[0]}\n")
    assert store.directories() == []


def test_prune_keeps_attempts_that_a_job_may_be_writing(place: Path) -> None:
    """A job that resumed from an older checkpoint is at an earlier step than the newest.

    This also holds for a writer that does not hold the place.
    """
    store = open_store(str(place))
    attempt = written(store, 3)
    for working in (store.hold(), store.at_work()):
        with working:
            code, text = run_checkpoint("prune", place, "--keep", 1)
        assert code == 0 and f"may need: {attempt}, step-7.partial-a1" in text
        assert {attempt, "step-7.partial-a1"} <= set(store.directories())
    text = run_checkpoint("prune", place, "--keep", 1)[1]
    assert f"removed {attempt}\nremoved step-7.partial-a1\n" in text


def test_prune_keeps_withdrawn_checkpoints_ahead_of_the_job(tmp_path: Path) -> None:
    found = published(open_store(str(tmp_path)), 4, 8)
    directory = written(found.store, 6)
    found.publish(directory, manifest_of(found.store, directory, "a1", 6))
    assert run_checkpoint("prune", tmp_path) == (0, "nothing to remove\n")
    assert partial_name(8, "given-up") in found.store.directories()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--checkpoint", "{place}"], "go on from them by --resume"),
        (["--resume", "--memory", "off"], "--resume needs --checkpoint"),
        (["--checkpoint", "{place}", "--every", "soon"], "give a number of steps, such as 100"),
        (["--checkpoint", "{place}/step-2/manifest.json/x"], "give a directory that this user may"),
        (["--checkpoint", "{place}/step-2/manifest.json"], "is a file, and checkpoints are direct"),
        (["--checkpoint", "nosuch://x"], "checkpoints cannot be kept at nosuch://x"),
    ],
)
def test_run_refuses_bad_checkpoint_options_before_starting_processes(
    options: list[str], expected: str, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("")
    traces = tmp_path / "traces"
    given = [option.format(place=place) for option in options]
    command = ["run", "--trace-dir", str(traces), *given, str(tmp_path / "script.py")]
    found = ended.invoke(app, command)
    assert found.exit_code == 2
    assert expected in found.output
    assert {path.name for path in traces.glob("*")} <= {".job.lock"}

"""Tests of finding a job by its trace directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fft.cli import app
from fft.cli.run import _announce
from fft.operate.client import OperatorError
from fft.operate.job_file import NAME, JobFile, find_job, refuse_ended, split_folder

SETTINGS = {"FFT_BUS": "tcp://127.0.0.1:1/job", "FFT_TOKEN_FILE": "t/job.token"}


def started(folder: Path) -> JobFile:
    folder.mkdir(parents=True, exist_ok=True)
    made = JobFile.of(folder, SETTINGS)
    made.write()
    return made


def test_directory_names_bus_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started(tmp_path / "t")
    env = {"FFT_BUS": "tcp://other:1/x", "FFT_TOKEN": "secret"}
    url, job = find_job(None, Path("t"), env)
    assert (url, job is not None) == (SETTINGS["FFT_BUS"], True)
    assert env["FFT_TOKEN_FILE"] == str(tmp_path / "t" / "job.token") and "FFT_TOKEN" not in env
    assert find_job("t", None, {})[0] == url, "--bus may be a directory"
    assert find_job(None, None, {"FFT_BUS": "tcp://other:1/x"}) == ("tcp://other:1/x", None)


def test_newest_run_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OperatorError, match="no bus"):
        find_job(None, None, {})
    started(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "a" / "g0r0i1.jsonl").touch()
    assert find_job(None, None, {})[0] == SETTINGS["FFT_BUS"]


def test_directory_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=f"has no {NAME}"):
        find_job(None, tmp_path, {})


def test_job_that_has_ended_receives_no_request(tmp_path: Path) -> None:
    job = started(tmp_path)
    refuse_ended(job)
    assert job.reread_how_it_ended() is None, "this process runs it"
    job.note_end("complete, at step 7 (exit status 0)")
    assert "has ended: complete, at step 7" in str(job.reread_how_it_ended())
    cli = CliRunner(env={"FFT_TOKEN_FILE": None})  # restored afterwards; the commands set it
    result = cli.invoke(app, ["drain", "1", str(tmp_path)])
    assert result.exit_code == 2
    result = cli.invoke(app, ["watch", str(tmp_path)])
    assert result.exit_code == 0 and f"fft report {tmp_path}" in result.stdout


def test_host_that_joins_renews_the_file_only_for_a_new_bus(tmp_path: Path) -> None:
    started(tmp_path).note_end("drained before its end")
    _announce(tmp_path, SETTINGS, serves=False)
    assert (JobFile.read(tmp_path) or started(tmp_path)).ended, "another host has written it"
    _announce(tmp_path, {"FFT_BUS": "tcp://127.0.0.1:2/job"}, serves=False)
    found = JobFile.read(tmp_path)
    assert found is not None
    assert (found.settings["FFT_BUS"], found.ended) == ("tcp://127.0.0.1:2/job", "")
    assert found.pid == 0, "the job may go on without this `fft run`"
    assert found.how_it_ended() is None


def test_killed_supervisor_is_reported(tmp_path: Path) -> None:
    started(tmp_path)
    told = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps({**told, "pid": 2**22 + 1}))
    job = JobFile.read(tmp_path)
    assert job is not None and "was killed" in str(job.how_it_ended())


def test_last_argument_may_be_the_directory(tmp_path: Path) -> None:
    started(tmp_path)
    assert split_folder(["0", "1", str(tmp_path)]) == (["0", "1"], tmp_path)
    assert split_folder(["0", "1"]) == (["0", "1"], None)

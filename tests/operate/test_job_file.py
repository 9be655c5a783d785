"""Tests of finding a job by its trace directory."""

from __future__ import annotations

import json
import os
import stat
from contextlib import closing
from pathlib import Path

import pytest
from forked_run import running
from typer.testing import CliRunner

from fft.bus.natsserver import NatsServers
from fft.bus.token import JobToken
from fft.cli import app
from fft.cli.run import _announce
from fft.operate.client import OperatorError
from fft.operate.job_file import NAME, JobFile, find_job, refuse_ended, split_folder
from fft.operate.job_view import JobModel
from fft.operate.web import WebView

SETTINGS = {"FFT_BUS": "tcp://127.0.0.1:1/job", "FFT_TOKEN_FILE": "t/job.token"}

SCRIPT = """
import os, pathlib, signal, torch, fft
died = pathlib.Path(os.environ["DIED"])
is_second = died.exists()
manager = fft.ManagerFFT(min_replica_size=1)
model = torch.nn.Linear(2, 1)
manager.register(model, torch.optim.SGD(model.parameters()))
manager.sync_gradients(model)
loader = fft.CursorLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=1)
for txn in manager.transactions(loader, max_steps=100_000):
    with txn:
        if os.environ["REPLICA_GROUP_ID"] == "1" and is_second:
            manager.stop()
        elif os.environ["REPLICA_GROUP_ID"] == "1" and txn.step >= 2:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model(txn.batch[0]).sum().backward()
"""


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


@pytest.mark.multiprocess
def test_password_of_the_bus_is_readable_only_for_the_owner(tmp_path: Path) -> None:
    """A page, the output and the files of a real job name its bus without the password."""
    settings = 'authorization { user: me, password: "p-geheim" }'
    traces, script = tmp_path / "traces", tmp_path / "script.py"
    script.write_text(SCRIPT)
    with NatsServers(job="mine", settings=settings) as servers:
        url = servers.url.replace("nats://", "nats://me:p-geheim@")
        env = {"FFT_BUS": url, "FFT_TOKEN": JobToken.fresh().text()}
        env["DIED"] = str(tmp_path / "died")
        arguments = ("run", "--join", "--groups", "2", "--trace-dir", str(traces), str(script))
        with running(*arguments, folder=tmp_path, env=env) as run:
            assert run.wait(60) == 0, run.tail()
            output = run.tail()
    assert "FFT_BUS=nats://me:***@127.0.0.1:" in output and "p-geheim" not in output
    logs = "".join(log.read_text() for log in (traces / "logs").iterdir())
    assert "cannot determine" not in logs, "the restarted rank opens the bus a second time"
    named = [f for f in traces.rglob("*") if f.is_file() and b"p-geheim" in f.read_bytes()]
    assert named == [traces / NAME], "`fft watch` needs it"
    assert stat.S_IMODE(named[0].stat().st_mode) == 0o600
    with closing(WebView("0", find_job(None, traces, {})[0], JobToken.fresh())) as view:
        view.state(JobModel(), 0.0)
        assert json.loads(view._server.state)["url"].startswith("nats://me:***@127.0.0.1:")


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    started(tmp_path)
    os.chown(tmp_path / NAME, 65534, -1)
    with pytest.raises(OperatorError, match=f"{NAME} belongs to the user with id 65534"):
        find_job(None, tmp_path, {})
    assert find_job(SETTINGS["FFT_BUS"], None, {}) == (SETTINGS["FFT_BUS"], None)


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
    content = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps({**content, "pid": 2**22 + 1}))
    job = JobFile.read(tmp_path)
    assert job is not None and "was killed" in str(job.how_it_ended())


def test_last_argument_may_be_the_directory(tmp_path: Path) -> None:
    started(tmp_path)
    assert split_folder(["0", "1", str(tmp_path)]) == (["0", "1"], tmp_path)
    assert split_folder(["0", "1"]) == (["0", "1"], None)

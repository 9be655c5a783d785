"""Tests of the ``fft`` command as a user runs it: real processes, exit codes, one line per
error."""

from __future__ import annotations

import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import forked_run
import psutil
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from fft.bus import open_bus, serve_tcp
from fft.bus.token import JobToken
from fft.cli import app
from fft.cli.run import own_folder

FFT = [sys.executable, "-m", "fft.cli"]
WAIT_S = 60.0
SAID = '{"type": "drain", "groups": ["1"], "by": "me"}'

CHILD = """
import os, signal, socket, sys
stage = socket.socket(socket.AF_UNIX)
stage.connect(os.environ["STAGE"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
stage.sendall(f"{os.getpid()} {os.environ['FFT_FAULTS']}\\n".encode())
stage.recv(1)
"""


def fft(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, arguments)


def forked(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process with torch preloaded; its ranks are started as new processes."""
    return forked_run.fft(*arguments, folder=folder, within=WAIT_S, env=env, new_ranks=True)


@contextmanager
def started(*arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*FFT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=WAIT_S)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], WAIT_S)
    assert readable
    return process.stdout.readline()


def test_help_is_there_without_torch() -> None:
    shown = subprocess.run([*FFT, "--help"], capture_output=True, text=True, timeout=WAIT_S)
    assert "serve" in shown.stdout
    code = "import sys, fft.cli; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_S).returncode == 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_serve_prints_one_line_serves_and_ends(number: int) -> None:
    with started("serve", "--lighthouse", "--job", "mine") as process:
        line = first_line(process)
        found = re.fullmatch(
            r"TORCHFT_LIGHTHOUSE=(http://127\.0\.0\.1:\d+) FFT_BUS=(tcp://127\.0\.0\.1:\d+/mine) "
            r"FFT_TOKEN_FILE=(/\S+)\n",
            line,
        )
        assert found, line
        token = Path(found[3])
        assert JobToken.from_file(token).text() == token.read_text().strip()
        with open_bus(found[2]) as bus:
            assert bus.next_number("n") == 1
        lighthouse = psutil.Process(process.pid).net_connections("tcp")
        port = int(found[1].rpartition(":")[2])
        assert any(at.status == "LISTEN" and at.laddr.port == port for at in lighthouse)
        process.send_signal(number)
        rest, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, errors
        assert rest == ""
    assert not token.parent.exists()


@pytest.mark.long
def test_serve_without_a_lighthouse_announces_none() -> None:
    with started("serve", "--job", "mine") as process:
        line = first_line(process)
        assert re.fullmatch(r"FFT_BUS=tcp://\S+:\d+/mine FFT_TOKEN_FILE=/\S+\n", line), line
        listening = [
            at for at in psutil.Process(process.pid).net_connections("tcp") if at.status == "LISTEN"
        ]
        assert len({at.laddr.port for at in listening}) == 1, "the bus's"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_run_passes_the_lighthouse_address_to_its_groups(tmp_path: Path) -> None:
    """The lighthouse is the command's own, none, or one that existed before."""
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ.get('TORCHFT_LIGHTHOUSE'))\n")
    found = {}
    for name, options, outer in (
        ("own", ("--lighthouse",), "http://other:1"),
        ("none", (), ""),
        ("given", (), "http://other:1"),
    ):
        traces = tmp_path / name
        command = ("run", *options, "--trace-dir", str(traces), str(script))
        done = forked(tmp_path, *command, TORCHFT_LIGHTHOUSE=outer)
        assert done.returncode == 0, done.stderr
        (log,) = (traces / "logs").iterdir()
        found[name] = log.read_text().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", found["own"])
    assert found["none"] == "" and found["given"] == "http://other:1"


@pytest.mark.long
def test_serve_starts_a_nats_server_and_ends_it() -> None:
    with started("serve", "--bus", "nats", "--job", "mine") as process:
        found = re.fullmatch(
            r"FFT_BUS=(nats://\S+/mine) FFT_TOKEN_FILE=(\S+)\n",
            first_line(process),
        )
        assert found
        children = psutil.Process(process.pid).children()
        (server,) = [child for child in children if "nats" in child.name()]
        with open_bus(found[1], WAIT_S, token=JobToken.from_file(Path(found[2]))) as bus:
            assert bus.next_number("n") == 1
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, errors
        assert rest == ""
        assert not server.is_running()


def test_without_a_nats_server_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fft.bus.natsserver import find_server
    from fft.errors import BusError

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BusError, match=r"fft-torch\[nats\]"):
        find_server()


THREE = "198.51.100.1,198.51.100.2,198.51.100.3"
"""Addresses of other hosts."""


def test_host_without_a_server_learns_the_bus_of_the_others(tmp_path: Path) -> None:
    file = str(tmp_path / "token")
    shown = [
        fft("serve", "--hosts", hosts, "--token-file", file, *more)
        for hosts in (THREE, f"{THREE},198.51.100.4")
        for more in ((), ("--port", "29500", "--job", "mine"))
    ]
    assert all(each.exit_code == 0 and each.stderr == "" for each in shown)
    by_default, chosen, *of_four = (each.stdout for each in shown)
    assert of_four == [by_default, chosen], "three of four hosts have a server"
    places = ",".join(f"198.51.100.{n}:29500" for n in (1, 2, 3))
    assert chosen == f"FFT_BUS=nats://job-token@{places}/mine FFT_TOKEN_FILE={file}\n"
    assert re.search(
        r"@198\.51\.100\.1:(2\d{4}),198\.51\.100\.2:\1,198\.51\.100\.3:\1/job-", by_default
    )


@pytest.mark.parametrize(
    ("hosts", "has_nats", "fix"),
    [
        (
            "198.51.100.1,198.51.100.2",
            True,
            "A job on 3 hosts or more has NATS servers on 3 of them",
        ),
        (THREE, False, "pip install 'fft-torch[nats]' on all hosts"),
    ],
)
def test_bus_on_one_of_several_hosts_says_what_its_loss_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, has_nats: bool, fix: str
) -> None:
    if not has_nats:
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    shown = fft("serve", "--hosts", hosts, "--token-file", str(tmp_path / "token"))
    assert re.match(r"FFT_BUS=tcp://198\.51\.100\.1:\d+/job-\w+ ", shown.stdout)
    assert "if it is lost, the job stops, and resumes from the newest copy" in shown.stderr
    assert fix in shown.stderr


def test_serve_on_hosts_refuses_what_cannot_work(tmp_path: Path) -> None:
    with_token = ("--token-file", str(tmp_path / "token"))
    for options, reason in (
        (("127.0.0.1,127.0.0.2,127.0.0.3", *with_token), "choose one of them with --host"),
        (("a,b,a", *with_token), "expected different hosts"),
        (("a,b", "--bus", "nats", *with_token), "expected at least 3 hosts"),
        ((THREE, "--host", "198.51.100.9", *with_token), "expected one of --hosts"),
        ((THREE, "--lighthouse", *with_token), "`fft serve --lighthouse`"),
        ((THREE,), "add --token-file FILE"),
    ):
        shown = fft("serve", "--hosts", *options)
        assert shown.exit_code == 2 and reason in shown.stderr, shown.output


def test_one_host_of_several_serves_the_bus_at_its_address(tmp_path: Path) -> None:
    command = ["serve", "--token-file", str(tmp_path / "token"), "--hosts", "127.0.0.2,127.0.0.3"]
    with started(*command, "--host", "127.0.0.2") as process:
        url = first_line(process).split()[0].removeprefix("FFT_BUS=")
        assert url.startswith("tcp://127.0.0.2:")
        with open_bus(url, WAIT_S) as bus:
            assert bus.next_number("n") == 1
        other = fft(*command, "--host", "127.0.0.3")
        assert other.exit_code == 0 and f"FFT_BUS={url} " in other.stdout


def test_hosts_with_one_token_form_one_bus_that_survives_one_of_them(tmp_path: Path) -> None:
    """Each host creates the token file unless another has, so they share it on a common disk. A
    server that is started again has an empty store."""
    hosts = [f"127.0.0.{n}" for n in (2, 3, 4)]
    command = ["serve", "--token-file", str(tmp_path / "token"), "--hosts", ",".join(hosts)]
    with ExitStack() as stack:
        made = [stack.enter_context(started(*command, "--host", host)) for host in hosts]
        (line,) = {first_line(process) for process in made}
        url = line.split()[0].removeprefix("FFT_BUS=")
        with open_bus(url, WAIT_S, token=JobToken.from_file(tmp_path / "token")) as bus:
            assert bus.next_number("n") == 1
            made[0].send_signal(signal.SIGTERM)  # a leader that ends hands over
            _, errors = made[0].communicate(timeout=WAIT_S)
            assert made[0].returncode == 0, errors
            assert bus.next_number("n") == 2
            again = stack.enter_context(started(*command, "--host", hosts[0]))
            assert first_line(again) == line
            assert bus.next_number("n") == 3


def test_run_serves_nats_to_its_groups(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os; from fft.bus import open_bus; from fft.bus.token import JobToken\n"
        "with open_bus(os.environ['FFT_BUS'], 60.0, token=JobToken.from_env()) as bus:\n"
        "    print(bus.url, bus.next_number('n'))\n"
    )
    done = forked(tmp_path, "run", "--bus", "nats", "--trace-dir", str(tmp_path), str(script))
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"nats://job-token@127\.0\.0\.1:\d+/\S+ 1\n", log.read_text())


def test_a_port_in_use_is_named_with_the_fix(tmp_path: Path) -> None:
    with started("serve") as process:
        port = first_line(process).rpartition(":")[2].partition("/")[0]
        second = forked(tmp_path, "serve", "--port", port)
        lighthouse = forked(tmp_path, "serve", "--lighthouse-port", port)
    for failed in (second, lighthouse):
        last = failed.stderr.splitlines()[-1]
        assert failed.returncode == 2
        assert f"127.0.0.1:{port}" in last and "choose another" in last
        assert "Traceback" not in failed.stderr and failed.stdout == ""


class Children:
    """The server that the children of a run connect to; a connection ends when its child does."""

    def __init__(self, directory: str) -> None:
        import socket

        self.script = Path(directory, "child.py")
        self.script.write_text(CHILD)
        self.path = os.path.join(directory, "stage")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._listener.settimeout(WAIT_S)
        self.connections: list[socket.socket] = []

    def enter(self) -> list[str]:
        connection, _ = self._listener.accept()
        connection.settimeout(WAIT_S)
        self.connections.append(connection)
        return connection.recv(4096).decode().split()

    def all_gone(self) -> bool:
        return all(connection.recv(1) == b"" for connection in self.connections)

    def nobody(self) -> bool:
        self._listener.settimeout(0)
        try:
            self._listener.accept()
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self._listener.close()


@pytest.fixture
def children() -> Iterator[Children]:
    with tempfile.TemporaryDirectory() as directory:
        made = Children(directory)
        yield made
        made.close()


def plan(tmp_path: Path, text: str = "faults: []") -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return str(path)


def run_arguments(children: Children, tmp_path: Path, faults: str) -> list[str]:
    size = ["--groups", "2", "--ranks", "2", "--faults", faults]
    return ["run", *size, "--trace-dir", str(tmp_path / "run"), str(children.script)]


def test_a_killed_supervisor_leaves_no_child(children: Children, tmp_path: Path) -> None:
    faults = plan(tmp_path)
    with started(*run_arguments(children, tmp_path, faults), STAGE=children.path) as process:
        pids = [children.enter() for _ in range(4)]
        assert {reported for _, reported in pids} == {faults}
        process.kill()
        assert children.all_gone()


@pytest.mark.long
def test_sigterm_drains_the_children_and_ends_well(children: Children, tmp_path: Path) -> None:
    arguments = run_arguments(children, tmp_path, plan(tmp_path))
    with started(*arguments, STAGE=children.path) as process:
        for _ in range(4):
            children.enter()
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 75, errors
        assert out.endswith(f"fft audit {tmp_path / 'run'}\n")
        assert children.all_gone()


def test_a_bad_plan_is_refused_before_anything_starts(children: Children, tmp_path: Path) -> None:
    faults = plan(tmp_path, "faults: [{name: a, kind: drain, step: 1, group: 5}]")
    with started(*run_arguments(children, tmp_path, faults), STAGE=children.path) as process:
        out, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert errors == f"fft: {faults}: faults[0].group: no group '5' here; the groups are 0, 1\n"
    assert out == "" and not (tmp_path / "run").exists()
    assert children.nobody()


def test_a_failing_script_is_named_with_its_log(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('no data')")
    failed = forked(
        tmp_path,
        "run",
        "--max-restarts",
        "0",
        "--no-progress",
        "--trace-dir",
        str(tmp_path / "t"),
        str(script),
    )
    assert failed.returncode == 1
    assert "group 0 rank 0 ended with ValueError at" in failed.stderr
    assert failed.stderr.count("ValueError: no data") == 1
    assert str(tmp_path / "t/logs/g0r0-1.log") in failed.stderr


def test_options_after_the_script_are_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "shows.py"
    script.write_text("import sys; print(sys.argv[1:])")
    command = ("run", "--trace-dir", str(tmp_path / "t"), str(script), "--steps", "3", "--help")
    done = forked(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t/logs/g0r0-1.log").read_text() == "['--steps', '3', '--help']\n"


def test_main_thread_machine_is_checked_and_drawn_like_the_engine() -> None:
    reported = fft("dev", "spec", "main_thread")
    assert reported.exit_code == 0, reported.stderr
    assert "main_thread: valid; 28 rows; 12 states, named IDLE.ready" in reported.stdout
    drawn = fft("dev", "graph", "main_thread")
    assert drawn.stdout.startswith("stateDiagram-v2\n    [*] --> IDLE_ready\n")
    assert "WAITING --> APPLYING: apply" in drawn.stdout
    refused = fft("dev", "check", "main_thread")
    assert refused.exit_code != 0
    assert "machine: Input should be 'engine'" in refused.stderr


def test_a_spec_that_is_not_there_is_one_line() -> None:
    failed = fft("dev", "spec", "no-such-spec")
    assert failed.exit_code == 2
    assert failed.stderr.startswith("fft: ") and failed.stderr.count("\n") == 1, failed.stderr


def test_config_shows_each_timeout_and_refuses_invalid_combinations() -> None:
    shown = fft("config", "--set", "timeout=600")
    assert shown.exit_code == 0
    rows = {line.split()[1]: line for line in shown.stdout.splitlines() if line.startswith("│")}
    assert "600" in rows["vote_window"] and "raised to fit" in rows["ready_window"]
    assert "bus_failover" not in rows
    assert "bus_failover" in fft("config", "--bus", "nats://").stdout
    refused = fft("config", "--set", "bus_limit=3", "--set", "bus_retry=1")
    assert refused.exit_code == 2 and "these would work: bus_retry=1" in refused.stderr


# --- operators -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("garbage://x", "bus URL 'garbage://x': write memory://name"),
        ("nats://127.0.0.1:1/j", "nats-py, which is not installed: pip install 'fft-torch[nats]'"),
    ],
)
def test_watch_ends_at_a_bus_that_cannot_come(url: str, text: str) -> None:
    code = "import sys; sys.modules['nats'] = None; from fft.cli import app; "
    code += f"app({['watch', '--bus', url]})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and text in done.stderr, done.stdout + done.stderr
    assert "trying again" not in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["drain", "1"], ["evict", "1"], ["watch"], ["dev", "inject", "kill"], ["dev", "say", SAID]],
)
def test_operator_command_without_a_bus_names_the_options(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FFT_BUS", raising=False)
    monkeypatch.chdir(tmp_path)  # which has no run
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.output.startswith("fft: no bus: pass --bus, or set FFT_BUS")
    assert done.output.count("\n") == 1


def test_dev_say_reads_arguments_files_and_standard_input(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    path = tmp_path / "message.json"
    path.write_text(SAID)
    with open_bus(url) as bus:
        bus.subscribe(received.put, lambda error: None)
        run = CliRunner()
        for source, given in ((SAID, None), (str(path), None), ("-", SAID)):
            done = run.invoke(app, ["dev", "say", source, "--bus", url], input=given)
            assert done.exit_code == 0, done.output
            assert json.loads(received.get(timeout=WAIT_S))["groups"] == ["1"]
        assert run.invoke(app, ["dev", "say", "{no", "--raw", "--bus", url]).exit_code == 0
        assert received.get(timeout=WAIT_S) == b"{no"
        refused = run.invoke(app, ["dev", "say", "{no", "--bus", url])
        assert refused.exit_code == 2 and refused.output.startswith("fft: message: not JSON")
        missing = run.invoke(app, ["dev", "say", "nowhere.json", "--bus", url])
        assert "neither JSON nor a file" in missing.output
        assert received.empty()
    schema = json.loads(run.invoke(app, ["dev", "say", "--schema"]).output)
    assert {"Death", "Drain", "Evict", "Inject"} <= set(schema["$defs"])


def test_watch_ends_cleanly_on_an_interrupt() -> None:
    with (
        serve_tcp() as server,
        started("watch", "--json", "--bus", server.url) as process,
    ):
        assert json.loads(first_line(process))["event"] == "watching"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out, err) == (0, "", "")


def test_runs_that_begin_in_the_same_second_have_a_folder_each(tmp_path: Path) -> None:
    made = [own_folder(tmp_path / "runs", "now") for _ in range(3)]
    assert [folder.name for folder in made] == ["now", "now-2", "now-3"]
    assert all(folder.is_dir() for folder in made)


def test_run_takes_the_names_of_torchrun() -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    context = command.make_context("run", ["--nnodes", "3", "--nproc-per-node", "2", "train.py"])
    assert (context.params["groups"], context.params["ranks"]) == (3, 2)


def test_help_of_run_is_grouped_and_fits_a_screen() -> None:
    text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "80"}).stdout
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 60
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        *("Options:", "Injected faults:", "Output:", "Recovery:", "Several machines:"),
        "Checkpoints:",
    ]
    assert "--[no-]progress" in text and "--every INTERVAL" in text and "[300s]" in text

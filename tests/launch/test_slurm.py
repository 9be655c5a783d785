"""Tests of jobs on SLURM: the batch scripts, and jobs on a real cluster of fake nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forked_run import fft
from slurm_cluster import SlurmCluster, why_missing
from supervisor_stage import Job, Stage
from typer.testing import CliRunner
from waiting import wait_until

from fft.bus import BusUnreachable, open_bus
from fft.cli import app
from fft.errors import ConfigError
from fft.launch import bad_hosts
from fft.launch.exit_status import ExitStatus
from fft.launch.outcome import Outcome, until_ended
from fft.launch.placement import Part, Placement
from fft.launch.slurm import SlurmJob
from fft.launch.supervisor import Joined, RunConfig, Supervisor
from fft.launch.supervisor.claims import Claims
from fft.messages.commands import Holder, fresh_id
from fft.messages.fault_plans import FaultPlan
from fft.trace.resumed import audit_job
from fft.util import die_with_parent

LIMIT_S = 240.0
SCRIPT = """
import sys, time, torch, torchft, fft
torch.set_num_threads(1)
steps, pause, at_least = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
manager = fft.ManagerFFT(
    pg=torchft.ProcessGroupGloo(), load_state_dict=None, state_dict=None,
    min_replica_size=at_least,
)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
manager.register(model, torch.optim.AdamW(model.parameters()))
manager.sync_gradients(model)
dataset = torch.utils.data.TensorDataset(torch.randn(4096, 4))
for txn in manager.transactions(fft.CursorLoader(dataset, batch_size=2), max_steps=steps):
    with txn:
        model(txn.batch[0]).square().sum().backward()
        time.sleep(pause)
manager.shutdown()
print("bits", manager.current_step(), [v.hex() for v in model.weight.flatten().tolist()])
"""


# --- placement ---


def test_placement_gives_a_part_to_each_group_and_each_spare_node() -> None:
    found = list(Placement(groups=4, ranks=3, nodes=2, spare_nodes=1).parts())
    assert found == [
        Part("group-0", 0, 0, 1, 0),
        Part("group-1", 0, 1, 1, 0),
        Part("group-2", 1, 2, 1, 0),
        Part("group-3", 1, 3, 1, 0),
        Part("spare-0", 2, 0, 0, 6),
    ]


def test_placement_gives_a_node_to_each_part_of_a_group() -> None:
    place = Placement.of(groups=2, ranks=4, nodes=None, spares=1, per_host=2)
    assert place.nodes == 4 and place.common_options()[1:5] == (
        "--ranks",
        "4",
        "--ranks-per-host",
        "2",
    )
    assert list(place.parts()) == [
        Part("group-0-part-0", 0, 0, 1, 0),
        Part("group-0-part-1", 1, 0, 1, 0),
        Part("group-1-part-0", 2, 1, 1, 0),
        Part("group-1-part-1", 3, 1, 1, 0),
        Part("spare-0", 4, 0, 0, 2),
    ]


@pytest.mark.parametrize(
    ("nodes", "per_host", "why"),
    [
        (None, 3, "--ranks-per-host 3: expected a divisor of --ranks 4"),
        (2, 2, "--nodes 2: expected 4"),
    ],
)
def test_placement_refuses_parts_that_do_not_fit(
    nodes: int | None, per_host: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        Placement.of(2, 4, nodes, 0, per_host)


@pytest.mark.parametrize(("groups", "nodes"), [(3, 2), (2, 4), (2, 0)])
def test_placement_refuses_groups_that_do_not_divide_among_the_nodes(
    groups: int, nodes: int
) -> None:
    with pytest.raises(ConfigError, match=f"--nodes {nodes}: expected a divisor of --groups"):
        Placement(groups, 1, nodes)


# --- batch scripts ---


def a_job(groups: int = 2, nodes: int = 2, **how: object) -> SlurmJob:
    return SlurmJob(
        placement=Placement(groups, 2, nodes, 1),
        folder=Path("/shared/a job"),
        script=["train.py", "--name", "it's", "@GROUPS@"],
        checkpoint=["--checkpoint", "/shared/c", "--every", "10m"],
        **how,
    )


def scripts() -> list[str]:
    job = a_job()
    return [job.batch_script(), job.bus_script(), job.group_script()]


@pytest.mark.parametrize("number", range(3))
def test_batch_script_is_valid_and_sets_its_traps_before_anything_else(number: int) -> None:
    text = scripts()[number]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[0] == "stop= child="
    assert lines[1].startswith("trap ") and lines[1].endswith(" USR1")
    assert lines[2].startswith("trap ") and lines[2].endswith(" TERM")


@pytest.mark.parametrize(
    ("signals", "stop"), [("USR1", "requeue"), ("TERM", "end"), ("USR1 TERM", "requeue")]
)
def test_batch_script_remembers_its_terminating_signal(signals: str, stop: str) -> None:
    head = scripts()[0].partition("fft=(")[0]
    kills = "\n".join(f"kill -{each} $$" for each in signals.split())
    done = subprocess.run(
        ["bash"], input=f'{head}{kills}\necho "$stop"', text=True, capture_output=True, check=True
    )
    assert done.stdout.strip() == stop


@pytest.mark.parametrize("number", range(3))
def test_warning_reaches_only_the_batch_shell(number: int) -> None:
    """SLURM would otherwise send it to all processes of all steps, before they handle it."""
    (line,) = re.findall("^#SBATCH --signal=(.*)$", scripts()[number], re.M)
    assert line == "B:USR1@90"


def test_drain_signals_the_steps_and_not_the_bus() -> None:
    """The bus is a process of the batch shell, which plain ``scancel --signal`` leaves out."""
    text = scripts()[0]
    assert 'scancel --quiet --signal=USR1 "$SLURM_JOB_ID"' in text
    assert "trap '' TERM USR1; exec" in text


def test_step_warning_ends_fft_run_but_not_its_shell() -> None:
    """The shell waits for `fft run`, and hands on its exit status."""
    text = scripts()[0]
    part = re.search("^part='.*?'$", text, re.M | re.S)
    assert part is not None
    child = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
    child += "import os; os.kill(os.getppid(), 10); os.kill(os.getpid(), 10); signal.pause()"
    command = f'{part[0]}\nbash -c "$part" name {sys.executable} -c "$CHILD"; echo $?'
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "CHILD": child}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "75", done.stderr


def test_options_of_the_user_come_last_because_later_ones_override() -> None:
    lines = a_job(sbatch=["--time=5", "--no-requeue"]).batch_script().splitlines()
    assert lines[lines.index("#SBATCH --no-requeue") + 1].startswith("# ")
    assert lines.index("#SBATCH --requeue") < lines.index("#SBATCH --no-requeue")


def test_groups_share_a_node_in_equal_parts() -> None:
    text = a_job(groups=4).batch_script()
    assert "#SBATCH --ntasks-per-node=2" in text and "SLURM_CPUS_ON_NODE / 2" in text
    assert "step group-3 1 --first-group 3 --groups 1" in text
    assert "step spare-0 2 --first-group 0 --groups 0 --spares 4" in text
    assert "--exact" not in a_job().batch_script(), "a step alone on a node has all of it"


def test_arguments_reach_the_script_unchanged() -> None:
    text = a_job().batch_script()
    (line,) = [line for line in text.splitlines() if line.startswith("script=")]
    command = f'{line}\nprintf "%s\\n" "${{script[@]}}"'
    done = subprocess.run(["bash"], input=command, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines() == ["train.py", "--name", "it's", "@GROUPS@"]


def test_each_start_of_the_bus_has_a_new_name() -> None:
    """The traces of a start go to the folder of its name on the bus (`fft.trace.starts`)."""
    for text in scripts()[:2]:
        (command,) = re.findall(r"}\" serve .*\n.*", text)
        assert '--job "slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"' in command


def test_tasks_of_an_array_are_the_parts_of_the_groups() -> None:
    job = replace(a_job(), placement=Placement.of(2, 4, None, 0, 2))
    text = job.group_script()
    assert "#SBATCH --array=0-3\n" in text
    line = re.search(r"--first-group (\S+ / 2\)\)\")", text)
    assert line is not None
    command = f"for SLURM_ARRAY_TASK_ID in 0 1 2 3; do echo {line[1]}; done"
    done = subprocess.run(["bash"], input=command, text=True, capture_output=True, check=True)
    assert done.stdout.split() == ["0", "0", "1", "1"]


def test_task_of_an_array_requeues_itself_and_not_the_whole_array() -> None:
    """The last task of an array has the array's id as its SLURM_JOB_ID."""
    text = scripts()[2]
    (line,) = [line for line in text.splitlines() if line.startswith("id=")]
    env = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1"}
    for given, expected in ((env, "9_1"), ({"SLURM_JOB_ID": "9"}, "9")):
        command = f'{line}\necho "${{id:-$SLURM_JOB_ID}}"'
        done = subprocess.run(
            ["bash"], input=command, env=given, text=True, capture_output=True, check=True
        )
        assert done.stdout.strip() == expected
    assert "job=${id:-$SLURM_JOB_ID}" in text and 'scontrol requeue "$job"' in text


@pytest.mark.parametrize(
    ("bad", "order"),
    [([], ["n1", "n2", "n3", "n4"]), (["n2", "n1"], ["n1", "n3", "n4", "n2"])],
)
def test_bad_hosts_become_the_spare_nodes(tmp_path: Path, bad: list[str], order: list[str]) -> None:
    """The first node stays, because it has the bus."""
    (tmp_path / "traces").mkdir()
    if bad:
        (tmp_path / "traces" / bad_hosts.LIST).write_text("".join(f"{host}\n" for host in bad))
    found = re.search(r"^nodes=\(.*?\)\)$", scripts()[0], re.M | re.S)
    assert found is not None
    command = f'run={tmp_path}\nscontrol() {{ printf "n%s\\n" 1 2 3 4; }}\n'
    command += f'{found[0]}\necho "${{nodes[@]}}"'
    done = subprocess.run(["bash", "-c", command], text=True, capture_output=True, check=True)
    assert done.stdout.split() == order


def test_process_that_ignores_sigterm_still_ends_with_its_shell(tmp_path: Path) -> None:
    """As `fft serve` in a batch script: bash runs it with SIGTERM and SIGINT ignored."""
    child = (
        f"import sys; sys.path.insert(0, {str(Path(die_with_parent.__file__).parent)!r})\n"
        "import os, signal, die_with_parent\n"
        "die_with_parent.end_with_parent([signal.SIGTERM, signal.SIGHUP, signal.SIGINT])\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    (tmp_path / "child.py").write_text(child)
    text = (
        f"exec {{bus}}< <(trap '' TERM USR1; exec {sys.executable} -S {tmp_path}/child.py)\n"
        'read -r pid <&"$bus"; echo "$pid"; sleep 600 & wait'
    )
    with subprocess.Popen(["bash", "-c", text], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        process = psutil.Process(int(shell.stdout.readline()))
        helpers = psutil.Process(shell.pid).children()
        process.send_signal(signal.SIGTERM)
        shell.kill()
        process.wait(10)
        for helper in helpers:
            if helper.is_running():
                helper.kill()


def test_command_prints_the_script_and_submits_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    command = ["launch", "slurm", "--groups", "2", "--spare-nodes", "1", "--print"]
    done = CliRunner().invoke(app, [*command, "--", str(tmp_path / "train.py"), "--lr", "1"])
    assert done.exit_code == 0 and "#SBATCH --nodes=3" in done.stdout
    done = CliRunner().invoke(app, [*command, "--array", "--", str(tmp_path / "train.py")])
    assert done.exit_code == 2


# --- outcome ---


def a_holder(status: int | None, begun: int = 0) -> Holder:
    return Holder(fresh_id(), "box", 7, free=status is not None, begun=begun, status=status)


@pytest.mark.parametrize(
    ("ends", "step", "status"),
    [
        ([0, 0], 9, ExitStatus.COMPLETE),
        ([0, 3], 9, ExitStatus.FEWER_GROUPS),
        ([0, None], 9, ExitStatus.FEWER_GROUPS),
        ([0, 1], 9, ExitStatus.FEWER_GROUPS),
        ([75, 75], 9, ExitStatus.DRAINED),
        ([75, 1], 9, ExitStatus.FAILED),
        ([75, None], 9, ExitStatus.DRAINED),
        ([1, None], 9, ExitStatus.DRAINED),
        ([1, None], 5, ExitStatus.FAILED),
        ([75, 75], 5, ExitStatus.FAILED),
        ([1, 1], 9, ExitStatus.FAILED),
    ],
)
def test_outcome_of_a_job_that_began_at_step_5(
    ends: list[int | None], step: int, status: ExitStatus
) -> None:
    """Lost groups are a reason to start the job again, but only if it has made progress."""
    holders = {str(n): a_holder(end, begun=5) for n, end in enumerate(ends)}
    assert Outcome(holders, step, is_over=False).status == status


def test_outcome_knows_how_each_supervisor_has_ended() -> None:
    with open_bus(f"memory://slurm-{uuid.uuid4().hex}") as bus:
        assert Outcome.read(bus, 2).lost == ["0", "1"]
        first, second = Claims(bus, lambda: None), Claims(bus, lambda: None)
        with closing(first), closing(second):
            first.take(["0"], take_over=False)
            second.take(["1"], take_over=False)
            first.status = 0
            first.close()
            assert Outcome.read(bus, 2).lost == ["1"]
            assert second.statuses("01") == [0, None]
            second.status = 75
        found = until_ended(bus, 2)
    assert found.status == ExitStatus.FEWER_GROUPS
    assert "(group 0: complete, group 1: drained before its end)" in str(found)


def test_wait_for_the_outcome_survives_a_bus_that_is_silent_for_some_time() -> None:
    """As NATS is, until its servers have elected a leader after the loss of another."""
    with open_bus(f"memory://slurm-{uuid.uuid4().hex}") as bus:
        with closing(Claims(bus, lambda: None)) as claims:
            claims.take(["0"], take_over=False)
            claims.status = 0
        read, silent = bus.read, [1, 2]

        def answer(register: str) -> bytes | None:
            if silent:
                raise BusUnreachable(bus.url, f"no answer {silent.pop()}")
            return read(register)

        bus.read = answer  # type: ignore[method-assign]
        assert until_ended(bus, 1).status == ExitStatus.COMPLETE and not silent


def test_outcome_command_distinguishes_running_and_ended_jobs() -> None:
    url = f"memory://slurm-{uuid.uuid4().hex}"
    command = ["launch", "outcome", "--groups", "1", "--bus", url]
    with open_bus(url) as bus, closing(Claims(bus, lambda: None)) as claims:
        claims.take(["0"], take_over=False)
        reported = CliRunner().invoke(app, command).stdout
        assert reported.startswith("the job has not ended, at step 0 (group 0: not ended by its")
        assert "drained" not in reported and "failed" not in reported
        claims.status = 0
        claims.close()
        assert "the job has ended: complete" in CliRunner().invoke(app, command).stdout


def test_host_of_spares_ends_when_all_groups_have_failed(stage: Stage, tmp_path: Path) -> None:
    """No commit ends such a job, so the bus tells only by the claims that it is over."""
    url = f"memory://slurm-{uuid.uuid4().hex}"
    config = RunConfig(
        script=[str(stage.script)], groups=0, ranks=1, spares=1, all_groups=1, trace_dir=tmp_path
    )
    with open_bus(url) as bus, closing(Claims(bus, lambda: None)) as claims:
        claims.take(["0"], take_over=False)
        made = Job(Supervisor(config, FaultPlan(faults=[]), Joined(url)), url, config)
        with closing(made) as job:
            claims.status = 1
            claims.close()
            assert job.verdict().exit_status == ExitStatus.COMPLETE


# --- a real cluster ---


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if (missing := why_missing()) is not None:
        pytest.skip(missing)
    with closing(SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=3)) as made:
        yield made


class Submitted:
    """A job that was submitted by `fft launch slurm`."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *options: str, script: str) -> None:
        folder.mkdir()
        self.cluster, self.folder = cluster, folder
        (folder / "train.py").write_text(SCRIPT)
        command = ["launch", "slurm", "--groups", "2", "--dir", str(folder / "job"), *options]
        done = fft(
            *(*command, "--", str(folder / "train.py"), *script.split()),
            folder=folder,
            env=cluster.env,
            within=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        (words,) = re.findall("SLURM job ([0-9 and]+)", done.stdout)
        self.ids = re.findall("[0-9]+", words)

    def output(self) -> str:
        """Return all output of the job, for messages."""
        return "\n".join(f"== {p}\n{p.read_text()}" for p in sorted(self.folder.rglob("*.out")))

    def wait_for_steps(self, count: int, within: str = "*") -> None:
        """Wait until each group has committed so many steps in traces that match."""

        def have_all() -> bool:
            traces = [p.read_text() for p in self.folder.glob(f"job/traces/{within}.jsonl")]
            return sum(t.count('"note":"consumed"') >= count for t in traces) >= 2

        wait_until(have_all, f"both groups have committed {count} steps", LIMIT_S)

    def end(self) -> None:
        """Wait until the job has left the queue."""
        deadline = time.monotonic() + LIMIT_S
        while any(line.split("_")[0].split()[0] in self.ids for line in self.cluster.queued()):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)

    def state(self) -> str:
        """Return the state of the first SLURM job, such as ``COMPLETED``."""
        text = self.cluster.ask("scontrol", "show", "job", self.ids[0])
        found = re.search("JobState=([A-Z_]+)", text)
        assert found is not None, text
        return found[1]

    def bits(self) -> set[str]:
        """Return the last steps and the weights that the ranks have printed at the end."""
        logs = [p.read_text() for p in self.folder.rglob("logs/*")]
        found = [line for log in logs for line in log.splitlines() if line.startswith("bits")]
        last = max(int(line.split()[1]) for line in found)
        return {line for line in found if line.startswith(f"bits {last} ")}


def test_two_groups_on_two_nodes_train_to_the_end(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Submitted(cluster, tmp_path / "a", script="20 0.01 2")
    job.end()
    assert job.state() == "COMPLETED", job.output()
    assert "the job has ended: complete, at step 20 (group 0: complete" in job.output()
    assert len(job.bits()) == 1
    assert audit_job(job.folder / "job" / "traces").ok
    nodes = cluster.ask("squeue", "--noheader")
    assert nodes == ""


@pytest.mark.long
def test_warning_drains_requeues_and_resumes_with_the_same_bits(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    whole = Submitted(cluster, tmp_path / "whole", script="60 0.01 2")
    whole.end()
    job = Submitted(cluster, tmp_path / "a", "--every", "1000", script="60 0.1 2")
    job.wait_for_steps(5)
    cluster.ask("scancel", "--signal=USR1", "--batch", *job.ids)
    job.end()
    assert job.state() == "COMPLETED", job.output()
    assert "fft: resuming from step" in job.output()
    assert job.bits() == whole.bits(), job.output()
    traces = job.folder / "job" / "traces"
    assert (traces / "start2").is_dir()
    audit = audit_job(traces)
    assert audit.ok and audit.resumed.checks, audit.render()


@pytest.mark.long
def test_requeued_job_gets_no_bad_host(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Submitted(cluster, tmp_path / "a", "--every", "1000", script="60 0.1 2")
    job.wait_for_steps(5)
    bad_hosts.mark(job.folder / "job" / "traces", "node2", "excluded", "its sums were wrong")
    cluster.ask("scancel", "--signal=USR1", "--batch", *job.ids)
    job.end()
    assert job.state() == "COMPLETED", job.output()
    text = cluster.ask("scontrol", "show", "job", job.ids[0])
    assert "ExcNodeList=node2" in text and "Restarts=1" in text, text
    (nodes,) = re.findall(r"^\s+NodeList=(\S+)", text, re.M)
    assert cluster.ask("scontrol", "show", "hostnames", nodes).split() == ["node1", "node3"]
    assert (job.folder / "job" / "traces" / bad_hosts.LIST).read_text() == "node2\n"


@pytest.mark.long
def test_spare_node_takes_over_the_group_of_a_lost_node(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = Submitted(cluster, tmp_path / "a", "--spare-nodes", "1", script="250 0.1 1")
    job.wait_for_steps(5)
    cluster.kill_node("node2")
    try:
        job.end()
    finally:
        cluster.start_node("node2")
    assert job.state() == "COMPLETED", job.output()
    assert "group 1 was taken over: its host was lost" in job.output()
    marks = (job.folder / "job" / "traces" / bad_hosts.MARKS).read_text()
    assert '"host": "node2", "kind": "lost"' in marks
    assert "complete, at step 250 (group 0: complete, group 1: complete)" in job.output()
    assert len(job.bits()) == 1
    audit = audit_job(job.folder / "job" / "traces")
    assert audit.ok, audit.render()


@pytest.mark.long
def test_job_on_three_nodes_survives_the_node_of_its_batch_script(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """NATS serves the bus on all nodes, and the spare node takes the group of the lost one over.
    SLURM keeps the job, which has lost its batch script, until it is cancelled."""
    job = Submitted(cluster, tmp_path / "a", "--spare-nodes", "1", script="250 0.1 1")
    job.wait_for_steps(5)
    cluster.kill_node("node1")
    try:
        ended = "the job has ended: complete, at step 250. Logs:"
        wait_until(lambda: job.output().count(ended) == 2, "both groups have ended", LIMIT_S)
        cluster.ask("scancel", *job.ids)
        job.end()
    finally:
        cluster.start_node("node1")
    assert job.state() == "CANCELLED", job.output()
    assert "group 0 was taken over: its host was lost" in job.output()
    assert "fft: resuming" not in job.output() and len(job.bits()) == 1
    traces = job.folder / "job" / "traces"
    assert not (traces / "start2").exists() and (traces / "g1r0i1.jsonl").exists()
    assert not (traces / "g1r0i2.jsonl").exists(), "no other process restarts"
    audit = audit_job(traces)
    assert audit.ok, audit.render()


@pytest.mark.long
@pytest.mark.parametrize(("node", "steps"), [("node2", 25), ("node1", 15)])
def test_lost_node_without_spare_requeues_a_job_that_needs_it(
    cluster: SlurmCluster, tmp_path: Path, node: str, steps: int
) -> None:
    """Without node1, SLURM lets the job run on without its batch shell (``--no-kill``), and the bus
    is lost."""
    job = Submitted(cluster, tmp_path / "a", "--every", "10", script="100 0.1 2")
    job.wait_for_steps(steps)
    cluster.kill_node(node)
    try:
        wait_until(lambda: "fft: resuming" in job.output(), "it has resumed", LIMIT_S)
    finally:
        cluster.start_node(node)
    job.end()
    assert job.state() == "COMPLETED", job.output()
    audit = audit_job(job.folder / "job" / "traces")
    assert audit.ok and audit.resumed.checks, audit.render()


@pytest.mark.long
def test_task_of_an_array_leaves_and_comes_back_while_the_other_continues(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = Submitted(cluster, tmp_path / "a", "--array", script="400 0.1 1")
    job.wait_for_steps(5)
    cluster.ask("scancel", "--signal=USR1", "--batch", f"{job.ids[1]}_1")
    job.end()
    assert job.state() == "COMPLETED", job.output()
    assert "complete, at step 400 (group 0: complete, group 1: complete)" in job.output()
    assert len(job.bits()) == 1
    traces = job.folder / "job" / "traces"
    assert not (traces / "start2").exists(), "group 0 has never paused"
    assert (traces / "g1r0i2.jsonl").exists(), job.output()
    audit = audit_job(traces)
    assert audit.ok, audit.render()


@pytest.mark.long
def test_job_that_is_cancelled_drains_and_stays_out_of_the_queue(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = Submitted(cluster, tmp_path / "a", "--every", "1000", script="5000 0.1 2")
    job.wait_for_steps(5)
    cluster.ask("scancel", *job.ids)
    job.end()
    assert job.state() == "CANCELLED", job.output()
    assert list((job.folder / "job" / "checkpoints").glob("step-*/manifest.json"))


@pytest.mark.long
def test_mistake_in_the_script_fails_the_job_once(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Submitted(cluster, tmp_path / "a", "--spare-nodes", "1", script="not-a-number 0 2")
    job.end()
    assert job.state() == "FAILED", job.output()
    assert job.output().count("the job has ended: failed, at step 0 (group 0") == 1


@pytest.mark.long
def test_bus_ends_with_a_batch_shell_that_is_killed(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Submitted(cluster, tmp_path / "a", "--sbatch", "--no-requeue", script="5000 0.1 2")
    job.wait_for_steps(5)
    conf = cluster.env["SLURM_CONF"]

    def ours(*words: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                line, env = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            if all(word in line for word in words) and env.get("SLURM_CONF") == conf:
                found.append(process)
        return found

    (server,) = ours("serve", "--with-parent")
    os.kill(server.ppid(), signal.SIGKILL)
    server.wait(LIMIT_S)
    job.end()
    assert ours("fft.cli") == []

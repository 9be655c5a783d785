"""Tests of the manifests for Kubernetes: schema, rules, and pods in namespaces."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from namespaces import needs_namespaces
from pods import Cluster, Job, expanded
from typer.testing import CliRunner

from fft.bus.token import JobToken
from fft.cli import app
from fft.errors import ConfigError
from fft.launch.kubernetes import KubernetesJob, name_for, parsed_limits, rendered
from fft.launch.placement import Placement
from fft.trace.resumed import audit_job

LIMIT_S = 300.0
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
TOKEN = JobToken.fresh()


def a_job(**how: Any) -> KubernetesJob:
    settings: dict[str, Any] = {
        "name": "train",
        "placement": Placement(3, 2, 3, 1),
        "image": "registry.example/train:1",
        "script": ["train.py", "--name", "it's $HOME $(FFT_TOKEN) $$"],
        "checkpoint": ["--checkpoint", "/job/checkpoints", "--every", "10m"],
        "token": TOKEN,
        "claim": "shared",
        "limits": {"cpu": "4", "nvidia.com/gpu": "2"},
    }
    return KubernetesJob(**{**settings, **how})


def forms() -> dict[str, list[dict[str, Any]]]:
    """Return manifests of all forms by a name."""
    nats = a_job(bus="nats://me:p$ss@nats:4222/train", claim=None, checkpoint=[], limits={})
    return {
        "jobs": a_job().manifests(),
        "jobset": a_job().jobset(),
        "jobs on nats": nats.manifests(),
        "jobset on nats": nats.jobset(),
    }


def job_specs(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the specs of the Jobs by role."""
    found = {}
    for each in manifests:
        if each["kind"] == "Job":
            found[each["metadata"]["name"].rpartition("-")[2]] = each["spec"]
        if each["kind"] == "JobSet":
            found |= {j["name"]: j["template"]["spec"] for j in each["spec"]["replicatedJobs"]}
    return found


def container(spec: Mapping[str, Any]) -> Any:
    (only,) = spec["template"]["spec"]["containers"]
    return only


FORMS = pytest.mark.parametrize("form", forms())


# --- schema ---


@FORMS
def test_manifests_have_the_schema_of_kubernetes(form: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="install kubernetes-validate"
    ).validate
    parsed = list(yaml.safe_load_all(rendered(forms()[form])))
    for each in parsed:
        if each["kind"] == "JobSet":
            for job in each["spec"]["replicatedJobs"]:
                meta = {"name": job["name"], **job["template"]["metadata"]}
                made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta}
                validate({**made, "spec": job["template"]["spec"]}, "1.32", strict=True)
        else:
            validate(each, "1.32", strict=True)


@pytest.mark.parametrize("form", ["jobset", "jobset on nats"])
def test_jobset_loses_no_field_in_the_models_of_kubeflow(form: str) -> None:
    """The models drop fields that they do not know."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="install kubeflow-trainer-api"
    )

    jobset = yaml.safe_load(rendered(forms()[form][1:]))
    assert models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset


# --- rules that only an API server or a controller would apply ---


@FORMS
def test_jobs_meet_the_rules_for_a_failure_policy_by_index(form: str) -> None:
    for spec in job_specs(forms()[form]).values():
        assert spec["completionMode"] == "Indexed" and spec["backoffLimitPerIndex"] > 0
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
        assert spec["podReplacementPolicy"] == "Failed"
        assert spec["completions"] == spec["parallelism"] >= 1
        for rule in spec["podFailurePolicy"]["rules"]:
            assert rule["action"] in ("Ignore", "FailJob")
            codes = rule.get("onExitCodes", {"values": [1]})
            assert 0 not in codes["values"] and codes.get("operator", "In") == "In"


@FORMS
def test_disruption_is_ignored_before_any_exit_code_is_judged(form: str) -> None:
    for spec in job_specs(forms()[form]).values():
        first = spec["podFailurePolicy"]["rules"][0]
        assert first["action"] == "Ignore"
        assert first["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


@FORMS
def test_grace_period_is_longer_than_the_drain(form: str) -> None:
    for spec in job_specs(forms()[form]).values():
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 60


def test_service_is_headless_and_has_all_pods_of_the_job_and_no_others() -> None:
    _, service, *jobs = a_job().manifests()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "the groups look the bus up at once"
    for job in jobs:
        template = job["spec"]["template"]
        assert template["spec"]["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    other = a_job(name="other").manifests()[2]["spec"]["template"]["metadata"]["labels"]
    assert not service["spec"]["selector"].items() <= other.items()


@pytest.mark.parametrize(("form", "suffix"), [("jobs", ""), ("jobset", "-0")])
def test_groups_find_the_bus_by_the_host_names_of_its_pods(form: str, suffix: str) -> None:
    """A pod of an Indexed Job is named JOB-INDEX, and a Job of a JobSet is named SET-JOB-0."""
    pods = ",".join(
        f"train-{pod}.train:29500"
        for pod in (f"bus{suffix}-0", f"peer{suffix}-0", f"peer{suffix}-1")
    )
    for spec in job_specs(forms()[form]).values():
        url = f"nats://job-token@{pods}/train"
        assert container(spec)["env"][0] == {"name": "FFT_BUS", "value": url}


@pytest.mark.parametrize(
    "job", [a_job(nats=False), a_job(placement=Placement(2, 2, 2))], ids=["no NATS", "two pods"]
)
def test_bus_without_nats_or_a_third_pod_is_one_pod(job: KubernetesJob) -> None:
    for specs, host in ((job_specs(job.manifests()), ""), (job_specs(job.jobset()), "-0")):
        assert "peer" not in specs and specs["bus"]["completions"] == 1
        url = f"tcp://train-bus{host}-0.train:29500/train"
        assert container(specs["group"])["env"][0] == {"name": "FFT_BUS", "value": url}


@FORMS
def test_token_is_in_the_secret_only(form: str) -> None:
    text = rendered(forms()[form])
    assert text.count(TOKEN.text()) == 1
    secret, *_ = forms()[form]
    assert secret["stringData"]["token"] == TOKEN.text()
    for spec in job_specs(forms()[form]).values():
        reference = container(spec)["env"][1]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": secret["metadata"]["name"], "key": "token"}


def test_pods_run_the_parts_of_the_placement() -> None:
    specs = job_specs(a_job().manifests())
    assert {role: spec["completions"] for role, spec in specs.items()} == {
        "bus": 1,
        "peer": 2,
        "group": 3,
        "spare": 1,
    }
    env = {"JOB_COMPLETION_INDEX": "2", "FFT_TOKEN": "secret"}
    words = [expanded(word, env) for word in container(specs["group"])["args"]]
    assert words[:6] == ["fft", "run", "--first-group", "2", "--groups", "1"]
    assert words[-3:] == ["train.py", "--name", "it's $HOME $(FFT_TOKEN) $$"]
    words = container(specs["spare"])["args"]
    assert words[:8] == ["fft", "run", "--first-group", "0", "--groups", "0", "--spares", "2"]


def test_job_on_nats_has_no_bus_of_its_own() -> None:
    for form in ("jobs on nats", "jobset on nats"):
        specs = job_specs(forms()[form])
        assert list(specs) == ["group", "spare"]
        secret, url = forms()[form][0], container(specs["group"])["env"][0]
        reference = {"name": secret["metadata"]["name"], "key": "bus"}
        assert url == {"name": "FFT_BUS", "valueFrom": {"secretKeyRef": reference}}
        assert secret["stringData"]["bus"] == "nats://me:p$ss@nats:4222/train"
        assert rendered(forms()[form]).count("p$ss") == 1, "the password is in the Secret only"
    jobset = forms()["jobset on nats"][1]
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["group"]


def test_bus_needs_no_resources_of_the_groups() -> None:
    specs = job_specs(a_job().manifests())
    assert "resources" not in container(specs["bus"])
    assert container(specs["group"])["resources"]["limits"]["nvidia.com/gpu"] == "2"


@FORMS
def test_pod_shell_is_valid_and_not_expanded_by_kubernetes(form: str) -> None:
    for spec in job_specs(forms()[form]).values():
        command = container(spec)["command"]
        assert [expanded(word, {}) for word in command] == command
        subprocess.run(["bash", "-n"], input=command[2], text=True, check=True)


@pytest.mark.parametrize("name", ["Train", "a_b", "-a", "a-", "1a", "", "a" * 41])
def test_name_that_kubernetes_refuses_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        a_job(name=name)


def test_name_is_derived_from_the_script() -> None:
    assert name_for(Path("src/My_train.v2.py")) == "my-train-v2"
    for name in ("2d_train", "_" + "long_name_" * 9, "x" * 39 + "_y", "Über$(HOME)"):
        a_job(name=name_for(Path(f"{name}.py")))


@pytest.mark.parametrize("scheduler", [("k8s", "--image", "i:1"), ("slurm", "--print")])
@pytest.mark.parametrize("seconds", ["inf", "nan", "0"])
def test_drain_timeout_without_an_end_is_refused(
    scheduler: tuple[str, ...], seconds: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    command = ["launch", *scheduler, "--drain-timeout", seconds, "--", str(script)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and "--drain-timeout" in done.output


def test_limits_of_another_form_are_refused() -> None:
    assert parsed_limits("cpu=4,memory=8Gi") == {"cpu": "4", "memory": "8Gi"}
    with pytest.raises(ConfigError, match="expected NAME=N"):
        parsed_limits("cpu=4,memory")


def test_command_prints_manifests_with_a_new_token() -> None:
    command = ["launch", "k8s", "--image", "i:1", "--groups", "2", "--claim", "data"]
    runs = [CliRunner().invoke(app, [*command, "--", "train.py", "--lr", "1"]) for _ in range(2)]
    first, second = (list(yaml.safe_load_all(run.stdout)) for run in runs)
    assert first[0]["stringData"] != second[0]["stringData"]
    assert first[1:] == second[1:]
    assert "--resume" in container(job_specs(first)["group"])["args"]
    bad = CliRunner().invoke(app, ["launch", "k8s", "--image", "i:1", "--", "1.py"])
    assert bad.exit_code == 2


def test_dockerfile_copies_files_that_exist() -> None:
    root = Path(__file__).parents[2]
    lines = (root / "examples" / "kubernetes" / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert copied and all((root / path).exists() for path in copied)


# --- the shell of a pod, with a command in place of fft ---


@pytest.mark.parametrize(
    ("before", "run", "after", "code"),
    [
        (1, 0, 0, 0),
        (1, 3, 0, 0),  # fewer groups
        (75, 75, 0, 75),  # drained
        (1, 1, 1, 1),  # a mistake in the script
        (1, 2, 1, 1),  # wrong arguments
        (75, 2, 75, 70),  # this pod cannot start, and the others go on
        (75, 2, 0, 0),  # the others have completed the job
        (1, 4, 0, 0),  # a spare has taken the group over, and completes the job
        (1, 1, 2, 69),  # the bus was lost
        (1, 2, 2, 69),
        (1, 2, -1, 69),  # another bus is there already, on which nothing has begun
        (1, 1, 75, 70),  # only this group has failed
        (1, 137, 75, 70),
        (0, 9, 9, 0),  # the job is complete already
        (3, 9, 9, 0),
    ],
)
def test_pod_translates_the_exit_status(
    tmp_path: Path, before: int, run: int, after: int, code: int
) -> None:
    """``before`` and ``after``: the outcome on the bus before and after the `fft run`; negative on
    another bus."""
    fake = tmp_path / "fft"
    fake.write_text(
        f'#!/bin/bash\nif [ "$1" = run ]; then touch {tmp_path}/ran; exit {run}; fi\n'
        f"status={before} life=1\n"
        f"if [ -e {tmp_path}/ran ]; then status={abs(after)} life={int(after >= 0)}; fi\n"
        '[ "$status" = 2 ] || printf "the job has ended: x\\nbus url, generation $life\\n"\n'
        "exit $status\n"
    )
    fake.chmod(0o755)
    command = container(job_specs(a_job().manifests())["group"])["command"]
    command = [word.replace("/job/", f"{tmp_path}/") for word in command]
    done = subprocess.run(
        [*command, "fft", "run"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        timeout=90,
        check=False,
    )
    assert done.returncode == code


def test_pods_of_a_group_on_several_hosts_run_its_parts(tmp_path: Path) -> None:
    job = a_job(placement=Placement.of(2, 4, None, 1, 2))
    specs = job_specs(job.manifests())
    assert [specs[role]["completions"] for role in ("group", "spare")] == [4, 1]
    fake = tmp_path / "fft"
    fake.write_text(
        '#!/bin/bash\nif [ "$1" = run ]; then echo "$*"; exit 0; fi\n'
        'printf "no group has begun\\nbus url, generation 1\\n"; exit 1\n'
    )
    fake.chmod(0o755)
    for index, group in (("1", "0"), ("2", "1")):
        pod = container(specs["group"])
        words = [expanded(w, {"JOB_COMPLETION_INDEX": index}) for w in pod["args"]]
        done = subprocess.run(
            [*(word.replace("/job/", f"{tmp_path}/") for word in pod["command"]), *words],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            timeout=90,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith(f"run --first-group {group} --groups 1 --join --ranks 4 ")
        assert "--ranks-per-host 2" in done.stdout


def waited(folder: Path, role: str, seconds: int) -> subprocess.CompletedProcess[str]:
    """Run the shell of a pod that has waited for a bus for so long. No bus is there."""
    command = container(job_specs(a_job().manifests())[role])["command"]
    command = [word.replace("/job/", f"{folder}/") for word in command]
    with closing(socket.socket()) as refusing:
        refusing.bind(("127.0.0.1", 0))  # nothing listens at this port
        env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "FFT_BUS": f"tcp://127.0.0.1:{refusing.getsockname()[1]}/train",
            "FFT_TOKEN": TOKEN.text(),
            "FFT_JOB_UID": "a1",
            "SECONDS": str(seconds),  # bash counts from here
        }
        return subprocess.run(
            [*command, "false"], env=env, capture_output=True, text=True, timeout=120, check=False
        )


def test_pod_without_a_bus_succeeds_if_its_job_has_completed(tmp_path: Path) -> None:
    (tmp_path / "complete-a1").touch()
    done = waited(tmp_path, "group", 61)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/complete-a1 exists: the job is complete" in done.stdout


def test_pod_without_a_bus_fails_if_only_another_job_has_completed(tmp_path: Path) -> None:
    (tmp_path / "complete-b2").touch()
    done = waited(tmp_path, "group", 1801)
    assert done.returncode == 1
    assert "no bus has come at tcp://127.0.0.1:" in done.stderr


def test_spare_without_a_bus_does_not_fail_its_job(tmp_path: Path) -> None:
    done = waited(tmp_path, "spare", 1801)
    assert done.returncode == 0, done.stderr
    assert "no bus has come at tcp://127.0.0.1:" in done.stderr


def test_bus_serves_late_pods_only_without_a_file_and_a_jobset() -> None:
    def bus(manifests: list[dict[str, Any]]) -> str:
        return str(container(job_specs(manifests)["bus"])["command"][2])

    assert "0 | 3)\n    until=" in bus(a_job(claim=None).manifests())
    without_spares = a_job(claim=None, placement=Placement(3, 2, 3)).manifests()
    assert "\n  3)\n    until=" in bus(without_spares)
    for manifests in (a_job().manifests(), a_job().jobset(), a_job(claim=None).jobset()):
        assert "until=" not in bus(manifests)


# --- pods in namespaces ---


class Trial:
    """A job of two groups whose pods run in namespaces."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, folder
        self.traces = folder / "claim" / "traces"

    def committed(self, group: int, within: str = ".") -> int:
        """Return the steps that rank 0 of the group has committed."""
        folders = [self.traces, *self.folder.glob("empty*/traces")]
        traces = [p for f in folders for p in f.glob(f"{within}/g{group}r0i*.jsonl")]
        return sum(path.read_text().count('"note":"consumed"') for path in traces)

    def trains(self, group: int, steps: int, within: str = ".") -> None:
        """Run until the group has committed so many more steps."""
        goal = self.committed(group, within) + steps
        self.cluster.run_until(
            lambda: self.committed(group, within) >= goal, f"group {group} trains", LIMIT_S
        )

    def ends(self) -> None:
        """Run until all Jobs are over."""
        self.cluster.run_until(
            lambda: all(job.is_over and not job.pods for job in self.cluster.jobs),
            "the job ends",
            LIMIT_S,
        )

    def bits(self) -> set[str]:
        """Return the last step and the weights that the ranks have printed at the end."""
        logs = [p.read_text() for p in self.traces.rglob("logs/*")]
        found = [line for log in logs for line in log.splitlines() if line.startswith("bits")]
        last = max(int(line.split()[1]) for line in found)
        return {line for line in found if line.startswith(f"bits {last} ")}


def judges(job: Job, index: int = 0) -> bool:
    """Whether a pod of the bus serves it, and waits for the end of the job."""
    first = job.pods[index].first() if index in job.pods else None
    with suppress(psutil.NoSuchProcess):
        return first is not None and any("outcome" in p.cmdline() for p in first.children())
    return False


@contextmanager
def trial(folder: Path, script: str, *options: str, claim: bool = True) -> Iterator[Trial]:
    """Render a job of two groups, and make a cluster for it."""
    (folder / "claim").mkdir()
    (folder / "train.py").write_text(SCRIPT)
    command = ["launch", "k8s", "--image", "i", "--groups", "2", *options]
    command += ["--claim", "data"] if claim else []
    done = CliRunner().invoke(app, [*command, "--", "train.py", *script.split()])
    assert done.exit_code == 0, done.stderr
    manifests = list(yaml.safe_load_all(done.stdout))
    with closing(Cluster(folder, manifests, folder / "claim")) as cluster:
        yield Trial(folder, cluster)


IN_PODS = [pytest.mark.long, pytest.mark.timeout(900), needs_namespaces]


def in_pods(function: Any) -> Any:
    for mark in IN_PODS:
        function = mark(function)
    return function


@in_pods
def test_job_survives_a_cut_link_and_a_deleted_pod(tmp_path: Path) -> None:
    with trial(tmp_path, "400 0.1 1") as job:
        cluster = job.cluster
        job.trains(0, 5)
        job.trains(1, 5)
        group = cluster.job("group")
        cluster.cut(group.pods[1])
        job.trains(0, 30)
        cluster.mend(group.pods[1])
        job.trains(1, 5)
        group.pods[0].delete()
        cluster.run_until(lambda: 0 in group.exits, "the pod has ended", LIMIT_S)
        job.trains(0, 5)
        job.ends()
        assert all(each.is_complete for each in cluster.jobs), cluster.output()
        assert group.exits == {0: [75, 0], 1: [0]}
        assert "complete, at step 400 (group 0: complete, group 1: complete)" in cluster.output()
        assert len(job.bits()) == 1
        audit = audit_job(job.traces)
        assert audit.ok, audit.render()


@in_pods
def test_lost_bus_lets_the_job_resume_from_its_checkpoint(tmp_path: Path) -> None:
    with trial(tmp_path, "120 0.1 2", "--every", "10", "--jobset") as job:
        cluster = job.cluster
        job.trains(0, 25)
        cluster.job("bus").pods[0].lose()
        job.trains(0, 5, within="start2")
        job.ends()
        assert all(each.is_complete for each in cluster.jobs), cluster.output()
        assert cluster.job("group").exits == {0: [69, 0], 1: [69, 0]}
        audit = audit_job(job.traces)
        assert audit.resumed.checks and not audit.resumed.violation, audit.render()
        first, second = audit.starts
        broken = {finding.name for finding in first.findings if finding.violation}
        assert broken <= {"decided"} and second.ok, audit.render()  # they have stopped in doubt


COMPLETE = """
import sys
from fft.bus import open_job_bus
from fft.bus.token import JobToken
from fft.launch.supervisor.claims import Claims
with open_job_bus(sys.argv[1], JobToken.from_env(), 60.0) as bus:
    claims = Claims(bus, lambda: None)
    claims.take(["0", "1"], take_over=False)
    claims.status = 0
    claims.close()
"""
"""A supervisor of both groups that ends with status 0."""


@in_pods
def test_pods_of_the_bus_replace_each_other_and_end_with_the_job(tmp_path: Path) -> None:
    with trial(tmp_path, "1 0 1", "--spare-pods", "1") as job:
        cluster, bus, peer = job.cluster, job.cluster.job("bus"), job.cluster.job("peer")
        cluster.job("group").has_room = cluster.job("spare").has_room = False
        servers = (bus, 0), (peer, 0), (peer, 1)

        def all_serve() -> bool:
            return all(judges(*server) for server in servers)

        cluster.run_until(all_serve, "the servers have elected a leader", LIMIT_S)
        bus.pods[0].lose()
        cluster.run_until(lambda: 0 in bus.exits, "a pod is lost", LIMIT_S)
        cluster.run_until(all_serve, "another pod has joined the others", LIMIT_S)
        peer.pods[1].delete()
        cluster.run_until(lambda: 1 in peer.exits, "a pod is evicted", LIMIT_S)
        cluster.run_until(all_serve, "another pod has joined the others", LIMIT_S)
        places = ",".join(f"{each.pods[index].address}:29500" for each, index in servers)
        command = [sys.executable, "-c", COMPLETE, f"nats://job-token@{places}/train"]
        subprocess.run(
            ["ip", "netns", "exec", bus.pods[0].space, *command],
            env={**os.environ, "FFT_TOKEN": cluster.token},
            check=True,
            timeout=LIMIT_S,
        )
        cluster.run_until(lambda: bus.is_complete and peer.is_complete, "they end", LIMIT_S)
        assert bus.exits[0][1:] == [0] and peer.exits == {0: [0], 1: [75, 0]}, cluster.output()


@in_pods
def test_three_pods_of_the_bus_lose_one_each_without_a_restart(tmp_path: Path) -> None:
    with trial(tmp_path, "900 0.1 2", "--spare-pods", "1") as job:
        cluster, bus, peer = job.cluster, job.cluster.job("bus"), job.cluster.job("peer")
        job.trains(0, 5)
        job.trains(1, 5)
        bus.pods[0].lose()
        cluster.run_until(lambda: 0 in bus.exits, "the pod is lost", LIMIT_S)
        job.trains(0, 5)
        job.trains(1, 5)
        cluster.run_until(lambda: judges(bus), "another pod judges the job", LIMIT_S)
        peer.pods[0].delete()
        cluster.run_until(lambda: 0 in peer.exits, "a peer was evicted", LIMIT_S)
        job.trains(1, 5)
        job.ends()
        assert all(each.is_complete for each in cluster.jobs), cluster.output()
        assert cluster.job("group").exits == {0: [0], 1: [0]}, "no other pod restarts"
        assert not (job.traces / "start2").exists() and len(job.bits()) == 1
        audit = audit_job(job.traces)
        assert audit.ok, audit.render()


@in_pods
def test_evicted_bus_drains_the_groups_and_the_bits_stay_the_same(tmp_path: Path) -> None:
    whole, evicted = tmp_path / "whole", tmp_path / "evicted"
    whole.mkdir()
    evicted.mkdir()
    with trial(whole, "60 0.01 2") as job:
        job.ends()
        bits = job.bits()
    with trial(evicted, "60 0.1 2", "--every", "1000") as job:
        job.trains(0, 5)
        job.trains(1, 5)
        job.cluster.job("bus").pods[0].delete()
        job.ends()
        assert all(each.is_complete for each in job.cluster.jobs), job.cluster.output()
        assert job.cluster.job("group").exits == {0: [75, 0], 1: [75, 0]}
        assert job.bits() == bits


@in_pods
def test_spare_pod_takes_over_the_group_of_a_pod_that_is_cut_off(tmp_path: Path) -> None:
    with trial(tmp_path, "900 0.1 1", "--spare-pods", "1") as job:
        job.trains(0, 5)
        job.trains(1, 5)
        lost = job.cluster.job("group").pods[1]
        job.cluster.cut(lost)
        job.cluster.run_until(
            lambda: "group 1 is taken over" in job.cluster.output(), "it is taken over", LIMIT_S
        )
        job.trains(1, 5)
        job.cluster.mend(lost)
        job.ends()
        assert all(each.is_complete for each in job.cluster.jobs), job.cluster.output()
        assert len(job.bits()) == 1
        audit = audit_job(job.traces)
        assert audit.ok, audit.render()


@in_pods
def test_pod_that_comes_back_after_the_end_of_the_bus_succeeds(tmp_path: Path) -> None:
    with trial(tmp_path, "300 0.1 1") as job:
        cluster, group, bus = job.cluster, job.cluster.job("group"), job.cluster.job("bus")
        job.trains(1, 5)
        group.has_room = False
        group.pods[1].delete()
        cluster.run_until(lambda: bus.is_complete and 0 in group.exits, "both end", LIMIT_S)
        assert group.exits == {0: [0], 1: [75]}, cluster.output()
        group.has_room = True
        job.ends()
        assert group.is_complete and group.exits == {0: [0], 1: [75, 0]}, cluster.output()


@in_pods
def test_bus_without_a_claim_waits_for_late_pods_until_deleted(tmp_path: Path) -> None:
    with trial(tmp_path, "300 0.1 1", claim=False) as job:
        cluster, group, bus = job.cluster, job.cluster.job("group"), job.cluster.job("bus")
        job.trains(1, 5)
        group.has_room = False
        group.pods[1].delete()
        ended = "the job has ended: complete, but with fewer groups"
        cluster.run_until(lambda: ended in cluster.output(), "the training is complete", LIMIT_S)
        group.has_room = True
        cluster.run_until(lambda: group.is_complete, "the late pod ends", LIMIT_S)
        assert group.exits == {0: [0], 1: [75, 0]}, cluster.output()
        assert not bus.is_over
        bus.pods[0].delete()
        job.ends()
        assert bus.exits == {0: [0]}, cluster.output()


@in_pods
def test_pod_waits_for_its_group_while_a_spare_holds_the_group(tmp_path: Path) -> None:
    with trial(tmp_path, "900 0.1 1", "--spare-pods", "1") as job:
        cluster, group = job.cluster, job.cluster.job("group")
        job.trains(0, 5)
        job.trains(1, 5)
        group.has_room = False
        group.pods[1].lose()
        taken = "group 1 is taken over"
        cluster.run_until(lambda: taken in cluster.output(), "it is taken over", LIMIT_S)
        job.trains(1, 5)
        group.has_room = True
        refused = "Give this one other groups (--first-group)"
        cluster.run_until(lambda: refused in cluster.output(), "the pod is refused", LIMIT_S)
        job.ends()
        assert all(each.is_complete for each in cluster.jobs), cluster.output()
        assert group.exits[1][-1] == 0 and 75 not in group.exits[1], cluster.output()


@in_pods
def test_mistake_in_the_script_fails_the_jobs_once(tmp_path: Path) -> None:
    with trial(tmp_path, "not-a-number 0 2") as job:
        job.ends()
        assert all(each.has_failed for each in job.cluster.jobs), job.cluster.output()
        exits = job.cluster.job("group").exits
        assert any(codes == [1] for codes in exits.values())
        assert all(len(codes) == 1 for codes in exits.values())

"""A model of Kubernetes that runs the pods of manifests as processes in namespaces.

It does what the manifests of FFT rely on: Indexed Jobs with their failure policy, the names of a
headless Service, Secrets, the expansion of variables, volumes, and the deletion of a pod with its
grace period. A pod has its own network, host name, root directory and process numbers. It is no
API server: it neither validates nor schedules.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_ENTRY = Path(__file__).with_name("pod_entry.py")
_LOOK_S = 0.1
_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"


def expanded(text: str, env: Mapping[str, str]) -> str:
    """Return ``text`` as a container is given it: ``$(NAME)`` is replaced, ``$$`` is a dollar."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]),
        text,
    )


@dataclass
class Pod:
    """One running pod."""

    job: Job
    index: int
    process: subprocess.Popen[bytes]
    address: str
    space: str
    """Its network namespace."""
    link: str
    """Its end of the network on the bridge."""
    disrupted: bool = False
    """Whether its loss is that of a node, so that it has the condition DisruptionTarget."""
    killed_at: float | None = None

    def first(self) -> psutil.Process | None:
        """Return the process that is PID 1 in the pod."""
        with suppress(psutil.NoSuchProcess):
            return next(iter(psutil.Process(self.process.pid).children()), None)
        return None

    def delete(self) -> None:
        """Send SIGTERM to PID 1; after the grace period the cluster kills the pod."""
        if (first := self.first()) is not None:
            first.send_signal(signal.SIGTERM)
        grace = self.job.spec["template"]["spec"]["terminationGracePeriodSeconds"]
        self.killed_at = time.monotonic() + grace

    def lose(self) -> None:
        """Kill the pod as the loss of its node does, which Kubernetes calls a disruption."""
        self.disrupted = True
        if (first := self.first()) is not None:
            first.kill()


@dataclass
class Job:
    """An Indexed Job."""

    name: str
    spec: Mapping[str, Any]
    pods: dict[int, Pod] = field(default_factory=dict)
    exits: dict[int, list[int]] = field(default_factory=dict)
    """The exit codes of the pods of each index, in order."""
    failures: dict[int, int] = field(default_factory=dict)
    succeeded: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    has_failed: bool = False
    has_room: bool = True
    """Whether its pods find a node. Without room they are pending."""
    uid: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def is_over(self) -> bool:
        """Whether no pod will start any more."""
        return self.has_failed or len(self.succeeded | self.failed) == self.spec["completions"]

    @property
    def is_complete(self) -> bool:
        """Whether all indexes have succeeded."""
        return len(self.succeeded) == self.spec["completions"]

    def take(self, pod: Pod, code: int) -> None:
        """Handle the end of a pod by the pod failure policy."""
        del self.pods[pod.index]
        self.exits.setdefault(pod.index, []).append(code)
        if code == 0:
            self.succeeded.add(pod.index)
            return
        action = self._action(pod, code)
        if action == "FailJob":
            self.has_failed = True
        elif action == "Count":
            self.failures[pod.index] = self.failures.get(pod.index, 0) + 1
            if self.failures[pod.index] > self.spec["backoffLimitPerIndex"]:
                self.failed.add(pod.index)

    def _action(self, pod: Pod, code: int) -> str:
        for rule in self.spec["podFailurePolicy"]["rules"]:
            if "onPodConditions" in rule and pod.disrupted:
                return str(rule["action"])
            if "onExitCodes" in rule and code in rule["onExitCodes"]["values"]:
                return str(rule["action"])
        return "Count"


class Cluster:
    """Runs the pods of manifests. `close` ends them and removes the network."""

    def __init__(self, folder: Path, manifests: Sequence[Mapping[str, Any]], claim: Path) -> None:
        """Make the network; `run_until` starts the pods.

        Args:
            claim: The folder that stands for every PersistentVolumeClaim.
        """
        self.folder, self._claim = folder, claim
        self._tag, self._number = secrets.token_hex(2), 0
        self._spaces = [f"fft{self._tag}"]
        self._hosts = folder / "hosts"
        self._hosts.touch()
        self._secrets = {
            m["metadata"]["name"]: m["stringData"] for m in manifests if m["kind"] == "Secret"
        }
        self._services = {
            m["metadata"]["name"]: m["spec"]["selector"]
            for m in manifests
            if m["kind"] == "Service" and m["spec"]["clusterIP"] == "None"
        }
        self.jobs = [Job(m["metadata"]["name"], m["spec"]) for m in manifests if m["kind"] == "Job"]
        for jobset in (m for m in manifests if m["kind"] == "JobSet"):
            name = jobset["metadata"]["name"]
            self._services[name] = {}
            for each in jobset["spec"]["replicatedJobs"]:
                self.jobs.append(Job(f"{name}-{each['name']}-0", each["template"]["spec"]))
        _ip(f"netns add {self._spaces[0]}")
        self._bridge("link add br0 type bridge")
        self._bridge("link set br0 up")

    @property
    def token(self) -> str:
        """The token in the Secret of the manifests."""
        return next(str(found["token"]) for found in self._secrets.values())

    def job(self, role: str) -> Job:
        """Return the Job whose name contains ``role``."""
        return next(job for job in self.jobs if f"-{role}" in job.name)

    def run_until(self, holds: Callable[[], bool], what: str, within: float) -> None:
        """Run the pods until ``holds`` returns true."""
        deadline = time.monotonic() + within
        while not holds():
            assert time.monotonic() < deadline, f"not within {within:g} s: {what}\n{self.output()}"
            self._control()
            time.sleep(_LOOK_S)

    def cut(self, pod: Pod) -> None:
        """Disconnect a pod from the network."""
        self._bridge(f"link set {pod.link} down")

    def mend(self, pod: Pod) -> None:
        """Connect the pod again."""
        self._bridge(f"link set {pod.link} up")

    def output(self) -> str:
        """Return all output of all pods."""
        return "\n".join(f"== {p.name}\n{p.read_text()}" for p in sorted(self.folder.glob("*.out")))

    def close(self) -> None:
        """End all pods, and remove the network."""
        for pod in [pod for job in self.jobs for pod in job.pods.values()]:
            pod.process.kill()  # and with it its PID 1, and all that the pod has started
            pod.process.wait()
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def _control(self) -> None:
        for job in self.jobs:
            for pod in list(job.pods.values()):
                if (code := pod.process.poll()) is not None:
                    job.take(pod, code)
                elif pod.killed_at is not None and time.monotonic() > pod.killed_at:
                    pod.process.kill()
            if job.has_failed:
                for pod in job.pods.values():
                    if pod.killed_at is None:
                        pod.delete()
                continue
            for index in range(job.has_room * job.spec["completions"]):
                if index not in {*job.pods, *job.succeeded, *job.failed}:
                    job.pods[index] = self._start(job, index)
            self._resolve()

    def _start(self, job: Job, index: int) -> Pod:
        self._number += 1
        number = self._number
        template = job.spec["template"]
        space, link = f"fft{self._tag}p{number}", f"v{self._tag}{number}"
        self._spaces.append(space)
        _ip(f"netns add {space}")
        _ip(f"-n {space} link add eth0 type veth peer name {link} netns {self._spaces[0]}")
        self._bridge(f"link set {link} master br0 up")
        address = f"10.78.0.{number}"
        _ip(f"-n {space} addr add {address}/24 dev eth0")
        _ip(f"-n {space} link set eth0 up")
        _ip(f"-n {space} link set lo up")
        (container,) = template["spec"]["containers"]
        env = self._env(container, job, index)
        root = self.folder / f"root{number}"
        root.mkdir()
        spec = {
            "space": space,
            "hostname": f"{job.name}-{index}",
            "hosts": str(self._hosts),
            "root": str(root),
            "volumes": self._volumes(template["spec"], container, number),
            "env": env,
        }
        path = self.folder / f"pod{number}.json"
        path.write_text(json.dumps(spec))
        words = [*container["command"], *container["args"]]
        command = [sys.executable, "-S", str(_ENTRY), str(path)]
        with (self.folder / f"{job.name}-{index}-{number}.out").open("wb") as output:
            process = subprocess.Popen(
                [*command, *(expanded(word, env) for word in words)],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return Pod(job, index, process, address, space, link)

    def _env(self, container: Mapping[str, Any], job: Job, index: int) -> dict[str, str]:
        """Return the environment of a container. The image provides PATH and PYTHONPATH."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HOME": "/root"}
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if (reference := source.get("secretKeyRef")) is not None:
                env[each["name"]] = self._secrets[reference["name"]][reference["key"]]
            elif (reference := source.get("fieldRef")) is not None:
                env[each["name"]] = {_UID: job.uid}[reference["fieldPath"]]
            else:
                env[each["name"]] = expanded(each["value"], env)
        return {**env, "JOB_COMPLETION_INDEX": str(index)}

    def _volumes(
        self, pod: Mapping[str, Any], container: Mapping[str, Any], number: int
    ) -> dict[str, str | None]:
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        found: dict[str, str | None] = {}
        for mount in container.get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            if "persistentVolumeClaim" in volume:
                found[mount["mountPath"]] = str(self._claim)
            elif volume["emptyDir"].get("medium") == "Memory":
                found[mount["mountPath"]] = None
            else:
                empty = self.folder / f"empty{number}"
                empty.mkdir()
                found[mount["mountPath"]] = str(empty)
        return found

    def _resolve(self) -> None:
        """Write the names of all pods into their common /etc/hosts, as a headless Service does."""
        lines = ["127.0.0.1 localhost"]
        for job in self.jobs:
            template = job.spec["template"]
            subdomain, labels = template["spec"]["subdomain"], template["metadata"]["labels"]
            selector = self._services.get(subdomain)
            if selector is None or not selector.items() <= labels.items():
                continue  # no Service has these pods
            for index, pod in job.pods.items():
                host = f"{job.name}-{index}"
                lines.append(f"{pod.address} {host}.{subdomain} {host}")
        text = "\n".join(lines) + "\n"
        if self._hosts.read_text() != text:
            self._hosts.write_text(text)  # the file that the pods have mounted, not a new one

    def _bridge(self, command: str) -> None:
        _ip(f"-n {self._spaces[0]} {command}")


def _ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {command}: {done.stderr}"

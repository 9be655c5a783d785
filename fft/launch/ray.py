"""Ray: run a job on a Ray cluster, with an actor for each group.

An actor supervises its group by `fft run --join`. The ranks are its child processes, not actors,
and end with it. If a node is lost, Ray starts its actors on other nodes. An actor on the node of
the driver serves the bus, with actors on two other nodes if the cluster has them. If the bus is
lost, the driver starts bus and actors again from a checkpoint, if the job has one.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fft.bus import open_job_bus
from fft.bus.token import JobToken
from fft.checkpoints.files import Checkpoints
from fft.checkpoints.plan import EVERY
from fft.checkpoints.stores import open_store
from fft.errors import BusError, FftError
from fft.launch.outcome import Outcome, until_ended
from fft.launch.placement import Part, Placement
from fft.launch.services import SERVERS, bus_notice, nats_is_installed
from fft.operate.client import JobClient
from fft.operate.drain import drain
from fft.protocol.timeouts import bus_operation
from fft.util.die_with_parent import tied

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    raise FftError(f"fft.launch.ray needs Ray ({error}): pip install 'fft-torch[ray]'") from error

logger = logging.getLogger(__name__)

_PROGRAM = (sys.executable, "-m", "fft.cli")
_END_S = 5.0
"""Time limit for the actors of an ended job to return, in seconds. Those of lost nodes never do."""


class _Bus:
    """An actor that serves the bus; if its node is lost, it is not started again."""

    def start(self, host: str, hosts: Sequence[str], kind: str, job: str, token: str) -> str:
        """Start the server of ``host``, and return the URL of the bus."""
        command = [*_PROGRAM, "serve", "--hosts", ",".join(hosts), "--host", host]
        command += ["--bus", kind, "--job", job]
        env = {**os.environ, "FFT_TOKEN": token}
        self._server = subprocess.Popen(tied(command), env=env, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        words = dict(word.split("=", 1) for word in self._server.stdout.readline().split())
        if "FFT_BUS" not in words:
            raise FftError(f"`fft serve` has ended with status {self._server.wait()}")
        return words["FFT_BUS"]


class _Group:
    """The actor of one part. Ray starts it again elsewhere if its node is lost."""

    def run(self, options: Sequence[str], env: Mapping[str, str]) -> int:
        """Run `fft run` to its end, and return its exit status.

        The process of `fft run` is tied to the only thread of the actor, and dies with it.
        """
        command = [*_PROGRAM, "run", *options]
        return subprocess.run(tied(command), env={**os.environ, **env}, check=False).returncode


@dataclass(frozen=True)
class _Job:
    """The settings of a job."""

    placement: Placement
    script: Sequence[str]
    traces: Path
    drain_timeout: float
    checkpoint: Sequence[str]

    def options(self, part: Part) -> list[str]:
        """Return the options of `fft run` for a part.

        After Ray has restarted an actor, `--take-over` fences the old `fft run` of the group, which
        may still run. That of a part of a group takes the part whose `fft run` does not answer.
        """
        take_over = () if self.placement.parts_of_group > 1 else ("--take-over",)
        return [
            *self.placement.common_options(),
            *self.placement.options(part),
            *("--no-progress", *take_over, "--trace-dir", str(self.traces)),
            *("--drain-timeout", f"{self.drain_timeout:g}", *self.checkpoint, *self.script),
        ]


def run(
    script: str | Sequence[str],
    *,
    groups: int = 1,
    ranks: int = 1,
    ranks_per_host: int | None = None,
    resources_per_group: Mapping[str, float] | None = None,
    trace_dir: str | Path | None = None,
    checkpoint: str | None = None,
    every: str = EVERY,
    drain_timeout: float = 60.0,
) -> Outcome:
    """Run a training script on the Ray cluster to which this process is connected.

    Call `ray.init` first. All nodes need FFT, the script, and the folders named here at the same
    paths. An interrupt (Ctrl-C) drains the job, and is then raised as KeyboardInterrupt.

    Args:
        script: Path of the script, or a list of it and its arguments.
        groups: Number of replica groups.
        ranks: Number of ranks in each group.
        ranks_per_host: Number of ranks of a group on one host. By default a group has one host.
        resources_per_group: Ray resources of the ranks of a group on one host, such as
            ``{"CPU": 16, "GPU": 8}``. By default one CPU for each rank.
        trace_dir: Folder of traces and logs. By default ``runs/<time>``.
        checkpoint: Place of durable checkpoints. The job begins with the newest one, if any.
        every: Interval of checkpoints: 100 (steps), 10m or 2h.
        drain_timeout: Time limit of a drain, in seconds.

    Returns:
        How the job has ended, with its ``status`` and last ``step``.

    Raises:
        FftError: The job could not be started.
        BusError: The bus was lost, and no checkpoint was published since the job was last started.
    """
    if not ray.is_initialized():
        raise FftError("this process is not connected to a Ray cluster: call ray.init() first")
    command = [script] if isinstance(script, str) else [*script]
    traces = Path(trace_dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}").absolute()
    resume = ["--checkpoint", checkpoint, "--every", every, "--resume"] if checkpoint else []
    placement = Placement.of(groups, ranks, None, 0, ranks_per_host)
    job = _Job(placement, command, traces, drain_timeout, resume)
    resources = resources_per_group or {"CPU": float(placement.local_ranks)}
    newest = _newest_step(checkpoint)
    while True:
        try:
            return _run_once(job, resources)
        except BusError as error:
            before, newest = newest, _newest_step(checkpoint)
            if newest is None or newest == before:
                raise
            text = "the bus was lost (%s); the job starts again from the checkpoint of step %d"
            logger.warning(text, error, newest)


def _newest_step(place: str | None) -> int | None:
    """Return the step of the newest checkpoint at ``place``, or None if there is none."""
    found = Checkpoints(open_store(place)).found() if place else []
    return max((e.step for e in found if e.step is not None and e.problem is None), default=None)


def _run_once(job: _Job, resources: Mapping[str, float]) -> Outcome:
    """Run the job on a bus of its own until it has ended. Raises BusError if the bus is lost."""
    token = JobToken.fresh()
    own = ray.get_runtime_context().get_node_id()
    alive = [each for each in ray.nodes() if each["Alive"]]
    alive.sort(key=lambda each: each["NodeID"] == own)  # of nodes with one address, the own one
    nodes = {each["NodeManagerAddress"]: each["NodeID"] for each in alive}
    if notice := bus_notice(len(nodes), nats_is_installed()):
        logger.warning("%s", notice)
    hosts = sorted(nodes, key=lambda host: nodes[host] != own)[: 1 if notice else SERVERS]
    place = hosts, "tcp" if notice else "nats", f"ray-{secrets.token_hex(4)}", token.text()
    servers = [_on_node(nodes[host]) for host in hosts]
    try:
        starts = zip(servers, hosts, strict=True)
        urls = [server.start.remote(host, *place) for server, host in starts]
        return _supervised(job, str(ray.get(urls)[0]), token, resources)
    except ray.exceptions.RayError as error:
        raise FftError(f"Ray could not run the job: {error}") from error
    finally:
        for server in servers:
            ray.kill(server)


def _on_node(node: str) -> Any:
    """Start an actor of the bus on a node."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(_Bus).options(scheduling_strategy=strategy).remote()


def _supervised(job: _Job, url: str, token: JobToken, resources: Mapping[str, float]) -> Outcome:
    """Place the groups, and wait until the job has ended."""
    parts, env = list(job.placement.parts()), {"FFT_BUS": url, "FFT_TOKEN": token.text()}
    space = placement_group([dict(resources) for _ in parts], strategy="SPREAD")
    actors = [_placed(space, number, resources) for number in range(len(parts))]
    running: list[Any] = []
    try:
        running += [
            actor.run.remote(job.options(part), env)
            for actor, part in zip(actors, parts, strict=True)
        ]

        def all_have_returned() -> bool:
            done, _ = ray.wait(running, num_returns=len(running), timeout=0)
            return len(done) == len(running)

        with closing(open_job_bus(url, token, bus_operation(url))) as bus:
            try:
                return until_ended(bus, job.placement.groups, all_have_returned)
            except KeyboardInterrupt:
                with suppress(BusError), JobClient(url, token=token) as client:
                    drain(client, sorted(client.job().groups), job.drain_timeout)
                    until_ended(bus, job.placement.groups, all_have_returned)
                raise
            finally:
                ray.wait(running, num_returns=len(running), timeout=_END_S)
    finally:
        for actor in actors:
            ray.kill(actor)
        try:
            ray.wait(running, num_returns=len(running), timeout=_END_S)
        finally:
            remove_placement_group(space)


def _placed(space: Any, number: int, resources: Mapping[str, float]) -> Any:
    """Start the actor of a part in its bundle of the placement group."""
    named = dict(resources)
    options = {
        "num_cpus": named.pop("CPU", 0),
        "num_gpus": named.pop("GPU", 0),
        "memory": named.pop("memory", None),
        "resources": named,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(space, number),
        # After the loss of its node, Ray starts the actor elsewhere, and calls `run` again.
        "max_restarts": -1,
        "max_task_retries": -1,
    }
    return ray.remote(_Group).options(**options).remote()

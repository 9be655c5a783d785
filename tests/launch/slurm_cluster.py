"""A SLURM cluster of fake nodes on this machine, without systemd, for tests and trials.

`SlurmCluster` starts munged, slurmctld and one slurmd for each node with configuration, keys, state
and ports of its own, and ends them.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import psutil
from waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
START_S = 60.0

_CONF = """\
ClusterName=fft
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
JobRequeue=1
ReturnToService=2
KillWait=10
MinJobAge=300
SlurmctldTimeout=10
SlurmdTimeout=10
InactiveLimit=0
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmctldParameters=node_reg_mem_percent=1
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_missing() -> str | None:
    """Return why no cluster can be started here, or None."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return (
            f"SLURM is not installed ({', '.join(missing)}): "
            "apt-get install slurmctld slurmd slurm-client munge"
        )
    return None


class SlurmCluster:
    """A running cluster with the nodes node1, node2, …; ``env`` is for its clients."""

    def __init__(self, folder: Path, nodes: int) -> None:
        """Start the cluster, and wait until its nodes are idle."""
        self.folder, self._conf = folder, folder / "slurm.conf"
        path = f"{os.environ.get('PATH', '')}:/usr/sbin"
        self.env = {**os.environ, "SLURM_CONF": str(self._conf), "PATH": path}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start(nodes)
        except BaseException:
            self.close()
            raise

    def _start(self, nodes: int) -> None:
        host, ports = socket.gethostname().partition(".")[0], _free_ports(nodes + 1)
        lines = [
            f"NodeName=node{n} NodeHostname={host} NodeAddr=127.0.0.{n + 1} Port={port} CPUs=4 "
            "RealMemory=8000 State=UNKNOWN"
            for n, port in enumerate(ports[1:], 1)
        ]
        conf = _CONF.format(
            host=host, user=getpass.getuser(), folder=self.folder, port=ports[0]
        ).splitlines()
        self._conf.write_text("\n".join([*conf[:-1], *lines, conf[-1]]) + "\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        files = [f"--socket={self.folder}/munge.sock", f"--pid-file={self.folder}/munged.pid"]
        files += [f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/seed"]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *files)
        wait_until((self.folder / "munge.sock").exists, "munged listens", START_S)
        self._daemon("slurmctld", "-D", "-f", str(self._conf))
        for number in range(1, nodes + 1):
            self.start_node(f"node{number}")
        idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
        wait_until(lambda: self.ask(*idle).strip() == str(nodes), "all nodes are idle", START_S)

    def _daemon(self, program: str, *arguments: str, name: str | None = None) -> None:
        log = (self.folder / f"{name or program}.out").open("ab")
        with log:
            self._daemons[name or program] = subprocess.Popen(
                [program, *arguments], env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node, also of one that was killed."""
        (self.folder / f"spool.{node}").mkdir(exist_ok=True)
        self._daemon("slurmd", "-D", "-N", node, "-f", str(self._conf), name=node)

    def kill_node(self, node: str) -> None:
        """SIGKILL the slurmd of a node, its step daemons and all processes of its jobs."""
        doomed = [psutil.Process(self._daemons.pop(node).pid)]
        for process in psutil.process_iter():
            if self._runs_on(process, node):
                doomed.append(process)
                doomed += [p for p in process.parents() if p.name().startswith("slurmstepd")]
        # All at once: none may react to the end of another. Parents are stopped first, because they
        # start children, and killed last, because the kernel then continues their stopped children.
        doomed = sorted(set(doomed), key=lambda process: process.create_time())
        for end, order in ((psutil.Process.suspend, doomed), (psutil.Process.kill, doomed[::-1])):
            for process in order:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(process)

    def _runs_on(self, process: psutil.Process, node: str) -> bool:
        try:
            env = process.environ()
        except psutil.Error:
            return False
        is_ours = env.get("SLURM_CONF") == str(self._conf)
        return is_ours and env.get("SLURMD_NODENAME") == node and process.pid != os.getpid()

    def ask(self, *command: str) -> str:
        """Run a client of SLURM; return its output, which is empty if it fails."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        return done.stdout

    def queued(self) -> list[str]:
        """Return the ids and states of all jobs in the queue, such as ``7 RUNNING``."""
        return self.ask("squeue", "--noheader", "--array", "--format=%i %T").splitlines()

    def close(self) -> None:
        """End all jobs and daemons."""
        if self.ask("squeue", "--noheader"):
            self.ask("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}")
            self.ask("scancel", f"--user={getpass.getuser()}")
        for process in psutil.process_iter():
            env: dict[str, str] = {}
            try:
                env = process.environ()
            except psutil.Error:
                continue
            if env.get("SLURM_CONF") == str(self._conf) and "SLURM_JOB_ID" in env:
                _kill(process)
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports

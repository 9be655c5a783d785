"""The commands for schedulers.

`fft launch slurm` submits a job, `fft launch k8s` prints the manifests of one, and
`fft launch outcome` prints how a job has ended.
"""

from __future__ import annotations

import math
import shlex
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fft.checkpoints.plan import EVERY
from fft.cli.run import own_folder
from fft.cli.shared import BusUrl, GroupedHelp, job_client, plain_errors
from fft.launch.exit_status import IN_WORDS
from fft.util.terminal import put, write_err


def _finite(seconds: float) -> float:
    """Return ``seconds``. Raises BadParameter for inf, because a scheduler needs a number."""
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a finite number of seconds")
    return seconds


app = typer.Typer(
    help="Start a job on a scheduler, and ask how it has ended.", no_args_is_help=True
)

_SCRIPT = Annotated[Path, typer.Argument(help="The training script.", show_default=False)]
_ARGUMENTS = Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)]
_GROUPS = Annotated[int, typer.Option(min=1, help="Replica groups.")]
_RANKS = Annotated[int, typer.Option(min=1, help="Ranks per group.")]
_NODES = Annotated[
    int | None, typer.Option(min=1, help="Nodes for the groups. Default: one for each.")
]
_RANKS_PER_HOST = Annotated[
    int | None, typer.Option(min=1, help="Ranks of a group on one host. Default: all.")
]
_SPARE_NODES = Annotated[
    int,
    typer.Option(
        "--spare-nodes", "--spare-hosts", min=0, help="More nodes, which replace lost ones."
    ),
]
_ARRAY = Annotated[bool, typer.Option("--array", help="Each group is a job of its own.")]
_DIR = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="DIR", help="Job's folder, on a shared disk. Default: runs/<time>."
    ),
]
_CHECKPOINT = Annotated[
    str | None,
    typer.Option(metavar="DIR|URL", help="Place of checkpoints. Default: in the job's folder."),
]
_EVERY = Annotated[
    str, typer.Option(metavar="INTERVAL", help="Between checkpoints: 100 (steps), 10m or 2h.")
]
_DRAIN = Annotated[
    float,
    typer.Option(min=1, metavar="S", callback=_finite, help="Longest drain, in seconds."),
]
_SBATCH = Annotated[str, typer.Option(metavar="OPTIONS", help="More options of sbatch, quoted.")]
_BUS_SBATCH = Annotated[
    str | None,
    typer.Option(metavar="OPTIONS", help="With --array: those of the bus. Default: the same."),
]
_RUN = Annotated[str, typer.Option(metavar="OPTIONS", help="More options of `fft run`, quoted.")]
_IMAGE = Annotated[str, typer.Option(metavar="IMAGE", help="Image with FFT, the script and bash.")]
_NAME = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of the job. Default: that of the script.")
]
_SPARE_PODS = Annotated[int, typer.Option(min=0, help="Pods that take over lost pods' groups.")]
_CLAIM = Annotated[
    str | None,
    typer.Option(metavar="CLAIM", help="PersistentVolumeClaim for traces and checkpoints."),
]
_PLACE = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Place of checkpoints. Default: the volume of --claim."),
]
_LIMITS = Annotated[
    str, typer.Option(metavar="NAME=N,…", help="Limits of a group's pod, such as nvidia.com/gpu=8.")
]
_NATS = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Bus of your NATS cluster. Default: pods serve the bus."),
]
_JOBSET = Annotated[bool, typer.Option("--jobset", help="Print a JobSet instead of Jobs.")]
_PRINT = Annotated[bool, typer.Option("--print", help="Print the script, and submit nothing.")]


@app.command(cls=GroupedHelp, context_settings={"allow_interspersed_args": False})
def slurm(
    script: _SCRIPT,
    arguments: _ARGUMENTS = None,
    groups: _GROUPS = 1,
    ranks: _RANKS = 1,
    ranks_per_host: _RANKS_PER_HOST = None,
    nodes: _NODES = None,
    spare_nodes: _SPARE_NODES = 0,
    array: _ARRAY = False,
    folder: _DIR = None,
    checkpoint: _CHECKPOINT = None,
    every: _EVERY = EVERY,
    drain_timeout: _DRAIN = 60.0,
    sbatch: _SBATCH = "",
    bus_sbatch: _BUS_SBATCH = None,
    run: _RUN = "",
    only_print: _PRINT = False,
) -> None:
    """Submit SCRIPT as a SLURM job that survives lost nodes and continues after its time limit.

    The same command with the same --dir continues a job that has ended.
    """
    from fft.launch.placement import Placement
    from fft.launch.services import bus_notice, nats_is_installed
    from fft.launch.slurm import SlurmError, SlurmJob, submit

    with plain_errors():
        if array and (nodes or spare_nodes):
            raise SlurmError("--array gives each group a job: leave --nodes and --spare-nodes out")
        if not script.is_file():
            raise SlurmError(f"no script at {str(script)!r}; give the path of a Python file")
        if folder is None and not only_print:
            folder = own_folder(Path("runs"), f"{datetime.now():%Y%m%d-%H%M%S}")
        place = (folder or Path("runs/<time>")).absolute()
        job = SlurmJob(
            placement=Placement.of(groups, ranks, nodes, spare_nodes, ranks_per_host),
            folder=place,
            script=[str(script), *(arguments or [])],
            checkpoint=["--checkpoint", checkpoint or str(place / "checkpoints"), "--every", every],
            drain_timeout=drain_timeout,
            sbatch=shlex.split(sbatch),
            bus_sbatch=shlex.split(sbatch if bus_sbatch is None else bus_sbatch),
            run=shlex.split(run),
        )
        if only_print:
            scripts = [job.bus_script(), job.group_script()] if array else [job.batch_script()]
            put("\n".join(scripts))
            return
        place.mkdir(parents=True, exist_ok=True)
        ids = submit(job, array)
    if notice := bus_notice(job.bus_hosts(array), nats_is_installed()):
        write_err(notice)
    put(
        f"submitted as SLURM job {' and '.join(ids)}. Its output: {place}\n"
        f"Watch it with: fft watch {place / 'traces'}\n"
    )


@app.command(cls=GroupedHelp, context_settings={"allow_interspersed_args": False})
def k8s(
    script: _SCRIPT,
    image: _IMAGE,
    arguments: _ARGUMENTS = None,
    name: _NAME = None,
    groups: _GROUPS = 1,
    ranks: _RANKS = 1,
    ranks_per_host: _RANKS_PER_HOST = None,
    spare_pods: _SPARE_PODS = 0,
    limits: _LIMITS = "",
    claim: _CLAIM = None,
    checkpoint: _PLACE = None,
    every: _EVERY = EVERY,
    drain_timeout: _DRAIN = 60.0,
    bus: _NATS = None,
    run: _RUN = "",
    jobset: _JOBSET = False,
) -> None:
    """Print the Kubernetes manifests of a job that runs SCRIPT, for `kubectl apply -f`.

    The manifests contain a new token of the job.
    """
    from fft.bus.token import JobToken
    from fft.launch.kubernetes import FOLDER, KubernetesJob, name_for, parsed_limits, rendered
    from fft.launch.placement import Placement
    from fft.launch.services import bus_notice, nats_is_installed

    with plain_errors():
        place = checkpoint or (f"{FOLDER}/checkpoints" if claim else None)
        job = KubernetesJob(
            name=name or name_for(script),
            placement=Placement.of(groups, ranks, None, spare_pods, ranks_per_host),
            image=image,
            script=[str(script), *(arguments or [])],
            checkpoint=["--checkpoint", place, "--every", every, "--resume"] if place else [],
            token=JobToken.fresh(),
            claim=claim,
            bus=bus,
            nats=nats_is_installed(),
            limits=parsed_limits(limits),
            drain_timeout=drain_timeout,
            run=shlex.split(run),
        )
    put(rendered(job.jobset() if jobset else job.manifests()))
    if bus is None and (notice := bus_notice(job.pods, job.nats)):
        write_err(notice)


@app.command(epilog=IN_WORDS)
def outcome(
    groups: Annotated[int, typer.Option(min=1, help="Number of groups of the job.")],
    bus: BusUrl = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
) -> None:
    """Print how a job of several `fft run --join` has ended, and exit with its status."""
    from fft.launch.outcome import Outcome, until_ended

    with job_client(bus) as client:
        found = until_ended(client.bus, groups) if wait else Outcome.read(client.bus, groups)
        bus_line = f"bus {client.bus.url}, generation {client.bus.generation}"
    is_over = wait or found.has_ended
    state = f"the job has ended: {found}" if is_over else f"the job has not ended, {found.so_far}"
    put(f"{state}\n{bus_line}\n")
    raise typer.Exit(int(found.status))

"""The commands that run jobs: `fft serve` hosts a bus, `fft run` supervises a job's processes."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import fields, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from fft.checkpoints.plan import EVERY, KEEP, Checkpointing
from fft.cli.shared import plain_errors
from fft.errors import FftError
from fft.protocol.timeouts import HOST_LIMIT_S
from fft.util.terminal import put, write_err

if TYPE_CHECKING:
    from fft.bus.token import JobToken
    from fft.launch.supervisor import JobOutcome, RunConfig, Script
    from fft.messages.fault_plans import FaultPlan


# --- options ---


class BusKind(StrEnum):
    """The kinds of buses that ``fft serve`` and ``fft run`` can host."""

    tcp = "tcp"
    nats = "nats"


_MACHINES, _RECOVERY, _CHECKPOINTS = "Several machines", "Recovery", "Checkpoints"
_OUTPUT, _TESTS = "Output", "Injected faults"


def _option(panel: str | None, text: str, *names: str, **settings: Any) -> Any:
    """Return an option that ``fft run --help`` lists in ``panel``."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


_SCRIPT = Annotated[Path, typer.Argument(help="The training script.", show_default=False)]
_ARGUMENTS = Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)]
_GROUPS = Annotated[int, typer.Option("--groups", "--nnodes", min=0, help="Replica groups.")]
_RANKS = Annotated[int, typer.Option("--ranks", "--nproc-per-node", min=1, help="Ranks per group.")]
_RANKS_PER_HOST = Annotated[
    int | None,
    _option(_MACHINES, "Ranks of a group on each host, if it has several.", metavar="N"),
]
_MIN_GROUPS = Annotated[int, _option(None, "Drain below this number of usable groups.")]
_TIMEOUT = Annotated[float | None, _option(None, "Kill the job after these seconds.", metavar="S")]
_DRAIN_TIMEOUT = Annotated[float, _option(None, "Longest drain, in seconds.", metavar="S")]
_BUS_KIND = Annotated[BusKind, _option(None, "Message bus that is served.", metavar="tcp|nats")]
_LIGHTHOUSE = Annotated[
    bool | None,
    _option(
        None, "Serve torchft's lighthouse.", "--lighthouse/--no-lighthouse", show_default=False
    ),
]

_TRACE_DIR = Annotated[
    Path | None, _option(_OUTPUT, "Traces and logs. Default: runs/<time>.", metavar="DIR")
]
_PROGRESS = Annotated[bool, _option(_OUTPUT, "Show the running job.")]
_TEE = Annotated[
    str, _option(_OUTPUT, "Show the output of first, all, none, or GROUP.RANK,…", metavar="RANKS")
]

_METRICS = Annotated[
    str | None,
    _option(_OUTPUT, "Serve figures to Prometheus; 0: a free port.", metavar="[HOST:]PORT"),
]

_CHECKPOINT = Annotated[
    str | None, _option(_CHECKPOINTS, "Place of durable checkpoints.", metavar="DIR|URL")
]
_EVERY = Annotated[
    str, _option(_CHECKPOINTS, "Interval: 100 (steps), 90s, 10m or 2h.", metavar="INTERVAL")
]
_KEEP = Annotated[int, _option(_CHECKPOINTS, "Newest ones to keep; 0: all.", metavar="N", min=0)]
_RESUME = Annotated[bool, _option(_CHECKPOINTS, "Begin with the newest valid one.", "--resume")]
_AUTO_RESUME = Annotated[bool, _option(_CHECKPOINTS, "Restart from it if the state is lost.")]
_MEMORY = Annotated[
    str,
    _option(_CHECKPOINTS, "Copies in memory: auto, off, or every N steps.", metavar="auto|off|N"),
]

_MAX_RESTARTS = Annotated[
    int, _option(_RECOVERY, "Restarts of a group without a commit.", metavar="N")
]
_REFORM = Annotated[bool, _option(_RECOVERY, "Replace one lost rank alone.")]
_SPARES = Annotated[
    int, _option(_RECOVERY, "Processes that wait to replace ranks.", metavar="N", min=0)
]
_REFORM_WINDOW = Annotated[
    float | None, _option(_RECOVERY, "Wait for a rank's successor.", metavar="S")
]
_DIAGNOSE_AFTER = Annotated[
    int, _option(_RECOVERY, "Diagnose after N rollbacks; 0: never.", metavar="N", min=0)
]
_EVICT_STRAGGLERS = Annotated[
    float | None,
    _option(_RECOVERY, "Restart groups slower than FACTOR × the median.", metavar="FACTOR"),
]

_JOIN = Annotated[bool, _option(_MACHINES, "Join the job that FFT_BUS names.", "--join")]
_FIRST_GROUP = Annotated[
    int, _option(_MACHINES, "Number of the first group here.", metavar="N", min=0)
]
_ALL_GROUPS = Annotated[
    int | None, _option(_MACHINES, "Number of groups on all hosts.", metavar="N")
]
_HOST_LIMIT = Annotated[
    float, _option(_MACHINES, "Seconds of silence until a host is lost.", metavar="S")
]
_TAKE_OVER = Annotated[bool, _option(_MACHINES, "Take over running groups.", "--take-over")]

_FAULTS = Annotated[Path | None, _option(_TESTS, "Fault plan (YAML).", metavar="FILE")]
_INJECTABLE = Annotated[bool, _option(_TESTS, "Allow `fft dev inject`.", "--injectable")]
_STOP_AFTER_PLAN = Annotated[
    int | None, _option(_TESTS, "Drain so many steps after the plan.", metavar="STEPS")
]
_MIN_STEPS = Annotated[
    int, _option(_TESTS, "With --stop-after-plan: earliest step.", metavar="STEP")
]
_WITH_PARENT = Annotated[
    bool, typer.Option("--with-parent", help="End when the process that started this one ends.")
]


def _calm_lighthouse() -> None:
    """Keep torchft's lighthouse from logging each request; call this before importing torchft."""
    os.environ.setdefault("RUST_LOG", "error")


def _wants_lighthouse(given: bool | None, needed: bool) -> bool:
    """Whether to serve a lighthouse; without an option, if the job cannot do without one."""
    return needed if given is None else given


_KILLS = (signal.SIGINT, signal.SIGTERM)
"""Signals that drain the job when the first arrives and kill it when a second arrives."""
_WARNS = (signal.SIGUSR1, signal.SIGHUP)
"""Signals that drain the job and never kill it: a scheduler's warning, and a lost terminal."""
_SAME_S = 2.0
"""Seconds within which a second SIGTERM counts as a repetition of the first: a scheduler may send
it twice, to the process and to the whole SLURM job step."""


class Interrupts:
    """A signal handler that notifies the supervisor, and remembers signals that come before it."""

    def __init__(self) -> None:
        self.output = os.devnull
        """File that standard output and error are redirected to when the terminal is lost."""
        self._tell: Callable[[], None] | None = None
        self._is_asked = False
        self._drain, self._kill = [True], [True]
        """What the supervisor is to be told. A pop cannot happen twice, even if a signal is taken
        within the handler of another."""
        self._taken: list[tuple[int, float]] = []
        """The signals of `_KILLS` and their times on the monotonic clock."""
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def go_to(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once to drain and a second time to kill, also for earlier signals."""
        self._tell = tell
        if self._is_asked:
            self._notify(self._drain)

    def take(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal. One that kills ends this process if there is no supervisor yet."""
        if number == signal.SIGHUP:
            self._leave_terminal()
        is_repeated, was_asked = self._is_repeated(number), self._is_asked
        self._is_asked = True
        if self._tell is not None:
            self._notify(self._drain)
            if is_repeated:
                self._notify(self._kill)
        elif is_repeated:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            os._exit(128 + number)  # PID 1 is not ended by a signal's default action
        elif not was_asked:
            write_err("interrupted; the job ends when its start is complete")

    def _notify(self, untold: list[bool]) -> None:
        with suppress(IndexError):
            untold.pop()
            cast("Callable[[], None]", self._tell)()

    def _is_repeated(self, number: int) -> bool:
        """Whether this is a second signal of `_KILLS`, and not a repeated SIGTERM."""
        if number not in _KILLS:
            return False
        now = time.monotonic()
        self._taken.append((number, now))
        first, at = self._taken[0]
        if len(self._taken) == 1:
            return False
        return first != signal.SIGTERM or number != signal.SIGTERM or now > at + _SAME_S

    def _leave_terminal(self) -> None:
        """Redirect output to a file, because a failed write to the terminal would end the job."""
        if self._terminals:
            file = os.open(self.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            for fd in self._terminals:
                os.dup2(file, fd)
            os.close(file)
            self._terminals = []


@contextmanager
def _interrupts() -> Iterator[Interrupts]:
    made = Interrupts()
    # An ignored SIGHUP stays ignored, because the command runs under nohup.
    taken = [n for n in (*_KILLS, *_WARNS) if signal.getsignal(n) != signal.SIG_IGN]
    previous = {n: signal.signal(n, made.take) for n in taken}
    try:
        yield made
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def serve(
    host: Annotated[
        str | None, typer.Option(help="This host's address. Default: 127.0.0.1, or from --hosts.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the bus; 0: a free one.")] = 0,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="A,B,C,…", help="Hosts of the job; run the same command on each."),
    ] = None,
    lighthouse_port: Annotated[
        int, typer.Option(help="Port of the lighthouse; 0: a free one.")
    ] = 0,
    job: Annotated[str | None, typer.Option(help="Name of the job. Default: a new one.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File of the job's token; created if it does not exist.")
    ] = None,
    bus: Annotated[
        BusKind | None,
        _option(
            None, "Message bus. Default: tcp; nats with three --hosts or more.", metavar="tcp|nats"
        ),
    ] = None,
    lighthouse: _LIGHTHOUSE = None,
    with_parent: _WITH_PARENT = False,
) -> None:
    """Serve a bus until SIGINT, SIGTERM or SIGHUP, and print how to reach it.

    With three --hosts or more, NATS servers on the first three form the bus. With two, or without
    NATS, the first host serves it. On a host without a server, the command prints the same line and
    ends.
    """
    from fft.bus.token import JobToken
    from fft.launch.services import SIGNALS, handed_over, serve_forever, start_services
    from fft.util.die_with_parent import end_with_parent

    if with_parent:
        end_with_parent(SIGNALS)
    _calm_lighthouse()
    wants_lighthouse = _wants_lighthouse(lighthouse, lighthouse_port != 0)
    with plain_errors():
        if hosts:
            _serve_on(hosts.split(","), host, port, job, bus, wants_lighthouse, token_file)
            return
        with handed_over(token_file) as path:
            services = start_services(
                host or "127.0.0.1",
                port,
                lighthouse_port,
                job,
                bus_kind=(bus or BusKind.tcp).value,
                with_lighthouse=wants_lighthouse,
                token=JobToken.from_env() if path is None else JobToken.from_file(path),
            )
            serve_forever(services, path)


def _serve_on(
    hosts: Sequence[str],
    host: str | None,
    port: int,
    job: str | None,
    bus: BusKind | None,
    wants_lighthouse: bool,
    token_file: Path | None,
) -> None:
    """Start the server of this host, if it has one, and print how to reach the bus of all hosts."""
    from fft.bus.token import JobToken
    from fft.launch import services

    if wants_lighthouse:
        raise FftError("--hosts serves no lighthouse: run another `fft serve --lighthouse` for it")
    if not (token_file or JobToken.from_env()):
        raise FftError(
            "--hosts needs the same job token on all hosts: add --token-file FILE, on a common "
            "disk or copied to each host"
        )
    if host is not None and host not in hosts:
        raise FftError(f"--host {host}: expected one of --hosts {','.join(hosts)}")
    notice = services.bus_notice(len(hosts), services.nats_is_installed())
    if bus is None and notice:
        write_err(notice)
    kind = bus or (BusKind.tcp if notice else BusKind.nats)
    with services.handed_over(token_file) as path:
        token = JobToken.from_env() if path is None else JobToken.from_file(path)
        assert token is not None
        place = services.BusHosts.of(hosts, kind.value, token, port, job or "")
        own = host or place.own()
        if own is None or own not in place.hosts:
            put(services.announced(f"FFT_BUS={place.url}", path))
            return
        for number in services.SIGNALS:
            # `place.start` waits for the other hosts; a signal must end the server meanwhile, too
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        services.serve_forever(place.start(own, token), path)


def run(
    script: _SCRIPT,
    arguments: _ARGUMENTS = None,
    groups: _GROUPS = 1,
    ranks: _RANKS = 1,
    faults: _FAULTS = None,
    injectable: _INJECTABLE = False,
    trace_dir: _TRACE_DIR = None,
    min_groups: _MIN_GROUPS = 1,
    max_restarts: _MAX_RESTARTS = 10,
    stop_after_plan: _STOP_AFTER_PLAN = None,
    min_steps: _MIN_STEPS = 0,
    timeout: _TIMEOUT = None,
    drain_timeout: _DRAIN_TIMEOUT = 60.0,
    evict_stragglers: _EVICT_STRAGGLERS = None,
    progress: _PROGRESS = True,
    tee: _TEE = "first",
    metrics: _METRICS = None,
    diagnose_after: _DIAGNOSE_AFTER = 4,
    bus: _BUS_KIND = BusKind.tcp,
    join: _JOIN = False,
    ranks_per_host: _RANKS_PER_HOST = None,
    first_group: _FIRST_GROUP = 0,
    all_groups: _ALL_GROUPS = None,
    take_over: _TAKE_OVER = False,
    host_limit: _HOST_LIMIT = HOST_LIMIT_S,
    reform: _REFORM = True,
    spares: _SPARES = 0,
    reform_window: _REFORM_WINDOW = None,
    lighthouse: _LIGHTHOUSE = None,
    checkpoint: _CHECKPOINT = None,
    every: _EVERY = EVERY,
    keep: _KEEP = KEEP,
    resume: _RESUME = False,
    auto_resume: _AUTO_RESUME = True,
    memory: _MEMORY = "auto",
) -> None:
    """Run SCRIPT in groups x ranks processes, and restart processes that die.

    SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP drain the job; a second SIGINT or SIGTERM kills it.
    """
    options = locals()
    with _interrupts() as interrupts, plain_errors():
        options["script"] = [str(script), *(arguments or [])]
        options["checkpoint"] = _checkpointing(checkpoint, every, keep, resume, memory)
        config = _config(options, join)
        plan = _plan(config)
        restarts = any(fault.kind == "lighthouse_restart" for fault in plan.faults)
        serve = None if join else (bus, _wants_lighthouse(lighthouse, restarts))
        found = _all_starts(config, plan, join, progress, metrics, serve, interrupts)
        _tell(*found)  # still inside `_interrupts`, so a signal does not cut the report


def _all_starts(
    config: RunConfig,
    plan: FaultPlan,
    join: bool,
    progress: bool,
    metrics: str | None,
    serve: tuple[BusKind, bool] | None,
    interrupts: Interrupts,
) -> tuple[JobOutcome, RunConfig]:
    """Run all starts of the job; return how the last one ended, and its configuration."""
    from fft.launch.exit_status import AGAIN
    from fft.launch.resuming import Resumptions, begun, held
    from fft.launch.supervisor import Script

    traces = config.trace_dir
    # one fork server for all starts: the imports of torch take longer than the rest
    with (
        held(config, join) as (config, keep_copies),
        _served(metrics) as follow,
        closing(Script(config.script)) as processes,
    ):

        def supervise(config: RunConfig, plan: FaultPlan) -> JobOutcome:
            follow(config.trace_dir)
            return _supervise(config, plan, progress, serve, interrupts, processes)

        config = begun(config, join)
        verdict, config = Resumptions(supervise, write_err, join).run(config, plan, traces)
        if verdict.exit_status in AGAIN and config.has_copies:
            keep_copies()
    return verdict, config


@contextmanager
def _served(address: str | None) -> Iterator[Callable[[Path], object]]:
    """Serve figures at ``address``; yield a function that names the traces of a start."""
    if address is None:
        yield lambda folder: None
        return
    from fft.launch.metrics_process import MetricsProcess

    with closing(MetricsProcess(address, write_err)) as process:
        write_err(f"metrics for Prometheus: {process.url}")
        yield process.follow


def _config(options: Mapping[str, Any], join: bool) -> RunConfig:
    """Make the configuration of which ``options`` has the fields. Raises SupervisorError."""
    from fft.launch.supervisor import RunConfig
    from fft.launch.trace_directory import refuse_launcher

    if not join:
        refuse_launcher()
    given = {each.name: options[each.name] for each in fields(RunConfig) if each.name in options}
    given["trace_dir"] = options["trace_dir"] or own_folder(
        Path("runs"), f"{datetime.now():%Y%m%d-%H%M%S}"
    )
    config = RunConfig(**given)
    config.check(join)
    return config


def _plan(config: RunConfig) -> FaultPlan:
    """Load the fault plan, which is empty if none is given."""
    from fft.messages.fault_plans import FaultPlan, load_plan

    if config.faults is None:
        return FaultPlan(faults=[])
    return load_plan(config.faults, config.groups_in_all, config.ranks)


def _tell(verdict: JobOutcome, config: RunConfig) -> NoReturn:
    from fft.launch.exit_status import IN_A_WORD
    from fft.launch.resuming import about_newest
    from fft.operate.job_file import JobFile, look_further
    from fft.trace.starts import root_of

    for line in verdict.lines:
        write_err(line)
    if config.checkpoint is not None:
        write_err(about_newest(config.checkpoint, verdict))
    folder, status = root_of(config.trace_dir), verdict.exit_status
    text = f"{IN_A_WORD[status]}, at step {verdict.step}"
    if (job := JobFile.read(folder)) is not None and job.pid == os.getpid():
        job.note_end(f"{text} (exit status {status:d})")
    logs = config.trace_dir / "logs"
    put(f"the job has ended: {text}. Logs: {logs}\n{look_further(folder)}\n")
    raise typer.Exit(int(status))


def _checkpointing(
    place: str | None, every: str, keep: int, resume: bool, memory: str
) -> Checkpointing | None:
    """Return the checkpoint settings of the command line, or None. Raises FftError."""
    if resume and not place and memory == "off":
        raise FftError("--resume needs --checkpoint, the place of the checkpoints, or --memory")
    if not place and (every, keep) != (EVERY, KEEP):
        raise FftError("--every and --keep need --checkpoint, the place of the checkpoints")
    return Checkpointing(place, every, keep, resume) if place else None


def _supervise(
    config: RunConfig,
    plan: FaultPlan,
    progress: bool,
    serve: tuple[BusKind, bool] | None,
    interrupts: Interrupts,
    script: Script,
) -> JobOutcome:
    """Start the services and supervise the job in this process.

    Args:
        serve: Kind of bus and whether to start a lighthouse, or None to join a running job.
        interrupts: Drains the job at the first signal and kills it at the second.
        script: Starts the processes.
    """
    _calm_lighthouse()
    # With a wrong interface name all ranks would fail and be restarted, so check it here.
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        from fft.train.process_groups.gloo import check_interfaces

        check_interfaces()
    from fft.bus.token import JobToken
    from fft.launch.memory import refuse_copies
    from fft.launch.services import Services, start_services
    from fft.launch.supervisor import Joined, Supervisor
    from fft.trace.display import SafeConsole, SilentDisplay, open_display

    token = JobToken.from_env()
    services: Services | Joined
    if serve is None:
        assert config.bus_url is not None  # `begun` has set it
        services = replace(Joined.from_env(), bus_url=config.bus_url)
    else:
        bus, lighthouse = serve
        token = token or JobToken.fresh()
        services = start_services(
            min_groups=config.min_groups,
            bus_kind=bus.value,
            with_lighthouse=lighthouse,
            token=token,
        )
    try:
        if serve is not None and config.has_other_hosts and token is not None:
            refuse_copies(services.bus_url, token)
        display = open_display(SafeConsole()) if progress else SilentDisplay(SafeConsole())
        supervisor = Supervisor(config, plan, services, display, token, script)
        interrupts.output = str(config.trace_dir / "fft-run.log")
        interrupts.go_to(supervisor.interrupt)
        with ExitStack() as undo:
            reach = services.settings()
            if token is not None:
                reach["FFT_TOKEN_FILE"] = _token_file(token, config.trace_dir, undo)
            _announce(config.trace_dir, reach, serves=serve is not None)
            return supervisor.run()
    finally:
        services.close()


def _token_file(token: JobToken, traces: Path, undo: ExitStack) -> str:
    """Return the path of a file with the token; one that is made here is removed by ``undo``."""
    from fft.util.files import claimed
    from fft.util.remove_after_death import vanishing

    if named := os.environ.get("FFT_TOKEN_FILE"):
        return named
    path = claimed(traces / "job.token")  # other hosts may share the folder
    token.save(path)
    undo.enter_context(vanishing(path))
    return str(path)


def _announce(traces: Path, reach: Mapping[str, str], serves: bool) -> None:
    """Write down and print how the job is reached; hosts that join share the first one's file."""
    from fft.bus.addresses import without_password
    from fft.launch.services import in_words
    from fft.operate.job_file import JobFile
    from fft.trace.starts import root_of

    folder = root_of(traces)
    shown = {**reach, "FFT_BUS": without_password(reach["FFT_BUS"])}
    found = JobFile.read(folder)
    if serves or found is None or found.settings.get("FFT_BUS") != reach["FFT_BUS"]:
        JobFile.of(traces, reach, serves).write()
    write_err(f"to watch this job: fft watch {folder}; from another machine: {in_words(shown)}")


def own_folder(root: Path, name: str) -> Path:
    """Create a new folder in ``root``: ``name``, or ``name-2``, ``name-3`` … if it is taken."""
    for number in itertools.count(1):
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise FftError(
                f"{folder} cannot be made: {error.strerror}; name a --trace-dir"
            ) from error
        return folder
    raise AssertionError("there is always a number")

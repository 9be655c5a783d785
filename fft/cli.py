"""The ``fft`` command. Every command imports what it needs by itself, so that ``fft --help``
and the commands on specs and traces load no torch.

This is the only module that takes signal handlers of the process (`run`, `serve`, `watch`) and that
ends it with an exit code: 0 good, 1 the job or the audit failed, 2 bad input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fft.protocol.timeouts import HOST_LIMIT_S
from fft.util.errors import FftError

if TYPE_CHECKING:
    from fft.launch.supervisor import JobOutcome, RunConfig
    from fft.messages.fault_plans import FaultPlan
    from fft.operate.client import JobClient

app = typer.Typer(
    help="Fast Fault Tolerance: every PyTorch training step is a transaction.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
_Bus = Annotated[str | None, typer.Option(help="URL of the job's bus; FFT_BUS if absent.")]
_SPEC = typer.Argument(help="A spec: a name such as hsdp, or the path of a YAML file.")


class GraphFormat(StrEnum):
    """What ``fft graph`` can draw."""

    mermaid = "mermaid"
    dot = "dot"


class BusKind(StrEnum):
    """The buses that can be hosted here."""

    tcp = "tcp"
    nats = "nats"


_BUS_KIND = Annotated[BusKind, typer.Option(help="In this process, or NATS servers.")]
_CLUSTER = Annotated[int, typer.Option(help="NATS servers: 1, 3 or 5.")]
_LIGHTHOUSE = Annotated[
    bool,
    typer.Option(help="Serve torchft's lighthouse, for its dashboard and the like of it."),
]


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn an error meant for the user into its text on stderr and exit code 2."""
    try:
        yield
    except FftError as error:
        sys.stderr.write(f"fft: {error}\n")
        raise typer.Exit(2) from error


def _console() -> Console:
    console = Console()
    if not console.is_terminal:  # a pipe has no width; 80 columns would fold every cell
        console.width = 130
    return console


def _calm_lighthouse() -> None:
    """Keep torchft's lighthouse from logging each request. Before torchft is imported."""
    os.environ.setdefault("RUST_LOG", "error")


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the bus; 0 takes a free one.")] = 0,
    lighthouse_port: Annotated[int, typer.Option(help="Port of the lighthouse; 0 likewise.")] = 0,
    job: Annotated[str | None, typer.Option(help="Name of the job; a fresh one if absent.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File of the job's token, made if it is not there.")
    ] = None,
    bus: _BUS_KIND = BusKind.tcp,
    cluster: _CLUSTER = 1,
    lighthouse: _LIGHTHOUSE = True,
) -> None:
    """Host bus and lighthouse; print how to find them; run until SIGINT or SIGTERM."""
    from fft.launch.services import handed_over, serve_forever, start_services

    _calm_lighthouse()
    with _plain_errors(), handed_over(token_file) as path:
        services = start_services(
            host,
            port,
            lighthouse_port,
            job,
            bus_kind=bus.value,
            cluster=cluster,
            with_lighthouse=lighthouse,
        )
        serve_forever(services, path)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    groups: Annotated[int, typer.Option(help="Number of replica groups.")] = 1,
    ranks: Annotated[int, typer.Option(help="Ranks in each group.")] = 1,
    faults: Annotated[Path | None, typer.Option(help="Fault plan to inject (YAML).")] = None,
    injectable: Annotated[
        bool, typer.Option("--injectable", help="Allow `fft inject` to break this job.")
    ] = False,
    trace_dir: Annotated[
        Path | None, typer.Option(help="For traces and logs; runs/<time> if absent.")
    ] = None,
    min_groups: Annotated[int, typer.Option(help="Give up with fewer usable groups.")] = 1,
    max_restarts: Annotated[int, typer.Option(help="Restarts of a group without progress.")] = 10,
    stop_after_plan: Annotated[
        int | None, typer.Option(help="Drain this many steps after the plan is through.")
    ] = None,
    min_steps: Annotated[int, typer.Option(help="And not before this step.")] = 0,
    timeout: Annotated[float | None, typer.Option(help="Kill the job after so many s.")] = None,
    drain_timeout: Annotated[float, typer.Option(help="Kill a drain after so many s.")] = 60.0,
    evict_stragglers: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR", help="Start a group again if a rank is so many times slower."
        ),
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show the groups while they run.")] = True,
    diagnose_after: Annotated[
        int, typer.Option(min=0, help="Rollbacks in a row before a diagnosis; 0: never.")
    ] = 4,
    bus: _BUS_KIND = BusKind.tcp,
    cluster: _CLUSTER = 1,
    join: Annotated[
        bool, typer.Option("--join", help="Serve nothing: take part in what FFT_BUS names.")
    ] = False,
    first_group: Annotated[int, typer.Option(help="Number of the first group here.")] = 0,
    all_groups: Annotated[
        int | None, typer.Option(help="Groups on all hosts; those up to ours if absent.")
    ] = None,
    host_limit: Annotated[
        float, typer.Option(help="Seconds of silence before other hosts go on without this one.")
    ] = HOST_LIMIT_S,
    lighthouse: _LIGHTHOUSE = True,
) -> None:
    """Run SCRIPT as groups x ranks processes; restart what dies; SIGTERM drains."""
    from fft.launch.supervisor import RunConfig
    from fft.messages.fault_plans import FaultPlan, load_plan

    with _plain_errors():
        config = RunConfig(
            script=[str(script), *(arguments or [])],
            groups=groups,
            ranks=ranks,
            trace_dir=trace_dir or Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}"),
            faults=faults,
            injectable=injectable,
            min_groups=min_groups,
            max_restarts=max_restarts,
            stop_after_plan=stop_after_plan,
            min_steps=min_steps,
            timeout=timeout,
            drain_timeout=drain_timeout,
            evict_stragglers=evict_stragglers,
            diagnose_after=diagnose_after,
            host_limit=host_limit,
            first_group=first_group,
            all_groups=all_groups,
        )
        config.check()
        total = config.groups_in_all
        plan = load_plan(faults, total, ranks) if faults else FaultPlan(faults=[])
        verdict = _supervise(config, plan, progress, None if join else (bus, cluster, lighthouse))
    for line in verdict.lines:
        sys.stderr.write(f"fft: {line}\n")
    sys.stdout.write(f"traces and logs: {config.trace_dir}\n")
    raise typer.Exit(0 if verdict.ok else 1)


def _supervise(
    config: RunConfig,
    plan: FaultPlan,
    progress: bool,
    serve: tuple[BusKind, int, bool] | None,
) -> JobOutcome:
    """Serve and supervise in this process; SIGINT and SIGTERM drain, a second one kills.

    ``serve``: kind of bus, its servers, and whether there is a lighthouse; None: join.
    """
    _calm_lighthouse()
    from fft.bus.token import JobToken
    from fft.launch.services import Services, in_words, start_services
    from fft.launch.supervisor import Joined, Supervisor
    from fft.trace.tail import open_display

    token = JobToken.from_env()
    services: Services | Joined
    if serve is None:
        services = Joined.from_env()
    else:
        bus, cluster, lighthouse = serve
        token = token or JobToken.fresh()
        services = start_services(
            min_groups=config.min_groups,
            bus_kind=bus.value,
            cluster=cluster,
            with_lighthouse=lighthouse,
        )
    try:
        display = open_display(Console()) if progress else None
        supervisor = Supervisor(config, plan, services, display, token)
        previous = {
            number: signal.signal(number, lambda *_: supervisor.interrupt())
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        config.trace_dir.mkdir(parents=True, exist_ok=True)
        path = config.trace_dir / "job.token"  # for who wants to say something to the job
        try:
            reach = services.settings()
            if token is not None:
                token.save(path)
                reach["FFT_TOKEN_FILE"] = str(path)
            sys.stderr.write(f"fft: to watch and to steer this job: {in_words(reach)}\n")
            return supervisor.run()
        finally:
            path.unlink(missing_ok=True)
            for number, handler in previous.items():
                signal.signal(number, handler)
    finally:
        services.close()


@app.command()
def audit(
    directory: Annotated[Path, typer.Argument(help="A trace directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Replay traces against the spec and all invariants; exit 1 on a violation."""
    from fft.trace.audit import audit_dir

    with _plain_errors():
        found = audit_dir(directory)
        text = json.dumps(found.to_json(), indent=2) if as_json else found.render()
    sys.stdout.write(text.rstrip("\n") + "\n")
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="A trace directory.")]) -> None:
    """Show each fault of a run: how it was noticed, what it cost; and waits for input."""
    from fft.trace.report import fault_table, input_wait, place_table

    with _plain_errors():
        shown = [fault_table(directory), place_table(directory), input_wait(directory)]
    for part in filter(None, shown):
        _console().print(part)


@app.command()
def simulate(
    spec: Annotated[
        str, typer.Argument(help="A spec: a name, or the path of a YAML file.")
    ] = "hsdp",
    seeds: Annotated[
        int | None, typer.Option(help="How many seeds to run; 1000 if absent.")
    ] = None,
    first: Annotated[int, typer.Option(help="The first of them.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Processes to run them in; one per core if absent.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Run this one seed, and tell more.")] = None,
    trace_dir: Annotated[
        Path | None,
        typer.Option(help="For the traces of --seed, or of seeds that fail (runs/simulate)."),
    ] = None,
) -> None:
    """Live whole jobs under seeds, with faults of every kind; exit 1 on a violation."""
    from fft.prove.simulator.batch import simulate as run_seeds

    with _plain_errors():
        good = run_seeds(spec, seeds, first, jobs, seed, trace_dir, _console())
    raise typer.Exit(0 if good else 1)


@app.command()
def check(
    spec: Annotated[str, _SPEC],
    deep: Annotated[bool, typer.Option("--deep", help="Wider bounds; takes half an hour.")] = False,
    scope: Annotated[
        list[str] | None, typer.Option(help="Only this scope; may be given several times.")
    ] = None,
    property_: Annotated[
        list[str] | None,
        typer.Option("--property", help="Only this invariant; may be given several times."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="States for each scope at most.")] = None,
    save: Annotated[
        Path, typer.Option(help="Folder for counterexamples, as scenario files.")
    ] = Path("runs/check"),
) -> None:
    """Search every state of a spec within bounds; exit 1 on a violation."""
    from fft.prove.searches import Choice
    from fft.prove.searches import check as search

    choice = Choice(deep, tuple(scope or ()), tuple(property_ or ()), limit, save)
    with _plain_errors():
        good = search(spec, choice, _console())
    raise typer.Exit(0 if good else 1)


@app.command()
def mutants(
    write: Annotated[
        Path | None, typer.Option(help="Put the table between the markers of this file.")
    ] = None,
) -> None:
    """Plant known bugs and show which property catches each; exit 1 if one survives."""
    from fft.prove.searches import mutants as plant

    with _plain_errors():
        good = plant(write, _console())
    raise typer.Exit(0 if good else 1)


@app.command()
def graph(
    spec: Annotated[str, _SPEC],
    form: Annotated[GraphFormat, typer.Option("--format", help="Language.")] = GraphFormat.mermaid,
) -> None:
    """Draw a spec's machine as text."""
    from fft.protocol.graph import to_dot, to_mermaid
    from fft.protocol.load import load_spec

    with _plain_errors():
        loaded = load_spec(spec)
        text = to_dot(loaded) if form is GraphFormat.dot else to_mermaid(loaded)
    sys.stdout.write(text.rstrip("\n") + "\n")


@app.command(name="spec")
def check_spec(spec: Annotated[str, _SPEC]) -> None:
    """Validate a spec and summarise it."""
    from fft.protocol.load import load_spec

    with _plain_errors():
        loaded = load_spec(spec)
    tables = [owner.on for _, owner in loaded.row_owners()]
    rows = sum(len(alternatives) for table in tables for alternatives in table.values())
    states = ", ".join(loaded.leaves)
    sys.stdout.write(f"{loaded.name}: valid; {rows} rows; {len(loaded.leaves)} states: {states}\n")


@app.command()
def config(
    spec: Annotated[str, typer.Argument(help="A spec: a name, or a path.")] = "hsdp",
    chosen: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=SECONDS", help="As if given; several times."),
    ] = None,
    bus: Annotated[
        str, typer.Option(envvar="FFT_BUS", help="URL of the job's bus, or what it begins with.")
    ] = "tcp://",
) -> None:
    """Show every timeout: what it bounds, and where its value is from; refuse what cannot work."""
    from rich.table import Table

    from fft.protocol.load import load_spec
    from fft.protocol.timeouts import from_env, from_pairs, resolve

    with _plain_errors():
        given = {**from_env(os.environ), **from_pairs(chosen or ())}
        timeouts = resolve(load_spec(spec), given, bus).values()
    table = Table("timeout", "seconds", "bounds", "from")
    for timeout in timeouts:
        table.add_row(timeout.name, f"{timeout.seconds:g}", timeout.bounds, timeout.origin)
    _console().print(table)


# --- operators -------------------------------------------------------------------------


@contextmanager
def _desk(bus: str | None) -> Iterator[JobClient]:
    """An operator's place at the job's bus, with plain errors."""
    from fft.operate.client import JobClient, bus_url

    with _plain_errors(), JobClient(bus_url(bus)) as desk:
        yield desk


@app.command()
def drain(
    groups: Annotated[list[str], typer.Argument(help="Replica groups, by name.")],
    bus: _Bus = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for it.")] = 60.0,
) -> None:
    """Let groups leave a running job after a commit; nobody rolls back for it."""
    from fft.operate.drain import drain as ask

    with _desk(bus) as desk:
        record = ask(desk, groups, wait)
    sys.stdout.write(f"group {', '.join(groups)} has left at step {record.step}\n")


@app.command()
def evict(
    place: Annotated[str, typer.Argument(metavar="GROUP[.RANK]", help="Whom.")],
    bus: _Bus = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start the group again.")] = False,
    grace: Annotated[float, typer.Option(min=0, max=600, help="Seconds before SIGKILL.")] = 10.0,
) -> None:
    """Leave a group out at once, and have its supervisor end its processes."""
    from fft.operate.drain import evict as ask

    def on_accepted(text: str) -> None:
        sys.stdout.write(text + "\n")

    with _desk(bus) as desk:
        done = ask(desk, place, restart=restart, grace=grace, on_accepted=on_accepted)
    sys.stdout.write(done.done + "\n")


@app.command()
def diagnose(
    bus: _Bus = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    evict: Annotated[
        bool, typer.Option("--evict", help="Leave the groups of the culprits out, for good.")
    ] = False,
    trace_dir: Annotated[
        Path | None, typer.Option(help="The job's, if at hand: for the last rollbacks.")
    ] = None,
    limit: Annotated[
        float, typer.Option(min=1, max=120, help="Seconds for one check of one rank.")
    ] = 20.0,
) -> None:
    """Check all ranks of a running job, alone and in pairs; exit 1 if one is found at fault."""
    from fft.operate.diagnosis import show
    from fft.operate.diagnosis.rounds import diagnose as ask

    rollbacks = show.traced_rollbacks(trace_dir) if trace_dir is not None else ()
    with _desk(bus) as desk:
        found = ask(desk, rollbacks, limit)
        if evict:
            show.evict_culprits(desk, found)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(), indent=2) + "\n")
    else:
        _console().print(show.table(found))
        sys.stdout.write("\n".join(found.lines()) + "\n")
    raise typer.Exit(1 if found.verdict.culprits else 0)


@app.command()
def inject(
    kind: Annotated[str, typer.Argument(help="What to inject; `any` with --random.")],
    bus: _Bus = None,
    group: Annotated[str | None, typer.Option(help="The group it befalls.")] = None,
    rank: Annotated[int | None, typer.Option(help="The rank; 0 where a kind needs one.")] = None,
    step: Annotated[int | None, typer.Option(help="Not before this step; now if absent.")] = None,
    now: Annotated[bool, typer.Option("--now", help="At once; the same as no --step.")] = False,
    phase: Annotated[str | None, typer.Option(help="Where in the step; `next` if absent.")] = None,
    seconds: Annotated[float | None, typer.Option(help="How long: hang, stop, slow.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps: slow.")] = None,
    holding_gil: Annotated[
        bool | None, typer.Option("--holding-gil", help="Keep the interpreter's lock: hang.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="before or after the reduction: nan_gradient.")
    ] = None,
    random: Annotated[
        int | None, typer.Option(metavar="SEED", help="Draw places; print the plan.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="With --random: how many faults.")] = 1,
    every: Annotated[int, typer.Option(min=1, help="With --random: steps between them.")] = 10,
) -> None:
    """Break a running job on purpose, if it was started to allow it."""
    from fft.operate import inject
    from fft.operate.client import OperatorError

    given = {"group": group, "rank": rank, "phase": phase, "seconds": seconds, "steps": steps}
    given |= {"holding_gil": holding_gil, "where": where}
    options = {name: value for name, value in given.items() if value is not None}
    with _desk(bus) as desk:
        if now and step is not None:
            raise OperatorError("--now and --step contradict each other; give one")
        job = desk.job()
        if random is None:
            plan = inject.single(job, kind, step, options)
        else:
            plan = inject.drawn(job, kind, random, count, every, step, options)
            sys.stdout.write(inject.as_yaml(plan))
        answers = inject.send(desk, job, plan)
    for answer in answers:
        sys.stderr.write(f"fft: {answer.text}\n")
    raise typer.Exit(0 if all(answer.ok for answer in answers) else 1)


@app.command()
def watch(
    bus: _Bus = None,
    once: Annotated[bool, typer.Option("--once", help="Show it as it is now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per event.")] = False,
) -> None:
    """Show a running job from its bus alone, until Ctrl-C."""
    from fft.operate.client import bus_url
    from fft.operate.watch import Watch, watch_job

    def stop_at_signals(watch: Watch) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: watch.stop())

    with _plain_errors():
        url, out = bus_url(bus), _console()
        watch_job(url, out, sys.stdout, once=once, as_json=as_json, begin=stop_at_signals)


@app.command()
def say(
    message: Annotated[
        str | None, typer.Argument(help="JSON, a file with JSON, or - for standard input.")
    ] = None,
    bus: _Bus = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send it whatever it is.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the forms; send nothing.")
    ] = False,
) -> None:
    """Send a message to a job: a death that was seen, a drain; see docs/messages.md."""
    from fft.operate import say as saying

    if schema:
        sys.stdout.write(json.dumps(saying.schema(), indent=2) + "\n")
        return
    with _plain_errors():
        text, source = saying.read(message)
        payload = text if raw else saying.checked(text, source)
    with _desk(bus) as desk:
        desk.bus.broadcast(payload, saying.topic_of(payload))


@app.command()
def schema() -> None:
    """Print the JSON schema of specs, for editors."""
    from fft.protocol.load import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


if __name__ == "__main__":
    app()

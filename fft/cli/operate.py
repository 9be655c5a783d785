"""The operators' commands for a running job: drain, evict, diagnose, inject, watch, say.

All of them use only the job's bus.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fft.cli.shared import BusUrl, console, job_client, plain_errors
from fft.util.terminal import put, write_err

if TYPE_CHECKING:
    from fft.operate.watch import View

_GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL for an evicted process."""


def drain(
    groups: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="GROUP… [DIR]", help="Replica groups, by name; then the job's trace directory."
        ),
    ] = None,
    bus: BusUrl = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait until they have left.")] = 60.0,
    all_groups: Annotated[
        bool, typer.Option("--all", help="All groups, which leave with one commit.")
    ] = False,
    undo: Annotated[
        bool,
        typer.Option(
            "--undo",
            help="Start groups again that were drained or evicted; they join after a commit.",
        ),
    ] = False,
) -> None:
    """Let groups leave a running job after a commit; no group rolls back for it."""
    from fft.operate.drain import bring_back
    from fft.operate.drain import drain as ask
    from fft.operate.job_file import split_folder

    given = groups or []
    if undo and all_groups:
        raise typer.BadParameter("--undo needs the names of the groups: leave out --all")
    if len(given) > 1 if all_groups else not given:
        raise typer.BadParameter("expected names of groups, or --all and at most a directory")
    names, folder = ([], next(map(Path, given), None)) if all_groups else split_folder(given)
    with job_client(bus, folder) as client:
        if undo:
            for name in names:
                bring_back(client, name)
                put(f"group {name} is started again, and joins after a commit\n")
            return
        present = sorted(client.job().groups)
        names = names or present
        record = ask(client, names, wait)
    goes_on = f"`fft drain --undo {names[0]}` starts it again"
    if set(present) <= set(names):
        goes_on = "no group is left, so the job ends; start it again to resume from its checkpoint"
    put(f"group {', '.join(names)} has left at step {record.step}; {goes_on}\n")


def evict(
    place: Annotated[
        str, typer.Argument(metavar="GROUP[.RANK]", help="The group, or a rank of it.")
    ],
    bus: BusUrl = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start the group again.")] = False,
) -> None:
    """Leave a group out at once, and have its supervisor end its processes."""
    from fft.operate.drain import evict as ask

    def on_accepted(text: str) -> None:
        put(text + "\n")

    with job_client(bus) as client:
        done = ask(client, place, restart=restart, grace=_GRACE_S, on_accepted=on_accepted)
    put(done.done + "\n")


def diagnose(
    bus: BusUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    evict: Annotated[
        bool, typer.Option("--evict", help="Evict the groups of the culprits for good.")
    ] = False,
    trace_dir: Annotated[
        Path | None, typer.Option(help="The job's traces, for the causes of the last rollbacks.")
    ] = None,
) -> None:
    """Check all ranks of a running job, alone and in pairs; exit 1 if one is found at fault."""
    from fft.operate.diagnosis.rounds import diagnose as ask
    from fft.operate.diagnosis.rounds import evict_culprits, table, traced_rollbacks

    rollbacks = traced_rollbacks(trace_dir) if trace_dir is not None else ()
    with job_client(bus) as client:
        found = ask(client, rollbacks)
        if evict:
            evict_culprits(client, found)
    if as_json:
        put(json.dumps(found.to_json(), indent=2) + "\n")
    else:
        console().print(table(found))
        put("\n".join(found.lines()) + "\n")
    raise typer.Exit(1 if found.verdict.culprits else 0)


def inject(
    kind: Annotated[str, typer.Argument(help="What to inject; `any` with --random.")],
    bus: BusUrl = None,
    group: Annotated[str | None, typer.Option(help="The group to hit.")] = None,
    rank: Annotated[int | None, typer.Option(help="The rank; 0 if the kind needs one.")] = None,
    step: Annotated[int | None, typer.Option(help="Not before this step; now if absent.")] = None,
    phase: Annotated[str | None, typer.Option(help="Where in the step; `next` if absent.")] = None,
    seconds: Annotated[float | None, typer.Option(help="How long: hang, stop, slow.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps: slow.")] = None,
    holding_gil: Annotated[
        bool | None, typer.Option("--holding-gil", help="Keep the interpreter's lock: hang.")
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="Draw the faults from this seed; print them as a plan."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="With --random: how many faults.")] = 1,
    every: Annotated[int, typer.Option(min=1, help="With --random: steps between them.")] = 10,
) -> None:
    """Inject faults into a running job that was started to allow it."""
    from fft.operate import inject

    given = {"group": group, "rank": rank, "phase": phase, "seconds": seconds, "steps": steps}
    given["holding_gil"] = holding_gil
    options = {name: value for name, value in given.items() if value is not None}
    with job_client(bus) as client:
        job = client.job()
        if random is None:
            plan = inject.single(job, kind, step, options)
        else:
            plan = inject.drawn(job, kind, random, count, every, step, options)
            put(inject.as_yaml(plan))
        answers = inject.send(client, job, plan)
    for answer in answers:
        write_err(answer.text)
    raise typer.Exit(0 if all(answer.ok for answer in answers) else 1)


def watch(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="The job's trace directory.")
    ] = None,
    bus: BusUrl = None,
    once: Annotated[bool, typer.Option("--once", help="Show the present state and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per event.")] = False,
    web: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve a live page; port 0 takes a free one."),
    ] = None,
) -> None:
    """Show a running job from its bus alone, until it ends or Ctrl-C."""
    from fft.operate.job_file import find_job
    from fft.operate.watch import Watch, watch_job

    if web is not None and (once or as_json):
        raise typer.BadParameter("--web cannot be combined with --once or --json: leave them out")

    def stop_at_signals(watch: Watch) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: watch.stop())

    with plain_errors():
        url, job = find_job(bus, folder)
        how = None if job is None else job.how_it_ended()
        if how is None:
            how = watch_job(
                url,
                _view(url, once, as_json, web),
                once=once,
                begin=stop_at_signals,
                ended=(lambda: None) if job is None else job.reread_how_it_ended,
            )
    if how is not None and not as_json:
        put(f"{how}\n")


def _view(url: str, once: bool, as_json: bool, web: str | None) -> View:
    """Return the output of `watch` for its options."""
    from fft.operate.watch import JsonView, ScreenView

    if as_json:
        return JsonView(sys.stdout, time.time, once)
    if web is None:
        return ScreenView(console(), url)
    from fft.bus.token import JobToken
    from fft.operate.web import WebView

    view = WebView(web, url, JobToken.from_env())
    put(f"{view.url}\nEveryone who has this address can see the job. Ctrl-C ends the page.\n")
    return view


def say(
    message: Annotated[
        str | None, typer.Argument(help="JSON, a file with JSON, or - for standard input.")
    ] = None,
    bus: BusUrl = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send it without checking its form.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the forms; send nothing.")
    ] = False,
) -> None:
    """Send a message to a job, such as a death or a drain; see docs/messages.md."""
    from fft.operate import say as saying

    if schema:
        put(json.dumps(saying.schema(), indent=2) + "\n")
        return
    with plain_errors():
        text, source = saying.read(message)
        payload = text if raw else saying.checked(text, source)
    with job_client(bus) as client:
        remark = saying.send(client, payload, raw)
    if remark:
        write_err(remark)

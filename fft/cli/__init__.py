"""The ``fft`` command. Each command imports its dependencies itself, so that ``fft --help`` and the
commands on specs and traces do not import torch.

This is the only package that installs signal handlers (`run`, `serve`, `watch`) and that ends the
process with an exit code: 0 for success, 1 if the job or the audit failed, 2 for bad input. `run`
has more exit codes (`fft.launch.exit_status`).
"""

from __future__ import annotations

import typer

from fft.cli import checkpoints, launch, operate, prove, run, specs, traces
from fft.cli.shared import GroupedHelp
from fft.launch.exit_status import IN_WORDS

app = typer.Typer(
    help="Fast Fault Tolerance: every PyTorch training step is a transaction.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
# `fft --help` lists the commands in this order.
app.command()(run.serve)
app.command(cls=GroupedHelp, context_settings={"allow_interspersed_args": False}, epilog=IN_WORDS)(
    run.run
)
app.add_typer(launch.app, name="launch")
app.command(epilog=IN_WORDS)(launch.outcome)
app.add_typer(checkpoints.app, name="checkpoint")
app.command()(traces.audit)
app.command()(traces.report)
app.command()(traces.timeline)
app.command()(traces.export)
app.command()(prove.simulate)
app.command()(prove.check)
app.command()(prove.mutants)
app.command()(specs.graph)
app.command(name="spec")(specs.check_spec)
app.command()(specs.config)
app.command()(specs.doctor)
app.command()(operate.drain)
app.command(name="return")(operate.return_group)
app.command()(operate.evict)
app.command()(operate.diagnose)
app.command()(operate.inject)
app.command()(operate.watch)
app.command()(operate.say)
app.command()(specs.schema)

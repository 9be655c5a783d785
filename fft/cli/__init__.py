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
from fft.util.terminal import make_process_printable


class _App(typer.Typer):
    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the command, with printable logs and unhandled errors."""
        make_process_printable()
        return typer.main.get_command(self)(*args, **kwargs)


app = _App(
    help="Fast Fault Tolerance: every PyTorch training step is a transaction.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
# `fft --help` lists the commands in this order.
app.command(cls=GroupedHelp, context_settings={"allow_interspersed_args": False}, epilog=IN_WORDS)(
    run.run
)
app.command()(run.serve)
app.add_typer(launch.app, name="launch")
app.command()(operate.watch)
app.command()(operate.drain)
app.command()(operate.evict)
app.command()(operate.diagnose)
app.command()(traces.report)
app.command()(traces.audit)
app.add_typer(checkpoints.app, name="checkpoint")
app.command()(specs.config)
app.command()(specs.doctor)

dev = typer.Typer(
    help="Develop specs and FFT itself: search, simulate, draw, inject.", no_args_is_help=True
)
dev.command(name="spec")(specs.check_spec)
dev.command()(specs.graph)
dev.command()(specs.schema)
dev.command()(prove.check)
dev.command()(prove.simulate)
dev.command()(prove.mutants)
dev.command()(operate.inject)
dev.command()(operate.say)
app.add_typer(dev, name="dev")

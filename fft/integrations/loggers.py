"""Write what ``txn.log`` gets to CSV, TensorBoard or Weights & Biases, once per committed step.

``for txn in logged(manager.transactions(loader, max_steps=100), manager):`` writes ``metrics.csv``
into the trace directory. One rank of the job writes each step: the one with `manager.is_writer`.
Attempts that were rolled back are not written.
"""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import fft
from fft.trace.starts import root_of

logger = logging.getLogger(__name__)


class StepLog(Protocol):
    """A place for the values of committed steps. It is opened by the rank that writes first."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, which replaces this step and later ones of earlier starts."""

    def close(self) -> None:
        """Close what is open; `write` may open it again. Idempotent."""


class CsvLog:
    """A CSV file with the column ``step`` and one for each value.

    Args:
        path: The file; by default ``metrics.csv`` in the ``--trace-dir`` of ``fft run``, for all
            starts of the job, or in the current directory.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        folder = root_of(Path(os.environ.get("FFT_TRACE_DIR", "")))
        self.path = folder / "metrics.csv" if path is None else Path(path)
        self._columns: list[str] = []
        self._size = -1
        """Size of the file after the newest line; another process may have written since."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line. Later steps, which an earlier start has written, are removed."""
        row = {"step": step, **values}
        if self._size < 0 or self.path.stat().st_size != self._size or row.keys() - self._columns:
            self._read(step, row)
        with self.path.open("a", newline="") as file:
            file.write(_lines(self._columns, [row]))
        self._size = self.path.stat().st_size

    def _read(self, step: int, row: Mapping[str, Any]) -> None:
        """Read the file, and write it anew if columns are missing or lines are outdated."""
        text = ""
        with suppress(FileNotFoundError):
            text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]  # a writer was killed, or a full disk cut its line off
        reader = csv.DictReader(io.StringIO(whole))
        rows, columns = list(reader), list(reader.fieldnames or ())
        kept = [each for each in rows if int(each["step"]) < step]
        self._columns = [*columns, *(name for name in row if name not in columns)]
        if kept != rows or self._columns != columns or whole != text:
            new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            heading = dict(zip(self._columns, self._columns, strict=True))
            new.write_text(_lines(self._columns, [heading, *kept]), newline="")
            new.replace(self.path)

    def close(self) -> None:
        """Do nothing: the file is open only while a line is written."""


def _lines(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


class TensorBoardLog:
    """Scalars for TensorBoard; needs the package ``tensorboard``.

    Args:
        folder: The log directory, the same for all ranks.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values. TensorBoard then hides this step and later ones of earlier starts."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WandbLog:
    """A run of Weights & Biases; needs the package ``wandb``.

    Args:
        options: Arguments of ``wandb.init``. Give ``id`` and ``resume="allow"``, so that another
            rank that becomes the writer, and the next start of the job, continue the same run.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values. W&B ignores steps that it already has."""
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._options)
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def logged(
    transactions: Iterable[fft.Transaction], manager: fft.ManagerFFT, *logs: StepLog
) -> Iterator[fft.Transaction]:
    """Yield the transactions, and write what each committed step has logged by ``txn.log``.

    The values are those of the rank that writes; `txn.mean` averages over all ranks. A step is
    missing if its writer dies between the commit and the line. A log that cannot be written is
    reported as a warning, and training goes on.

    Args:
        transactions: ``manager.transactions(…)``.
        manager: The manager of the job.
        logs: Where to write; by default a `CsvLog`.
    """
    logs = logs or (CsvLog(),)
    failures = 0
    try:
        for txn in transactions:
            yield txn
            if not txn.committed or txn.skipped or not txn.contributes or not txn.logged:
                continue
            for log in logs:
                try:
                    if manager.is_writer:
                        log.write(txn.step + 1, txn.logged)
                    else:
                        log.close()
                except OSError as error:
                    failures += 1
                    if failures.bit_count() == 1:  # the first, second, fourth, eighth …
                        text = "%s: step %d was not written (%d by now): %s"
                        logger.warning(text, type(log).__name__, txn.step + 1, failures, error)
    finally:
        for log in logs:
            log.close()

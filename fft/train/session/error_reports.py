"""Conversion of errors for reports: a line of text, a stack trace, a code, a class by name.

Pure, except for the subclass of torchft's error record.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

from torchft.manager import ExceptionWithTraceback

import fft.errors
from fft.errors import (
    FftError,
    GradientMissing,
    GradientsNotReproducible,
    LiveBlockMisuse,
    NoLighthouseQuorum,
    ResultRefused,
)
from fft.messages.causes import Cause, CauseCode
from fft.messages.effects import Finish
from fft.train.gradients.recomputation import Recompute
from fft.train.gradients.reductions import OpenTxn
from fft.util.error_places import comes_from_peers, first_line, words_of

_LONGEST = 500


class Reported(ExceptionWithTraceback):  # type: ignore[misc]
    """torchft's error record, which formats its stack trace only on access.

    Formatting it earlier would read source files in the middle of a rollback.
    """

    def __init__(self, error: Exception) -> None:
        Exception.__init__(self, words_of(error))
        self.original_exception = error

    @property
    def stack_trace(self) -> str:
        """Override of torchft's attribute."""
        return "".join(traceback.format_exception(self.original_exception))


class QuietLogger:
    """torchft's logger of a manager, without stack traces of errors that an abort caused."""

    def __init__(self, txn: OpenTxn, inner: Any) -> None:
        self._txn, self._inner = txn, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exception(self, message: str) -> None:
        """Log with the stack trace, unless the txn is being rolled back anyway."""
        if self._txn.failure is not None:
            self._inner.info(message)
        else:
            self._inner.exception(message)


def text_of(error: BaseException) -> str:
    """Return the error as one line, without gloo's source path and its general advice."""
    plain = re.sub(r"^\[/\S+?:\d+\] ", "", first_line(error)).split(". This is typically")[0]
    # a file name may contain lone surrogates, which a message cannot encode
    return f"{type(error).__name__}: {plain}"[:_LONGEST].encode("utf-8", "replace").decode()


def code_of(error: BaseException, own: CauseCode = CauseCode.STEP_FAILED) -> CauseCode:
    """Return the code of a rollback that an error causes.

    Args:
        error: The error, of this rank.
        own: The code if neither a peer, a connection nor a lighthouse explains the error.
    """
    if isinstance(error, NoLighthouseQuorum):
        return CauseCode.NO_LIGHTHOUSE_QUORUM
    if isinstance(error, Recompute):
        return CauseCode.RECOMPUTED
    if isinstance(error, GradientsNotReproducible):
        return CauseCode.NOT_REPRODUCIBLE
    if isinstance(error, GradientMissing):
        return CauseCode.GRADIENT_MISSING
    if isinstance(error, ResultRefused):
        return CauseCode.RESULT_ENDS_JOB if error.ends_job else CauseCode.RESULT_REFUSED
    return CauseCode.COLLECTIVE_FAILED if comes_from_peers(error) else own


def different_blocks(cause: Cause) -> LiveBlockMisuse:
    """Return the error for ranks that are in different live blocks, or in a block and in a step."""
    return LiveBlockMisuse(
        f"{cause.finding}: all processes must enter the same live blocks in the same order. Use "
        "one `with` statement for the whole program, and no block under a condition that differs "
        "between processes"
    )


def error_of(command: Finish) -> FftError:
    """Return the exception that the main thread raises for ``command``."""
    kind = getattr(fft.errors, command.error or "", FftError)
    assert issubclass(kind, FftError)
    return kind(command.reason)

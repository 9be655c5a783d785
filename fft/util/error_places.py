"""The origin of an error as plain data, for the trace, the log and a process's final report.

This module reads exceptions and source lines, and uses only the standard library.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

LONGEST_TEXT = 8 * 1024
"""Maximum number of characters of a traceback; the middle of a longer one is cut out."""
_HEAD = 2 * 1024
_LONGEST_MESSAGE = 500

_NOT_THE_USERS = (
    "<",
    f"{Path(__file__).resolve().parents[1]}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Prefixes of the files of Python, of installed packages and of FFT."""
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")

_FOR_ITS_CAUSE = frozenset({"StepRetriesExceeded", "NoEpoch", "NoState"})
"""Error classes whose ``__cause__``, if any, is the actual failure."""
_MAY_PASS = frozenset(
    {
        *("InDoubt", "Fenced", "NoEpoch", "NoLighthouseQuorum", "BusError", "TxnAborted"),
        *("GroupAborted", "InjectedFault", "ConnectionError", "TimeoutError", "DistError"),
        *("AcceleratorError", "DeviceLost", "GradientsDiffer", "GradientsNotReproducible"),
    }
)
"""Error classes that usually come from the machine, the network or peers, not from the script.

Any OSError counts as well, except those in `_PERMANENT`.
"""
_PERMANENT = frozenset(
    {
        *("FileNotFoundError", "PermissionError", "IsADirectoryError", "NotADirectoryError"),
        *("FileExistsError", "UnsupportedOperation", "BadGzipFile", "UnidentifiedImageError"),
    }
)
"""Subclasses of OSError that a retry does not mend: a wrong path, a broken file."""
_OF_PEERS = frozenset(
    {
        *("TxnAborted", "GroupAborted", "DistError", "ConnectionError", "TimeoutError"),
        *("BusError", "NoEpoch", "NoLighthouseQuorum", "InDoubt", "TransferError"),
    }
)
"""Error classes for which a peer or the connection to it may be at fault."""

_ErrorClass = type[BaseException]


@dataclass(frozen=True, slots=True)
class Place:
    """An error and its origin.

    Attributes:
        type: Name of its class, or of its cause's class if FFT only passes on an error of the step
            function.
        kinds: Names of that class and its bases.
        message: First line of its message, truncated.
        where: ``file:line function`` of the innermost call in user code, or the place of a syntax
            error.
        operation: The collective that failed, its group and sizes, if the error has ``fft_place``.
        text: The traceback as Python prints it, with causes and notes, truncated.
    """

    type: str
    kinds: tuple[str, ...]
    message: str
    where: str
    operation: str
    text: str
    item: str = ""
    """Name of the data item that could not be loaded, if loading failed."""

    @property
    def signature(self) -> tuple[str, str]:
        """A key that is equal in all processes that fail by the same mistake of a script."""
        return self.type, self.where

    @property
    def may_pass(self) -> bool:
        """Whether a retry may succeed, because the error comes from the machine or the network."""
        return bool(self.operation) or _pass(self.kinds)

    def is_a(self, kind: _ErrorClass) -> bool:
        """Whether the error has this class or a subclass of it."""
        return kind.__name__ in self.kinds

    def short(self) -> str:
        """Return a summary in one line."""
        return f"{self.type} at {self.where}: {self.message}"

    def to_json(self) -> str:
        """Encode the place for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Decode the output of `to_json`. Raises ValueError if it is malformed or truncated."""
        try:
            data: dict[str, Any] = json.loads(text)
            made = cls(**{**data, "kinds": tuple(data["kinds"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not in the form of a place: {error!r}") from None
        if not made.kinds or not all(isinstance(v, str) for v in (*made.kinds, made.text)):
            raise ValueError("not in the form of a place")
        return made


def place_of(error: BaseException) -> Place:
    """Return the origin of ``error``. This formats its traceback, which reads source files."""
    told = error
    if type(error).__name__ in _FOR_ITS_CAUSE and error.__cause__ is not None:
        told = error.__cause__
    text = "".join(traceback.format_exception(told))
    if told is not error:  # one traceback: that of the cause
        text += f"{type(error).__module__}.{type(error).__name__}: {words_of(error)}\n"
    return Place(
        type=type(told).__name__,
        kinds=_kinds(told),
        message=_plain(first_line(told))[:_LONGEST_MESSAGE],
        where=_where(told),
        operation=_plain(str(getattr(told, "fft_place", "")))[:_LONGEST_MESSAGE],
        text=_cut(_plain(text)),
        item=_plain(str(getattr(told, "fft_item", "")))[:_LONGEST_MESSAGE],
    )


def words_of(error: BaseException) -> str:
    """Return ``str(error)``, or a placeholder if ``__str__`` raises."""
    try:
        return str(error)
    except Exception as trouble:  # noqa: BLE001 - `__str__` may be user code
        return f"<{type(error).__name__} whose __str__ raises {type(trouble).__name__}>"


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message that is not blank, or an empty string."""
    return next((line.strip() for line in words_of(error).splitlines() if line.strip()), "")


def traceback_of_caller() -> TracebackType | None:
    """Return a traceback of the user's call to FFT, for an error that is reported, not raised."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return None if frame is None else TracebackType(None, frame, frame.f_lasti, frame.f_lineno)


def fingerprint(error: BaseException) -> tuple[object, ...]:
    """Return a key that is equal for two errors of one process with equal class, text and calls.

    Addresses of objects in the text are ignored. This does not read source files.
    """
    calls = tuple((code, line) for code, line, _ in _calls(error.__traceback__))
    return type(error), _ADDRESS.sub("0x", words_of(error)), calls


def may_pass(error: BaseException) -> bool:
    """Return `Place.may_pass` of ``error`` without computing the rest of the place."""
    return hasattr(error, "fft_place") or _pass(_kinds(error))


def comes_from_peers(error: BaseException) -> bool:
    """Return whether a failed collective or connection explains the error, so that it accuses no
    rank.

    Besides the class of the error, its place counts: gloo raises a plain RuntimeError from within
    ``torch.distributed``.
    """
    if hasattr(error, "fft_place") or not _OF_PEERS.isdisjoint(_kinds(error)):
        return True
    *_, (file, _, _) = [("", 0, ""), *_calls(error.__traceback__)]
    return isinstance(error, RuntimeError) and file.endswith(_COLLECTIVES)


def _kinds(error: BaseException) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in type(error).__mro__)


def _pass(kinds: tuple[str, ...]) -> bool:
    if not _MAY_PASS.isdisjoint(kinds):
        return True
    return "OSError" in kinds and _PERMANENT.isdisjoint(kinds)


def _calls(trace: TracebackType | None) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, function) of each call, the innermost last."""
    while trace is not None:
        code = trace.tb_frame.f_code
        yield code.co_filename, trace.tb_lineno, code.co_name
        trace = trace.tb_next


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename is not None:
        return _plain(f"{error.filename}:{error.lineno} <syntax>")
    calls = list(_calls(error.__traceback__))
    users = [call for call in calls if not call[0].startswith(_NOT_THE_USERS)]
    if not calls:
        return "nowhere in Python"
    file, line, function = (users or calls)[-1]
    return _plain(f"{file}:{line} {function}")


def _plain(text: str) -> str:
    """Replace surrogates, which file names may contain and messages cannot carry."""
    return text.encode("utf-8", "replace").decode()


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:_HEAD]}\n  […]\n{text[_HEAD - LONGEST_TEXT :]}"

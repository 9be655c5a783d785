"""Where an error comes from, as plain data: for the trace, the log, and a process's last words.

Reads exceptions and source lines; touches nothing else, and needs the standard library only.
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
"""Characters of a traceback that are kept; what is cut out of a longer one is its middle."""
_HEAD = 2 * 1024
_LONGEST_MESSAGE = 500

_NOT_THE_USERS = (
    "<",
    f"{Path(__file__).resolve().parents[1]}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""What the files of Python, of packages and of FFT begin with."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")

_FOR_ITS_CAUSE = frozenset({"BodyKeepsFailing", "NoEpoch", "NoState"})
"""Classes of errors of which the cause, if there is one, is what failed."""
_MAY_PASS = frozenset(
    {
        *("InDoubt", "Fenced", "NoEpoch", "NoQuorum", "BusError", "TxnAborted", "GroupAborted"),
        *("InjectedFault", "ConnectionError", "TimeoutError", "DistError", "AcceleratorError"),
        "DeviceLost",
    }
)
"""Classes of errors that say more of machine, network and peers than of the script."""


@dataclass(frozen=True, slots=True)
class Place:
    """An error and where it comes from.

    Attributes:
        type: name of its class; of the cause, where FFT only passes an error of the body on.
        kinds: names of that class and its bases.
        message: what it says, cut.
        where: ``file:line function`` of the innermost call of the user's; of a syntax error the
            place of that.
        operation: the collective that failed, its group and sizes, if it says so (``fft_place``).
        text: the traceback as Python prints it, with causes and notes, cut.
    """

    type: str
    kinds: tuple[str, ...]
    message: str
    where: str
    operation: str
    text: str
    item: str = ""
    """Name of the item of the data that could not be loaded, if that is what failed."""

    @property
    def signature(self) -> tuple[str, str]:
        """Equal for one mistake of a script, in whichever process it shows."""
        return self.type, self.where

    @property
    def may_pass(self) -> bool:
        """Whether the same may go well another time: it is of the machine, or of the network."""
        return bool(self.operation) or _pass(self.kinds)

    def short(self) -> str:
        """One line."""
        return f"{self.type} at {self.where}: {self.message}"

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises ValueError for a text that `to_json` did not make, or not to its end."""
        try:
            data: dict[str, Any] = json.loads(text)
            made = cls(**{**data, "kinds": tuple(data["kinds"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not in the form of a place: {error!r}") from None
        if not made.kinds or not all(isinstance(v, str) for v in (*made.kinds, made.text)):
            raise ValueError("not in the form of a place")
        return made


def place_of(error: BaseException) -> Place:
    """Where ``error`` comes from. Formats its traceback, which reads source files."""
    told = error
    if type(error).__name__ in _FOR_ITS_CAUSE and error.__cause__ is not None:
        told = error.__cause__
    return Place(
        type=type(told).__name__,
        kinds=_kinds(told),
        message=_plain(first_line(told))[:_LONGEST_MESSAGE],
        where=_where(told),
        operation=_plain(str(getattr(told, "fft_place", "")))[:_LONGEST_MESSAGE],
        text=_cut(_plain("".join(traceback.format_exception(error)))),
        item=_plain(str(getattr(told, "fft_item", "")))[:_LONGEST_MESSAGE],
    )


def words_of(error: BaseException) -> str:
    """What it says; of one that fails to say it, that it does."""
    try:
        return str(error)
    except Exception as trouble:  # noqa: BLE001 - code of the user's, about an error of theirs
        return f"<{type(error).__name__} whose __str__ raises {type(trouble).__name__}>"


def first_line(error: BaseException) -> str:
    """The first line with words in it of what ``error`` says."""
    return next((line.strip() for line in words_of(error).splitlines() if line.strip()), "")


def traceback_of_caller() -> TracebackType | None:
    """The place in user code from which FFT was called, for an error that is told, not raised."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return None if frame is None else TracebackType(None, frame, frame.f_lasti, frame.f_lineno)


def fingerprint(error: BaseException) -> tuple[object, ...]:
    """Equal for two errors of one process that are the same: class, words, and every call.

    Addresses of objects in the words do not count. Reads no source files.
    """
    calls = tuple((code, line) for code, line, _ in _calls(error.__traceback__))
    return type(error), _ADDRESS.sub("0x", words_of(error)), calls


def may_pass(error: BaseException) -> bool:
    """As `Place.may_pass`, without the rest of the place."""
    return hasattr(error, "fft_place") or _pass(_kinds(error))


def _kinds(error: BaseException) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in type(error).__mro__)


def _pass(kinds: tuple[str, ...]) -> bool:
    return kinds[0] == "OSError" or not _MAY_PASS.isdisjoint(kinds)


def _calls(trace: TracebackType | None) -> Iterator[tuple[str, int, str]]:
    """(file, line, function), the innermost last."""
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
    """Without half characters, as in the name of a file, which no message carries."""
    return text.encode("utf-8", "replace").decode()


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:_HEAD]}\n  […]\n{text[_HEAD - LONGEST_TEXT :]}"

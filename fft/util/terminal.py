"""Write text to a terminal with visible signs for control characters.

Host names, errors of scripts, and messages from the bus may contain control characters. A terminal
would obey them: clear its screen, set its title, or overwrite other lines. All output of FFT
therefore passes through this module.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, Final

_OBEYED: Final = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Controls other than tab and newline, marks that change the direction of a line, and undecodable
bytes of file names."""


def printable(text: str) -> str:
    """Return ``text`` with a visible sign for each control: a control picture, or U+FFFD."""
    return text if text.isprintable() else _OBEYED.sub(_sign, text)


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else "\ufffd"


def put(text: str) -> None:
    """Write ``text`` to standard output at once."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def write_err(line: str) -> None:
    """Write ``line``, prefixed with ``fft:``, to standard error."""
    sys.stderr.write(printable(f"fft: {line}\n"))


def show_error(error: BaseException) -> None:
    """Write an unhandled error, with its traceback, to standard error."""
    sys.stderr.write(printable("".join(traceback.format_exception(error))))


def make_process_printable() -> None:
    """Make unhandled errors and all log records printable, in a process that runs only FFT."""
    make_records_printable("")
    sys.excepthook = lambda kind, error, place: show_error(error)
    threading.excepthook = lambda args: show_error(args.exc_value or args.exc_type())


def make_records_printable(root: str = "fft") -> None:
    """Make log records printable before any handler, such as one of a training script, gets them.

    Args:
        root: Prefix of the names of the loggers whose records are changed.
    """
    make = logging.getLogRecordFactory()

    def made(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        if record.name.startswith(root):
            with suppress(TypeError, ValueError):  # arguments do not fit; the handler reports it
                if (text := record.getMessage()) != (shown := printable(text)):
                    record.msg, record.args = shown, ()
            if record.exc_info:  # formatters reuse exc_text if it is set
                record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
        return record

    logging.setLogRecordFactory(made)

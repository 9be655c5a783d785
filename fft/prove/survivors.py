"""Mutants of the operators that no judge finds, each with the reason: most are equivalent.

``fft dev mutants`` fails on a survivor that is not listed, and on a listed mutant that is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

_TIMER = "arming a timer reads and changes nothing that the other effect does"
EQUIVALENT: Mapping[str, str] = {
    "* after rearm": _TIMER,
    "* after arm *": _TIMER,
    "*: arm * after *": _TIMER,
    "*: count_failure after unwind": "one counts here, the other sends a request",
    "*: say_ack after unwind": "the acknowledgement does not depend on the rollback of its own txn",
    "doubt_absent: suspect_absent after note_absent": "both only read the barrier",
    "HEALING.forming timer.bus_retry 0: say_ack skipped": "ack_window repeats it, later",
    "COMMIT applied 2: say_ack skipped": "ack_window repeats it, later",
    "INIT exit 4: epoch_possible taken as true": (
        "not equivalent: whole groups without a common state; no judge begins with them"
    ),
    "HEALING.forming timer.quorum 1: row dropped": (
        "only the text of the end differs, which no judge sees; tests/protocol/test_rows.py does"
    ),
}
"""Pattern of names → reason."""


def reason_for(name: str) -> str:
    """Return why the mutant is equivalent, or an empty text if it is not listed."""
    return next((why for like, why in EQUIVALENT.items() if fnmatchcase(name, like)), "")

"""Write, follow, judge and report the trace of a run. Importing this package starts nothing.

`Run` reads the trace of a run in notebooks and scripts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fft.trace.run import Run, Step

__all__ = ["Run", "Step"]


def __getattr__(name: str) -> Any:
    """Load `Run` when it is first used, because the other modules do not need it."""
    if name in __all__:
        from fft.trace import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Guards by name: pure questions about one participant and the event at hand.

``GUARDS`` is what a spec may name. A guard's first docstring line is shown by ``fft spec``.
"""

from __future__ import annotations

from fft.protocol.guards import apart, flow, membership, recovery, txn
from fft.protocol.guards.base import GUARDS, Guard

__all__ = ["GUARDS", "Guard", "apart", "flow", "membership", "recovery", "txn"]

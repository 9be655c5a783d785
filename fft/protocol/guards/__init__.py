"""Guards by name: pure predicates over one participant and the current event.

``GUARDS`` holds the names that a spec may use.
"""

from __future__ import annotations

from fft.protocol.guards import apart, flow, membership, recovery, txn
from fft.protocol.guards.base import GUARDS, Guard

__all__ = ["GUARDS", "Guard", "apart", "flow", "membership", "recovery", "txn"]

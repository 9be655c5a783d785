"""Effects by name: how a row changes the participant, and the ``Effect`` values that it emits.

``EFFECTS`` holds the names that a spec may use. Each action changes the ``Local`` that it is given
(the copy for this event) and returns the effects in the order in which they must be carried out. An
action does one thing; a condition on the protocol's state is a guard, of a row or of a part of a
sequence.
"""

from __future__ import annotations

from fft.protocol.effects import (
    apart,
    ending,
    flow,
    hearing,
    recovery,
    register,
    saying,
    teaching,
    timing,
    txn,
)
from fft.protocol.effects.base import EFFECTS, Action
from fft.protocol.effects.timing import arm

__all__ = [
    "EFFECTS",
    "Action",
    "apart",
    "arm",
    "ending",
    "flow",
    "hearing",
    "recovery",
    "register",
    "saying",
    "teaching",
    "timing",
    "txn",
]

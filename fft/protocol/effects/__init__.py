"""Effects by name: what a row does to the participant, and the ``Effect`` values it asks for.

``EFFECTS`` is what a spec may name. Each action changes the ``Local`` it is given (the copy of
this event) and returns the effects in the order in which they must be carried out. An action does
one thing: what depends on the protocol's state is a guard, of a row or of a part of a sequence.
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

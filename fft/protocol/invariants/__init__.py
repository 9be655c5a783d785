"""The guarantees, each as a function from one move to claims. Pure.

A **move** is one event handled by one participant. An invariant says of a move what must hold:
of the move alone (``Holds``), or together with what other moves tell (``Same``, ``Given``). Claims
are weighed against **facts**, which name no order between participants, so that one definition
serves those who see moves as they happen (simulator, checker) and those who read traces that were
written side by side (audit). ``INVARIANTS`` lists the functions by name; a new one that is put
there is picked up by everyone. Numbers in docstrings are those of the guarantees in DESIGN.md.
"""

from __future__ import annotations

from fft.protocol.invariants.claims import Claim, Given, History, Holds, Know, Move, Same
from fft.protocol.invariants.judge import INVARIANTS, Finding, Judge, judge

__all__ = [
    "INVARIANTS",
    "Claim",
    "Finding",
    "Given",
    "History",
    "Holds",
    "Judge",
    "Know",
    "Move",
    "Same",
    "judge",
]

"""The guarantees, each as a function from one move to claims. Pure.

A **move** is one event handled by one participant. An invariant returns claims about a move: about
the move alone (``Holds``), or together with other moves (``Same``, ``Given``). Claims are checked
against **facts**, which imply no order between participants. One definition therefore serves
observers that see moves as they happen (simulator, checker) and readers of traces that were written
in parallel (audit). ``INVARIANTS`` lists the functions by name, and every user evaluates all of
them. Numbers in docstrings are those of the guarantees in DESIGN.md.
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

"""Write the mutants as a table into a page of the docs, between its markers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fft.prove.mutant import Mutant
from fft.prove.simulated_mutants import SIMULATED

BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"


def row_of(mutant: Mutant) -> str:
    """Return the mutant's first columns in the table, which do not depend on the model."""
    kinds = " + ".join(kind if n == 1 else f"{n} {kind}" for kind, n in mutant.bounds.budget)
    shape = f"{mutant.bounds.groups} x {mutant.bounds.ranks}"
    shape += "" if mutant.bounds.formed else " from start"
    shape += f", a rank {mutant.bounds.lost}" if mutant.bounds.lost else ""
    bounds = f"{shape}, {kinds or 'no fault'}"
    return f"| {mutant.name} | {mutant.what} | {mutant.place} | {mutant.expected} | {bounds} |"


Found = tuple[Mutant, int, int]
"""A mutant, and the number of states and steps of its search."""


def _rows(found: Iterable[Found]) -> Iterator[str]:
    yield "| mutant | what is planted | where | caught by | bounds | states | steps |"
    yield "|---|---|---|---|---|--:|--:|"
    for mutant, states, steps in found:
        yield f"{row_of(mutant)} {states:,} | {steps} |"


def simulated_table() -> str:
    """Return the bugs that simulated jobs find, as a table of the docs."""
    rows = ["| mutant | what is planted | spec | caught by | seed |", "|---|---|---|---|--:|"]
    rows += [f"| {m.name} | {m.what} | {m.spec} | {m.expected} | {m.seed} |" for m in SIMULATED]
    return "\n".join(rows)


def write_table(path: Path, found: Iterable[Found]) -> None:
    """Write detected mutants as a table between its markers in a Markdown file.

    Raises:
        ValueError: The markers are missing, repeated or in the wrong order.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else f"# Proof\n\n{BEGIN}\n{END}\n"
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: put {BEGIN} and {END} where the table shall stand")
    table = "\n".join(_rows(found))
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")

"""Judge inner steps: each synchronization includes all inner steps of its slice, once and in order.

Pure. Inner steps are recorded as notes of a trace, not as events of the protocol.
"""

from __future__ import annotations

from typing import Any

from fft.protocol.invariants import Finding, Same
from fft.trace.inputs import Owed, Weigh


class InnerSteps:
    """Check of the inner steps in the notes of one process, in the order of its trace.

    Guarantee 3: the holder of a slice that a COMMIT consumed has computed it step by step, and each
    step was committed once. Steps that were discarded in between were started again. All slices
    have the same number of steps.

    Args:
        owed: As in `fft.trace.inputs.Inputs`.
        needed: Each COMMIT that consumes a slice follows inner steps.
    """

    def __init__(self, finding: Finding, owed: Owed | None, needed: bool) -> None:
        self._finding, self._owed, self._needed = finding, owed, needed
        self._slice: int | None = None
        self._done = 0
        self._first = 0
        """Data item that the first step of the slice was computed on."""
        self.told = 0
        """Total number of inner steps that the process has committed."""
        self.last = ""
        """Place of the note of the newest inner step."""

    def take(self, place: str, line: dict[str, Any], weigh: Weigh) -> None:
        """Take one note and its place. ``weigh`` gets facts that must be equal for all ranks."""
        data, finding = line["data"], self._finding
        match line["note"]:
            case "inner_void":
                self._slice, self._done = None, 0
            case "inner_commit":
                self.told, self.last = self.told + 1, place
                if data["slice"] != self._slice:
                    left = f"slice {self._slice} was left after {self._done} inner steps"
                    finding.expect(self._slice is None, f"{left}, and not given up", place)
                    self._slice, self._done = data["slice"], 0
                text = f"inner step {data['inner_step']} of slice {self._slice} follows "
                finding.expect(
                    data["inner_step"] == self._done, f"{text}{self._done} others", place
                )
                self._first = self._first if self._done else data["item"]
                self._expect_item(data["item"], self._first, self._done, place)
                self._done += 1
            case "consumed" if data["slice"] is not None and "inner_steps" in data:
                wanted, found = (data["slice"], data["inner_steps"]), (self._slice, self._done)
                text = f"(slice, inner steps) {wanted} were committed by the job, and here were "
                finding.expect(found == wanted, text + f"{found}", place)
                text = (
                    f"slice {data['slice']} has {data['inner_steps']} inner steps, another {{was}}"
                )
                weigh(finding, Same(("inner steps",), data["inner_steps"], text), place)
                if self._owed is not None and self._done:
                    due = self._owed.item(data["slice"] * data["inner_steps"])
                    text = f"slice {data['slice']} began here with item {self._first} of the data"
                    finding.expect(self._first == due, f"{text}, and not {due}", place)
                self._slice, self._done = None, 0
            case "consumed" if data["slice"] is not None and self._needed:
                text = f"slice {data['slice']} was consumed without a word of its inner steps"
                finding.expect(False, text, place)

    def _expect_item(self, item: int, first: int, done: int, place: str) -> None:
        if self._owed is not None:
            due = first + done * self._owed.ranks
            text = f"inner step {done} of slice {self._slice} has item {item} of the data"
            self._finding.expect(item == due, f"{text}, and not {due}", place)

"""Steps that groups commit alone: each synchronisation has all of its slice's, once and in order.

Pure. What a group does alone is told by notes of its trace, not by events of the protocol.
"""

from __future__ import annotations

from typing import Any

from fft.protocol.invariants import Finding


class InnerSteps:
    """The notes of one process are checked, as they come, in the order of its trace.

    3: a slice that a COMMIT has consumed was computed on by its holder step by step, each step
    committed once; what was given up between was begun anew.
    """

    def __init__(self, finding: Finding) -> None:
        self._finding = finding
        self._slice: int | None = None
        self._done = 0
        self.told = 0
        """How many inner steps it has committed, in all."""
        self.last = ""
        """Where it said so last."""

    def take(self, place: str, line: dict[str, Any]) -> None:
        """One note, and its place."""
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
                self._done += 1
            case "consumed" if data["slice"] is not None and "inner_steps" in data:
                wanted, found = (data["slice"], data["inner_steps"]), (self._slice, self._done)
                text = f"(slice, inner steps) {wanted} were committed by the job, and here were "
                finding.expect(found == wanted, text + f"{found}", place)
                self._slice, self._done = None, 0

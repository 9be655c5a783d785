"""Steps that groups commit alone: each synchronisation has all of its slice's, once and in order.

Pure. What a group does alone is told by notes of its trace, not by events of the protocol.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fft.protocol.invariants import Finding


def judge_inner_steps(traces: Iterable[Iterable[tuple[str, dict[str, Any]]]]) -> Finding:
    """Check the notes of each process, which come with their places, in the order of its trace.

    3: a slice that a COMMIT has consumed was computed on by its holder step by step, each step
    committed once; what was given up between was begun anew.
    """
    finding = Finding("inner_steps")
    for notes in traces:
        _judge(finding, notes)
    return finding


def _judge(finding: Finding, notes: Iterable[tuple[str, dict[str, Any]]]) -> None:
    slice_, done = None, 0
    for place, line in notes:
        data = line["data"]
        match line["note"]:
            case "inner_void":
                slice_, done = None, 0
            case "inner_commit":
                if data["slice"] != slice_:
                    text = f"slice {slice_} was left after {done} inner steps, and not given up"
                    finding.expect(slice_ is None, text, place)
                    slice_, done = data["slice"], 0
                text = f"inner step {data['inner_step']} of slice {slice_} follows {done} others"
                finding.expect(data["inner_step"] == done, text, place)
                done += 1
            case "consumed" if data["slice"] is not None and "inner_steps" in data:
                wanted = (data["slice"], data["inner_steps"])
                text = f"(slice, inner steps) {wanted} were committed by the job, and here were "
                finding.expect((slice_, done) == wanted, text + f"{(slice_, done)}", place)
                slice_, done = None, 0

"""A file is read in one go: at most 400 lines, and a function 70. Each exception has its reason.

An exception may shrink, and never grow: split instead. One that is none any more leaves the list.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fft

ROOT = Path(fft.__file__).parent
FILE_LINES, FUNCTION_LINES = 400, 70

LONG_FILES = {
    "bus/nats.py": (581, "One class, an `ErrorBus`, whose operations share streams and cursors."),
    "bus/natslink.py": (474, "One class that owns a loop thread; addresses could leave."),
    "bus/sealed.py": (403, "Seals and opens are read against each other."),
    "bus/tcpstore.py": (454, "One bus, its keys and its connection, behind a page on all of them."),
    "engine/loop.py": (628, "One thread and what it owns; every method runs on it."),
    "health/monitor.py": (411, "Both sides of one pipe; the trainer's side could leave."),
    "launch/supervisor/loop.py": (640, "One thread that owns all children; commands could leave."),
    "messages/protocol.py": (557, "A list of message types, each short, that one codec reads."),
    "prove/model.py": (1138, "One transition system, in whose steps all parts meet."),
    "prove/mutants.py": (813, "A list of planted bugs; half of it is one table."),
    "prove/scale/job.py": (485, "One job in virtual time, its phases in the order they happen."),
    "prove/scenario.py": (781, "Every command of a language, and its reader, which could leave."),
    "prove/simulator/job.py": (
        640,
        "One world, whose faults and whose services meet in its clock.",
    ),
    "trace/live_sets.py": (
        508,
        "A definition and its decision, which are read against each other.",
    ),
    "train/lighthouse.py": (433, "Heartbeats and quorums, which share a client; could be two."),
    "train/process_group/abortable.py": (
        574,
        "One class; each collective is tracked, then aborted.",
    ),
    "train/state/step_state.py": (427, "What is captured is read against what is put back."),
    "train/state/transfer.py": (499, "Both ends of one connection; its frames could leave."),
}
"""By path in fft/: the most lines it may have, and why it has more than others."""

LONG_FUNCTIONS = {
    "cli/run.py run": (81, "Its signature is the command's options; the body is short."),
}
"""By path and qualified name: the same."""


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and number of lines, without decorators, of every function."""
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}.{node.name}".lstrip(".")
            if not isinstance(node, ast.ClassDef):
                assert node.end_lineno is not None
                yield name, node.end_lineno - node.lineno + 1
        yield from functions(node, name)


def sizes() -> tuple[dict[str, int], dict[str, int]]:
    """Lines of each file, and of each function."""
    files, found = {}, {}
    for path in sorted(ROOT.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        files[name] = len(text.splitlines())
        for function, lines in functions(ast.parse(text)):
            found[f"{name} {function}"] = max(lines, found.get(f"{name} {function}", 0))
    return files, found


def complaints(
    lines_of: dict[str, int], limit: int, exceptions: dict[str, tuple[int, str]]
) -> list[str]:
    """What is too long, and exceptions that are none."""
    found = []
    for name, lines in lines_of.items():
        most, _ = exceptions.get(name, (limit, ""))
        if lines > most:
            found.append(f"{name} has {lines} lines, over {most}: split it")
    for name in exceptions:
        if name not in lines_of:
            found.append(f"{name} is not there: take it off the list")
        elif lines_of[name] <= limit:
            found.append(f"{name} has {lines_of[name]} lines, no exception: take it off the list")
    return found


def test_files_and_functions_are_read_in_one_go() -> None:
    files, found = sizes()
    assert len(files) > 100  # it has looked at the package
    problems = complaints(files, FILE_LINES, LONG_FILES)
    problems += complaints(found, FUNCTION_LINES, LONG_FUNCTIONS)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("lines", "exceptions", "says"),
    [
        (401, {}, "a.py has 401 lines, over 400: split it"),
        (501, {"a.py": (500, "why")}, "a.py has 501 lines, over 500: split it"),
        (400, {"a.py": (500, "why")}, "a.py has 400 lines, no exception: take it off the list"),
        (1, {"b.py": (500, "why")}, "b.py is not there: take it off the list"),
    ],
)
def test_what_is_too_long_or_no_exception_any_more_is_said(
    lines: int, exceptions: dict[str, tuple[int, str]], says: str
) -> None:
    assert complaints({"a.py": lines}, 400, exceptions) == [says]


def test_functions_are_found_in_classes_and_in_functions() -> None:
    text = "class A:\n    def b(self):\n        def c():\n            pass\n\n        return c\n"
    assert dict(functions(ast.parse(text))) == {"A.b": 5, "A.b.c": 2}

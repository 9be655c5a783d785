"""Limit on the length of functions. Files have no limit: a file holds one concept."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fft

ROOT = Path(fft.__file__).parent
FUNCTION_LINES = 70

EXCEPTIONS = {
    "cli/run.py run": (81, "The signature lists the command's options; the body is short.")
}
"""Maximum length and reason, by path in ``fft/`` and qualified name."""


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    """Yield the qualified name and the number of lines, without decorators, of every function."""
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}.{node.name}".lstrip(".")
            if not isinstance(node, ast.ClassDef):
                assert node.end_lineno is not None
                yield name, node.end_lineno - node.lineno + 1
        yield from functions(node, name)


def sizes() -> dict[str, int]:
    """Return the length of each function of the package."""
    found: dict[str, int] = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for function, lines in functions(ast.parse(path.read_text())):
            found[f"{name} {function}"] = max(lines, found.get(f"{name} {function}", 0))
    return found


def complaints(lines_of: dict[str, int], exceptions: dict[str, tuple[int, str]]) -> list[str]:
    """Return one message per function over its limit and per exception that no longer applies."""
    found = []
    for name, lines in lines_of.items():
        most, _ = exceptions.get(name, (FUNCTION_LINES, ""))
        if lines > most:
            found.append(f"{name} has {lines} lines, the limit is {most}: split it")
    for name in exceptions:
        if lines_of.get(name, 0) <= FUNCTION_LINES:
            found.append(f"{name} needs no exception: remove it from EXCEPTIONS")
    return found


def test_functions_of_the_package_are_short() -> None:
    lines_of = sizes()
    assert len(lines_of) > 1000  # the package was scanned
    problems = complaints(lines_of, EXCEPTIONS)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("lines_of", "exceptions", "message"),
    [
        ({"a.py f": 71}, {}, "a.py f has 71 lines, the limit is 70: split it"),
        ({"a.py f": 81}, {"a.py f": (80, "why")}, "a.py f has 81 lines, the limit is 80: split it"),
        (
            {"a.py f": 70},
            {"a.py f": (80, "why")},
            "a.py f needs no exception: remove it from EXCEPTIONS",
        ),
        ({}, {"a.py f": (80, "why")}, "a.py f needs no exception: remove it from EXCEPTIONS"),
    ],
)
def test_complaints_name_long_functions_and_stale_exceptions(
    lines_of: dict[str, int], exceptions: dict[str, tuple[int, str]], message: str
) -> None:
    assert complaints(lines_of, exceptions) == [message]


def test_functions_finds_methods_and_nested_functions() -> None:
    text = "class A:\n    def b(self):\n        def c():\n            pass\n\n        return c\n"
    assert dict(functions(ast.parse(text))) == {"A.b": 5, "A.b.c": 2}

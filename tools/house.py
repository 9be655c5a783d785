"""Structural gates on ``fft/``: import circles, sizes, names, private names of torchft, prose.

    python -m tools.house              # print each gate, exit 1 if one is missed
    python -m tools.house --list GATE  # print the places that the gate counts
    python -m tools.house --rooms      # print the code lines and the limit of each room
    python -m tools.house --lower      # lower the limits of rooms to their present code lines
    python -m tools.house --widest     # print the widest classes and constructors, for reviewers

A gate compares a figure, computed from the sources, with ``limit``, which may only fall, and with
``target``, where the limit is meant to end. The limits of the rooms are a table in
``docs/decisions/room-limits.md``.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fft"
LIMITS = ROOT / "docs" / "decisions" / "room-limits.md"
FUNCTION_LINES = 60
SLACK = 0.02
"""Part of a limit by which a room may fall below it before the limit has to be lowered."""
WIDEST = 12
"""Length of the list for reviewers."""
REPLACED = re.compile(
    r"apart|bod(?:y|ies)|deaf|elsewhere|hear[ds]?|learners?|nobody|said|says?|somebody|tells?|told|"
    r"torn|words?"
)
"""Parts of identifiers that the glossary replaces."""
ADAPTER = "fft/train/guard/torchft_adapter.py"
"""The only file that may name private attributes of torchft."""
TELLS_PARADIGMS_APART = {"ranks", "samples", "is_periodic", "bound", "inner", "stages", "bound_to"}
"""Properties of a spec that only the protocol and the paradigms may read."""
MIRRORED = {
    "CursorLoader": ("torch", "utils/data/dataloader.py", "DataLoader"),
    "DiLoCo": ("torchft", "local_sgd.py", "DiLoCo"),
    "ManagerFFT": ("torchft", "manager.py", "Manager"),
}
"""Public classes that keep the arguments of a class of another library: its package, file, name."""


@dataclass(frozen=True)
class Gate:
    """A figure with its limits.

    Attributes:
        name: Short name, also the argument of ``--list``.
        find: Returns one line per place that counts.
        limit: The check fails above this figure.
        target: The figure that the limit is to reach.
        per: Divides the number of places, for figures such as "per 1,000 words".
    """

    name: str
    find: Callable[[], list[str]]
    limit: float
    target: float
    per: Callable[[], float] = lambda: 1.0

    def figure(self) -> float:
        """Return the number of places, divided by ``per``."""
        return len(self.find()) / self.per()


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of the package by its path in the repository."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def _inner(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements directly inside ``node``, and its handlers and cases."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, None)
        yield from inner if isinstance(inner, list) else ()


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and all statements inside, with handlers and cases, but no expressions."""
    yield node
    for each in _inner(node):
        yield from _statements(each)


def circular_files() -> list[str]:
    """Return the modules that import each other in a circle, type-checking imports included."""
    graph = grimp.build_graph("fft", cache_dir=None)
    below = {m: sorted(graph.find_modules_directly_imported_by(m)) for m in sorted(graph.modules)}
    return [f"{m}: in a circle of {len(circle)}" for circle in circles(below) for m in circle]


def circles(below: dict[str, list[str]]) -> list[list[str]]:
    """Return the sets of modules that reach each other, each sorted.

    Tarjan's algorithm for strongly connected components.

    Args:
        below: Module to the modules that it imports.
    """
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in below[module]:
            if other not in number:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            at = stack.index(module)
            circle = stack[at:]
            del stack[at:]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in below:
        if module not in number:
            visit(module)
    return found


def _functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in _inner(node):
        name = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield name, child  # type: ignore[misc]
        yield from _functions(child, name)


def long_functions() -> list[str]:
    """Return functions of 60 and more lines, decorators not counted."""
    return [
        f"{path}:{function.lineno} {name}: {lines} lines"
        for path, tree in trees().items()
        for name, function in _functions(tree)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) >= FUNCTION_LINES
    ]


def constructors() -> Iterator[tuple[int, str]]:
    """Yield the arguments of each constructor besides ``self`` and those of `MIRRORED`, and its
    place."""
    for path, tree in trees().items():
        for name, function in _functions(tree):
            owner = name.removesuffix(".__init__")
            if owner != name:
                count = len(_arguments(function) - mirrored(owner))
                yield count, f"{path}:{function.lineno} {name}: {count} arguments"


def _arguments(function: ast.FunctionDef) -> set[str]:
    found = function.args
    return {each.arg for each in found.posonlyargs + found.args + found.kwonlyargs} - {"self"}


def mirrored(name: str) -> set[str]:
    """Return the arguments that the class ``name`` keeps of a class of another library."""
    if name not in MIRRORED:
        return set()
    package, file, original = MIRRORED[name]
    constructors = _functions(_module_of(package, file))
    (found,) = (f for n, f in constructors if n == f"{original}.__init__")
    return _arguments(found)


def _module_of(package: str, file: str) -> ast.Module:
    """Return the syntax tree of a file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed"
    return ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))


def classes() -> Iterator[tuple[int, str]]:
    """Yield the number of instance attributes of each class, and its place."""
    for path, tree in trees().items():
        for node in _statements(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            names = {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and isinstance(part.value, ast.Name)
                and part.value.id == "self"
            }
            names |= {
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            }
            yield len(names), f"{path}:{node.lineno} {node.name}: {len(names)} attributes"


def repeated_class_names() -> list[str]:
    """Return the names that several classes of the package have, with their files."""
    found: dict[str, list[str]] = {}
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in found.items() if len(paths) > 1]


def replaced_words() -> list[str]:
    """Return definitions of functions, classes and arguments with a word that the glossary
    replaces."""
    found = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.arg):
                name = node.arg
            else:
                continue
            parts = re.findall(r"[a-z]+", re.sub(r"(?=[A-Z])", "_", name).lower())
            if any(map(REPLACED.fullmatch, parts)):
                found.append(f"{path}:{node.lineno} {name}")
    return found


def unused_names() -> list[str]:
    """Return public functions and classes of modules that no other code of the repository names.

    Tests do not count, and a decorator may register a function under its name.
    """
    folders = ("fft", "fsm_specs", "examples", "benchmarks", "tools", "tests/acceptance")
    files = [each for folder in folders for each in (ROOT / folder).rglob("*.*")]
    texts = [each.read_text(encoding="utf-8") for each in files if each.suffix in (".py", ".yaml")]
    times = Counter(re.findall(r"\w+", "\n".join(texts)))
    return [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not node.decorator_list
        and times[node.name] == 1
    ]


@cache
def torchft_privates() -> frozenset[str]:
    """Return the private attributes and methods of torchft's ``Manager``."""
    tree = _module_of("torchft", "manager.py")
    (manager,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Manager")
    return frozenset(
        name
        for node in ast.walk(manager)
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef)
            else [node.attr]
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            else []
        )
        if re.match(r"_[a-z]", name)
    )


def private_uses() -> list[str]:
    """Return uses of torchft's private attributes on a manager, outside the adapter."""
    found = []
    for path, tree in trees().items():
        if path == ADAPTER:
            continue
        of_managers = {
            part
            for node in _statements(tree)
            if isinstance(node, ast.ClassDef)
            and any(re.search("Manager|TorchftInterface", ast.unparse(b)) for b in node.bases)
            for part in ast.walk(node)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in torchft_privates():
                continue
            owner = ast.unparse(node.value)
            of_self = owner == "self" and node in of_managers
            if of_self or owner.split(".")[-1].lstrip("_") == "manager":
                found.append(f"{path}:{node.lineno} {owner}.{node.attr}")
    return found


def paradigm_branches() -> list[str]:
    """Return reads of a property of a spec that tells paradigms apart.

    Paradigms, the spec, and the checker and simulator, which check every spec, do not count.
    """
    found = []
    for path, tree in trees().items():
        if path.startswith(("fft/protocol/", "fft/prove/", "fft/train/paradigms/")):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in TELLS_PARADIGMS_APART:
                owner = ast.unparse(node.value)
                if owner.rpartition(".")[2].endswith("spec"):
                    found.append(f"{path}:{node.lineno} {owner}.{node.attr}")
    return found


def code_lines() -> list[str]:
    """Return every line of code: neither blank, nor comment, nor docstring."""
    found = []
    for path, tree in trees().items():
        prose: set[int] = set()
        for each in _statements(tree):
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                prose.update(range(each.lineno, (each.end_lineno or 0) + 1))
        text = (ROOT / path).read_text(encoding="utf-8")
        for i, line in enumerate(text.splitlines(), 1):
            if i not in prose and line.strip() and not line.strip().startswith("#"):
                found.append(f"{path}:{i}")
    return found


def room_of(path: str) -> str:
    """Return the room of a file of the package: ``bus``, ``train/step``, or ``fft``."""
    folders = Path(path).parent.parts[1:]
    return "/".join(folders[: 2 if folders[:1] == ("train",) else 1]) or "fft"


def rooms() -> dict[str, int]:
    """Return the code lines of each room."""
    return dict(sorted(Counter(room_of(line.partition(":")[0]) for line in code_lines()).items()))


def room_limits(text: str) -> tuple[dict[str, int], list[str]]:
    """Return the limit of each room, and what is wrong with the table.

    Args:
        text: The decision record. The last of several rows of a room is in force.
    """
    limits: dict[str, int] = {}
    wrong = []
    for row in re.findall(r"^\| `(.+?)` \| (\d+) \|([^|\n]*)\|([^|\n]*)\|$", text, re.M):
        room, limit, feature, removed = row[0], int(row[1]), row[2], row[3]
        if limit > limits.get(room, limit) and not (feature.strip() and removed.strip()):
            wrong.append(f"{room}: {limit} is a raise; name the feature and what was removed")
        limits[room] = limit
    return limits, wrong


def rooms_over_limit() -> list[str]:
    """Return rooms with more code lines than their limit, or so few that it has to be lowered."""
    limits, found = room_limits(LIMITS.read_text(encoding="utf-8"))
    lines = rooms()
    found += [f"{room}: a limit, but no code" for room in sorted(limits.keys() - lines.keys())]
    for room, figure in lines.items():
        if (limit := limits.get(room)) is None:
            found.append(f"{room}: {figure} code lines without a limit; add a row to {LIMITS.name}")
        elif figure > limit:
            found.append(f"{room}: {figure} code lines, limit {limit}")
        elif figure < limit * (1 - SLACK) - 1:
            found.append(f"{room}: {figure} code lines, limit {limit}; run tools.house --lower")
    return found


def lower_limits() -> None:
    """Write the present code lines of each room into its last row, where they are fewer."""
    text = LIMITS.read_text(encoding="utf-8")
    limits, _ = room_limits(text)
    for room, figure in rooms().items():
        if figure < limits.get(room, 0):
            head, _, tail = text.rpartition(f"| `{room}` | {limits[room]} |")
            text = f"{head}| `{room}` | {figure} |{tail}"
    LIMITS.write_text(text, encoding="utf-8")


SUBJECT = re.compile(
    r"(?:^|(?<=[.:;!?][ \n]))\s*(?:(?:And|But|So|Or) )?"
    r"(?:Who|What|Whoever|Whatever|Whose)\b(?![^.]*\?)",
    re.M,
)
FRAGMENT = re.compile(r"(?:^|(?<=[.:;] ))\s*Of (?!course)[^.;:]{1,80}[.;:]", re.M)
NAME = re.compile(r"^test_(?:who|what|whoever|whose|of)_|_(?:who|whoever|whose)_")


def _prose_of(path: str) -> Iterator[tuple[str, int, str]]:
    """Yield (area, first line, text) for the prose of a file of the repository."""
    text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
    if path.endswith(".md"):
        fenced = re.compile(r"```.*?```", re.S)
        yield "docs", 1, fenced.sub(lambda found: "\n" * found[0].count("\n"), text)
    elif path.endswith(".yaml"):
        yield "yaml", 1, text
    elif path.endswith(".py"):
        for node in _statements(ast.parse(text)):
            value = node.value if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield "docstrings", value.lineno, value.value
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield "tests", node.lineno, node.name
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield "comments", token.start[0], token.string.lstrip("# ")


@cache
def prose() -> dict[str, tuple[int, list[str]]]:
    """Return, by area, the number of words and the places with a hard-to-read pattern."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    found: dict[str, tuple[int, list[str]]] = {}
    for name in names:
        if not (ROOT / name).is_file():
            continue
        for area, first, text in _prose_of(name):
            words, places = found.setdefault(area, (0, []))
            for pattern in (NAME,) if area == "tests" else (SUBJECT, FRAGMENT):
                for hit in pattern.finditer(text):
                    excerpt = " ".join(text[hit.start() : hit.start() + 90].split())
                    line = first + text.count("\n", 0, hit.start())
                    places.append(f"{name}:{line}: {excerpt}")
            found[area] = words + len(re.findall(r"[A-Za-z']+", text.replace("_", " "))), places
    return found


def _prose_gate(area: str, limit: float) -> Gate:
    return Gate(
        f"prose-{area}",
        find=lambda: prose()[area][1],
        limit=limit,
        target=0.3,
        per=lambda: prose()[area][0] / 1000,
    )


GATES = (
    Gate("circles", circular_files, limit=0, target=0),
    Gate("functions", long_functions, limit=0, target=0),
    Gate("torchft-private", private_uses, limit=0, target=0),
    Gate("paradigm-branches", paradigm_branches, limit=0, target=0),
    Gate("rooms", rooms_over_limit, limit=0, target=0),
    Gate("class-names", repeated_class_names, limit=44, target=0),
    Gate("glossary", replaced_words, limit=217, target=0),
    Gate("unused-names", unused_names, limit=5, target=0),
    _prose_gate("docs", 0.3),
    _prose_gate("docstrings", 0.3),
    _prose_gate("comments", 0.1),
    _prose_gate("tests", 0.3),
    _prose_gate("yaml", 0.0),
)


def main() -> int:
    """Print every gate with its figure; return 1 if a figure is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", metavar="GATE", choices=[gate.name for gate in GATES])
    parser.add_argument("--rooms", action="store_true", help="print the size of each room")
    parser.add_argument("--lower", action="store_true", help="lower the limits of rooms")
    parser.add_argument("--widest", action="store_true", help="print a list for reviewers")
    given = parser.parse_args()
    wanted = given.list
    if given.lower:
        lower_limits()
    if given.rooms:
        limits, _ = room_limits(LIMITS.read_text(encoding="utf-8"))
        for room, figure in rooms().items():
            print(f"{room:22}{figure:>7}  limit {limits.get(room, 0):>6}")
        print(f"{'sum':22}{len(code_lines()):>7}")
    if given.widest:
        for each in (classes(), constructors()):
            widest = sorted(each, key=lambda found: -found[0])[:WIDEST]
            print("\n".join(place for _, place in widest))
    if given.lower or given.rooms or given.widest:
        return 0
    missed = False
    for gate in GATES:
        if wanted is not None:
            if gate.name == wanted:
                print("\n".join(gate.find()))
            continue
        figure = round(gate.figure(), 2)
        missed |= figure > gate.limit
        verdict = "MISSED" if figure > gate.limit else "met" if figure <= gate.target else ""
        limits = f"limit {gate.limit:g}, target {gate.target:g}"
        print(f"{gate.name:18}{figure:>8g}  {limits:28} {verdict}".rstrip())
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

"""Pages of ``docs/reference/`` that are written from the code.

python -m tools.reference            # writes them again
python -m tools.reference --check    # exits with 1 if one is not up to date
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from torchft.manager import Manager

import fft
from fft.cli import app
from fft.protocol.load import load_spec
from fft.train.limits import EXCLUSIONS, Feature
from fft.train.paradigms.selection import traits_of
from tools.pages import markdown

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
INTEGRATIONS = ("huggingface", "lightning", "loggers", "torchtitan")
SPECS = (
    "hsdp",
    "ddp",
    "pipeline",
    "pipeline_ahead",
    "local_sgd",
    "diloco",
    "async",
    "hsdp_diloco",
)
MEMBERS = {
    "Checkpointing": (),
    "CursorLoader": ("indices", "items_per_data_epoch", "samples_per_item"),
    "DiLoCo": ("load_state_dict", "state_dict"),
    "LocalSGD": ("load_state_dict", "state_dict"),
    "ManagerConfig": (),
    "Notice": (),
    "ShardProcessGroupGloo": (),
    "ShardProcessGroupNCCL": (),
    "StageInput": (),
    "StageOutput": ("put",),
    "StreamLoader": (),
}
"""Members for users, of classes with others that only FFT calls."""
MADE_BY_FFT = ("Transaction",)
DETAILS = {Feature.FRAGMENTS, Feature.WEIGHTED, Feature.SHARDED_BY_RANK}
"""Settings of features that have a row."""
LIMITS = """# Limits

Features that cannot be used together. FFT raises an error as soon as a script uses the second one
of a pair; its message has the reason and the fix. `python -m tools.reference` writes this page from
`fft/train/limits.py`.

## By spec
"""
SURFACE = """# Surface

The names that users may rely on. All others may change in any version. The
[changelog](../../CHANGELOG.md) says how these may change. `python -m tools.reference` writes this
page from the code, and a test fails if the code differs from it. torchft's own arguments and
methods of `ManagerFFT` are those of `torchft.Manager`.
"""


def limits() -> str:
    """Return the page of the features that exclude each other."""
    traits = {name: _traits(name) for name in SPECS}
    kinds: dict[Feature, list[str]] = {}
    for name, found in traits.items():
        for each in sorted(found):
            kinds.setdefault(each, []).append(f"`{name}`")
    rows = []
    for feature in dict.fromkeys(each.feature for each in EXCLUSIONS):
        if feature in DETAILS:
            continue
        others = {o for each in EXCLUSIONS if each.feature is feature for o in each.others}
        if not others.isdisjoint(kinds):
            cells = ["no" if others & traits[name] else "yes" for name in SPECS]
            rows.append([_code(feature), *cells])
    reasons = [
        [_code(each.feature), ", ".join(_named(each.others, kinds)), each.text]
        for each in EXCLUSIONS
    ]
    lines = markdown(["feature", *(f"`{name}`" for name in SPECS)], rows)
    lines += ["", "## Reasons", "", *markdown(["feature", "not with", "reason and fix"], reasons)]
    return "\n".join([LIMITS, *lines, ""])


def _traits(name: str) -> frozenset[Feature]:
    """Return the features of a spec in groups of as many ranks as it is meant for."""
    spec = load_spec(name)
    return traits_of(spec, 1 if spec.ranks == "one" else 2)


def _named(features: Set[Feature], kinds: dict[Feature, list[str]]) -> list[str]:
    """Return the specs with one of ``features``, and the features that no spec determines."""
    specs = {name for each in features for name in kinds.get(each, ())}
    listed = [f"`{name}`" for name in SPECS if f"`{name}`" in specs]
    return listed + [_code(each) for each in sorted(features) if each not in kinds]


def _code(feature: Feature) -> str:
    return feature if " " in feature else f"`{feature}`"


# --- the surface ----------------------------------------------------------------------------------


def surface() -> str:
    """Return the page of all names that users may rely on."""
    names = [(name, getattr(fft, name)) for name in fft.__all__]
    modules = [(f"fft.{name}", each) for name, each in names if inspect.ismodule(each)]
    others = [(f"fft.{name}", each) for name, each in names if not inspect.ismodule(each)]
    blocks = [_shown(name, each) for name, each in others]
    offered = {name: _offered(each) for name, each in modules} | _integrations()
    options = dict(_commands(typer.main.get_command(app), "fft"))
    found = variables()
    counts = [
        ["names of `fft`", len(names)],
        ["arguments of `ManagerFFT` that are not torchft's", len(_own_arguments())],
        ["settings of `ManagerConfig`", len(fft.ManagerConfig.model_fields)],
        ["members of `ManagerFFT` that are not torchft's", len(_members(fft.ManagerFFT))],
        ["members of `Transaction`", len(_members(fft.Transaction))],
        ["commands for users", sum(map(_is_users, options))],
        [
            "their arguments and options",
            sum(len(o) for n, o in options.items() if _is_users(n)),
        ],
        ["commands of `fft dev`", sum(not _is_users(name) for name in options)],
        ["environment variables for users", len(found)],
    ]
    lines = [SURFACE, *markdown(["surface", "number"], [[n, str(c)] for n, c in counts])]
    lines += ["", "## Names of `fft`", "", "```", *"\n".join(blocks).splitlines(), "```"]
    lines += ["", "## Modules", ""]
    lines += [f"- `{name}`: {', '.join(f'`{each}`' for each in o)}" for name, o in offered.items()]
    lines += ["", "## Commands", "", "```"]
    lines += [f"{name} {' '.join(each)}".rstrip() for name, each in options.items()]
    lines += ["```", "", "## Environment variables", "", ", ".join(f"`{name}`" for name in found)]
    return "\n".join([*lines, ""])


def _is_users(command: str) -> bool:
    return not command.startswith("fft dev")


def _shown(name: str, each: Any) -> str:
    """Return the signature of a function, or of a class with its members."""
    short = name.removeprefix("fft.")
    lines = [name + ("" if short in MADE_BY_FFT else _signature(each))]
    if inspect.isclass(each):
        members = _members(each)
        wanted = MEMBERS.get(short, members.keys())
        lines += [f"    {members.get(one, one)}" for one in sorted(wanted)]
    return "\n".join(lines)


def _members(kind: type) -> dict[str, str]:
    """Return the public members that FFT gives to a class, with the arguments of methods."""
    known = set(dir(Manager)) if issubclass(kind, Manager) else set()
    found: dict[str, str] = {}
    for base in kind.__mro__:
        if not base.__module__.startswith("fft.") or issubclass(kind, BaseException):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in known or name in found:
                continue
            value = inspect.unwrap(getattr(value, "__func__", value))
            found[name] = name + (_signature(value) if inspect.isfunction(value) else "")
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for name in re.findall(r"^    (\w+):", attributes.partition("\n\n")[0], re.M):
            found.setdefault(name, name)
    return found


class _Some:
    """The default of an argument that is a function."""

    def __repr__(self) -> str:
        return "…"


def _signature(each: Any) -> str:
    """Return the parameters with their defaults, without types and ``self``."""
    if isinstance(each, type) and issubclass(each, BaseModel):
        fields = each.model_fields.items()
        shown = [f"{n}={'…' if f.default_factory else repr(f.default)}" for n, f in fields]
        return f"({', '.join(shown)})"
    if isinstance(each, type) and getattr(each, "_is_protocol", False):
        return ""
    found = inspect.signature(each.__init__ if isinstance(each, type) else each)
    shown = []
    for parameter in found.parameters.values():
        default = parameter.default
        if callable(default) and default is not inspect.Parameter.empty:
            default = _Some()
        if parameter.name not in ("self", "cls"):
            plain = parameter.replace(annotation=inspect.Parameter.empty, default=default)
            shown.append(plain)
    return str(found.replace(parameters=shown, return_annotation=inspect.Signature.empty))


def _own_arguments() -> list[str]:
    """Return the arguments of ``ManagerFFT`` that are not torchft's."""
    own, torchfts = inspect.signature(fft.ManagerFFT.__init__), inspect.signature(Manager.__init__)
    return [
        name
        for name in own.parameters
        if name not in torchfts.parameters and name not in ("args", "kwargs")
    ]


def _offered(module: Any) -> list[str]:
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    return sorted(name for name in names if not inspect.ismodule(getattr(module, name)))


def _integrations() -> dict[str, list[str]]:
    """Return the public classes and functions of the integrations, whose packages may be absent."""
    found = {}
    kinds = ast.ClassDef | ast.FunctionDef
    for module in sorted(INTEGRATIONS):
        path = ROOT / "fft" / "integrations" / f"{module}.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
        found[f"fft.integrations.{module}"] = sorted(names)
    return found


def _commands(command: Any, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command that runs something, with its arguments and options."""
    if hasattr(command, "commands"):
        for each, inner in sorted(command.commands.items()):
            if not inner.hidden:
                yield from _commands(inner, f"{name} {each}")
        return
    yield name, [max(each.opts, key=len) for each in command.params if each.name != "help"]


def variables() -> list[str]:
    """Return the environment variables that the code reads and that are for users."""
    page = (REFERENCE / "variables.md").read_text(encoding="utf-8")
    _, _, internal = page.partition("## Between")
    code = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "fft").rglob("*.py"))
    names = set(re.findall(r"\bFFT_[A-Z_]*[A-Z]\b", code))
    return sorted(names - set(re.findall(r"FFT_[A-Z_]+", internal)))


PAGES: dict[str, Callable[[], str]] = {"limits.md": limits, "surface.md": surface}


def outdated() -> list[str]:
    """Return the pages that differ from the code."""
    return [
        name
        for name, made in PAGES.items()
        if not (REFERENCE / name).exists()
        or (REFERENCE / name).read_text(encoding="utf-8") != made()
    ]


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        if found := outdated():
            sys.stderr.write(f"outdated: {', '.join(found)}; run python -m tools.reference\n")
        return bool(found)
    for name, made in PAGES.items():
        (REFERENCE / name).write_text(made(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

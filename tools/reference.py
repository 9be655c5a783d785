"""Pages of ``docs/reference/`` that are written from the code.

python -m tools.reference            # writes them again
python -m tools.reference --check    # exits with 1 if one is not up to date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Set
from pathlib import Path

from fft.protocol.load import load_spec
from fft.train.limits import EXCLUSIONS, Feature
from fft.train.paradigms.selection import traits_of
from tools.pages import markdown

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
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
DETAILS = {Feature.FRAGMENTS, Feature.WEIGHTED, Feature.SHARDED_BY_RANK}
"""Settings of features that have a row."""
LIMITS = """# Limits

Features that cannot be used together. FFT raises an error as soon as a script uses the second one
of a pair; its message has the reason and the fix. `python -m tools.reference` writes this page from
`fft/train/limits.py`.

## By spec
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


PAGES: dict[str, Callable[[], str]] = {"limits.md": limits}


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

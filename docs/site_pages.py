"""Pages of the site that are made when it is built, and links between pages and repository.

A hook of mkdocs (``make docs``). The start page is README; DESIGN, CONTRIBUTING, CHANGELOG become
pages as well. Examples are shown as they are. The pages about commands, specs and timeouts are made
from the code.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from fft.cli import app
from fft.protocol.load import json_schema, load_spec
from fft.protocol.timeouts import resolve

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = (
    *sorted(path.name for path in (ROOT / "examples").glob("*.py")),
    "hsdp_demo_faults.yaml",
)

log = get_plugin_logger("site_pages")


# --- pages from the code --------------------------------------------------------------------------


def commands() -> str:
    """Every command of ``fft`` with its options, as typer describes them."""
    group = typer.main.get_command(app)
    text = get_docs_for_click(obj=group, ctx=typer.Context(group), name="fft")
    return text.replace("# `fft`", "# Command line", 1)


def timeouts() -> str:
    """Every timeout with its default."""
    lines = [
        "# Timeouts",
        "",
        "Defaults of the spec `hsdp` on a `tcp://` bus. `fft config` shows those of your",
        "environment, with their origin, and `fft config --set NAME=SECONDS` checks a choice.",
        "",
        "| timeout | seconds | what it bounds |",
        "|---|--:|---|",
    ]
    for timeout in resolve(load_spec("hsdp"), {}, "tcp://").values():
        lines.append(f"| `{timeout.name}` | {timeout.seconds:g} | {_cell(timeout.bounds)} |")
    return "\n".join(lines) + "\n"


def spec_format() -> str:
    """The models of a spec file, from its JSON schema."""
    schema = json_schema()
    lines = [
        "# Spec files",
        "",
        "A spec is a YAML file in `fsm_specs/`, such as `hsdp.yaml`. `fft spec NAME` checks one,",
        "`fft graph NAME` draws it. This page is made from the JSON schema (`fft schema`,",
        "`fsm_specs/schema.json`), which editors can use to complete and check a spec.",
        "",
    ]
    lines += _model("A spec", schema)
    for name, model in schema["$defs"].items():
        lines += _model(name, model)
    return "\n".join(lines) + "\n"


def _model(name: str, model: dict[str, Any]) -> Iterator[str]:
    yield from (f"## {name}", "", _prose(model.get("description", "")), "")
    if "properties" not in model:
        yield from (f"One of {_values(model)}.", "")
        return
    yield from ("| field | value | default | meaning |", "|---|---|---|---|")
    required = model.get("required", ())
    for field, about in model["properties"].items():
        default = "required" if field in required else f"`{json.dumps(about.get('default'))}`"
        if "default" not in about and field not in required:
            default = "empty"
        meaning = _prose(about.get("description", ""))
        cells = (f"`{field}`", _values(about), default, meaning)
        yield "| " + " | ".join(_cell(cell) for cell in cells) + " |"
    yield ""


def _values(about: dict[str, Any]) -> str:
    """What a field may hold, in words."""
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in about:
        return f"`{about['const']}`"
    if "enum" in about:
        return " or ".join(f"`{value}`" for value in about["enum"])
    for several in ("anyOf", "oneOf"):
        if several in about:
            return " or ".join(_values(one) for one in about[several])
    if about.get("type") == "array":
        return f"list of {_values(about.get('items', {}))}"
    if about.get("type") == "object" and isinstance(about.get("additionalProperties"), dict):
        return f"names, each with {_values(about['additionalProperties'])}"
    return str(about.get("type", "any"))


def _prose(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def example(name: str) -> str:
    """A file of ``examples/``, as it is."""
    language = {".py": "python", ".yaml": "yaml"}[Path(name).suffix]
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    return f"# {name}\n\n``````{language}\n{text}``````\n"


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": commands,
    "reference/spec.md": spec_format,
    "reference/timeouts.md": timeouts,
    **{f"examples/{name}.md": (lambda name=name: example(name)) for name in EXAMPLES},
}
FROM_ROOT = {
    "index.md": ROOT / "README.md",
    "design.md": ROOT / "DESIGN.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
}


# --- links ----------------------------------------------------------------------------------------


def relinked(text: str, source: Path, at: str) -> str:
    """The page ``at`` of the site, written as ``source``: links into the repository, mended.

    A link to a file that the site does not have is left out with a warning, which ends a strict
    build.
    """
    shown = {path: page for page, path in FROM_ROOT.items()}
    shown |= {ROOT / "examples" / name: f"examples/{name}.md" for name in EXAMPLES}

    def mend(found: re.Match[str]) -> str:
        target, mark, anchor = found[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        path = Path(os.path.normpath(source.parent / target))
        if path in shown:
            page = shown[path]
        elif path.is_relative_to(DOCS) and (path.exists() or _is_made(path)):
            page = path.relative_to(DOCS).as_posix()
        else:
            log.warning(f"{source.relative_to(ROOT)}: the site has no page for {found[2]}")
            return found[0]
        where = os.path.relpath(page, Path(at).parent)
        return f"{found[1]}({where}{mark}{anchor})"

    return re.sub(r"(\])\(([^)\s]+)\)", mend, text)


def _is_made(path: Path) -> bool:
    return path.relative_to(DOCS).as_posix() in PAGES


# --- what mkdocs calls ----------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=source.read_text(encoding="utf-8")))
    for page, content in PAGES.items():
        files.append(File.generated(config, page, content=content()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend links, and let tables within ``<details>`` be tables."""
    at = page.file.src_uri
    if at in PAGES:
        return markdown
    text = relinked(markdown, FROM_ROOT.get(at, DOCS / at), at)
    return text.replace("<details>", '<details markdown="1">')

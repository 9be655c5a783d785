"""Reads a spec: finds its file by name, parses it strictly, and has it checked. Pure but for
that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fft.protocol.spec import FsmSpec
from fft.protocol.spec_checks import check_spec
from fft.util.errors import SpecError

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML has it: 20 times as fast, and every process of a job reads the spec."""


class _UniqueKeys(_SafeLoader):  # type: ignore[misc]
    """SafeLoader that refuses a key written twice instead of keeping the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise SpecError(f"line {line}: key {key!r} stands twice; keep one")
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


# YAML 1.1 reads a bare `on` as true; our key is the word.
_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, rx) for tag, rx in rules if tag != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_UniqueKeys.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf")
)


def spec_dirs() -> list[Path]:
    """Where specs are looked up by name: an installed wheel first, then a checkout.

    ``teaching`` holds specs that are wrong on purpose.
    """
    package = Path(__file__).resolve().parents[1]
    homes = [d for d in (package / "fsm_specs", package.parent / "fsm_specs") if d.is_dir()]
    return [d for home in homes for d in (home, home / "teaching")]


def find_spec(name_or_path: str | Path) -> Path:
    """The file of a spec given by name (``hsdp``) or by path.

    Raises:
        SpecError: there is no such file; the message lists the names there are.
    """
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"} or path.parent != Path():
        if path.is_file():
            return path
        raise SpecError(f"{path}: no such spec file")
    for directory in spec_dirs():
        if (found := directory / f"{name_or_path}.yaml").is_file():
            return found
    known = sorted({p.stem for d in spec_dirs() for p in d.glob("*.yaml")})
    raise SpecError(f"no spec named {str(name_or_path)!r}; there are: {', '.join(known) or 'none'}")


def load_spec(name_or_path: str | Path) -> FsmSpec:
    """Read and check a spec.

    Raises:
        SpecError: one error that names file, place and mend.
    """
    path = find_spec(name_or_path)
    return parse_spec(path.read_text(encoding="utf-8"), str(path))


def parse_spec(text: str, origin: str) -> FsmSpec:
    """Parse and check spec text; ``origin`` names it in errors."""
    try:
        spec = FsmSpec.model_validate(yaml.load(text, Loader=_UniqueKeys))
    except yaml.YAMLError as error:
        raise SpecError(f"{origin}: not YAML: {error}") from None
    except SpecError as error:
        raise SpecError(f"{origin}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "top level"
        line = _line_of(text, first["loc"])
        raise SpecError(f"{origin}:{line}: {place}: {first['msg']}{_mend(first)}") from None
    problems = check_spec(spec)
    if problems:
        where, message = problems[0]
        raise SpecError(f"{origin}:{_line_of(text, where)}: {'.'.join(map(str, where))}: {message}")
    return spec


def json_schema() -> dict[str, Any]:
    """JSON schema of the spec format, for editors."""
    return FsmSpec.model_json_schema()


def _mend(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"; unknown key {error['loc'][-1]!r}: remove it, or correct its spelling"
    if error["type"] == "missing":
        return f"; add the key {error['loc'][-1]!r}"
    return f"; found {error.get('input')!r}"


def _line_of(text: str, loc: tuple[Any, ...]) -> int:
    """Line (from 1) of the deepest part of ``loc`` that the text has."""
    node: yaml.Node | None = yaml.compose(text, Loader=_UniqueKeys)
    line = 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            match = [(k, v) for k, v in node.value if k.value == str(part)]
            if not match:
                break
            line, node = match[0][0].start_mark.line + 1, match[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            if part >= len(node.value):
                break
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line

"""Reads a spec: finds its file by name, merges its parts, parses it strictly and checks it.

Reading files is its only side effect.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fft.errors import ConfigError
from fft.protocol.include import place_of, read_whole, spec_dirs, values_of
from fft.protocol.spec import FsmSpec, MachineSpec, ThreadSpec
from fft.protocol.spec_checks import check_spec
from fft.protocol.vocabulary import VOCABULARIES

_Spec = TypeVar("_Spec", bound=MachineSpec)


def find_spec(name_or_path: str | Path) -> Path:
    """Return the path of a spec given by name (``hsdp``) or by path.

    Raises:
        ConfigError: There is no such file; the message lists the known names.
    """
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"} or path.parent != Path():
        if path.is_file():
            return path
        raise ConfigError(f"{path}: no such spec file")
    for directory in spec_dirs():
        if (found := directory / f"{name_or_path}.yaml").is_file():
            return found
    known = sorted({p.stem for d in spec_dirs() for p in d.glob("*.yaml")})
    raise ConfigError(
        f"no spec named {str(name_or_path)!r}; there are: {', '.join(known) or 'none'}"
    )


def load_spec(name_or_path: str | Path) -> FsmSpec:
    """Read and check a spec.

    Raises:
        ConfigError: Names the file, the place and the fix of the first error.
    """
    path = find_spec(name_or_path)
    return parse_spec(path.read_text(encoding="utf-8"), str(path))


def load_machine(name_or_path: str | Path) -> MachineSpec:
    """Read and check a spec of any machine: the engine's or the main thread's."""
    path = find_spec(name_or_path)
    root = read_whole(text := path.read_text(encoding="utf-8"), str(path))
    values = values_of(root)
    is_thread = isinstance(values, dict) and values.get("machine") == "main_thread"
    return (parse_thread if is_thread else parse_spec)(text, str(path))


def load_thread() -> ThreadSpec:
    """Read and check the main thread's machine."""
    path = find_spec("main_thread")
    return parse_thread(path.read_text(encoding="utf-8"), str(path))


def parse_spec(text: str, origin: str) -> FsmSpec:
    """Parse and check the text of a spec.

    Args:
        origin: Its path, or a name for error messages.
    """
    return _parse(text, origin, FsmSpec)


def parse_thread(text: str, origin: str) -> ThreadSpec:
    """Parse and check the text of the main thread's machine; see ``parse_spec``."""
    return _parse(text, origin, ThreadSpec)


def _parse(text: str, origin: str, kind: type[_Spec]) -> _Spec:
    root = read_whole(text, origin)
    try:
        spec = kind.model_validate(values_of(root))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "top level"
        at = place_of(root, first["loc"])
        raise ConfigError(f"{at}: {place}: {first['msg']}{_suggest_replacement(first)}") from None
    problems = check_spec(spec, VOCABULARIES[spec.machine])
    if problems:
        where, message = problems[0]
        raise ConfigError(f"{place_of(root, where)}: {'.'.join(map(str, where))}: {message}")
    return spec


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a spec file, for editors.

    No top-level key is required, because a file may include the parts that it lacks.
    """
    schema = FsmSpec.model_json_schema()
    schema["properties"]["machine"] = MachineSpec.model_json_schema()["properties"]["machine"]
    del schema["required"]
    schema["properties"] |= {
        "include": {
            "type": "array",
            "items": {"type": "string"},
            "description": "files, as seen from this one, that this one is laid over",
        },
        "instead": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "effect: the one that included rows shall have in its place",
        },
    }
    return schema


def _suggest_replacement(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"; unknown key {error['loc'][-1]!r}: remove it, or correct its spelling"
    if error["type"] == "missing":
        return f"; add the key {error['loc'][-1]!r}"
    return f"; found {error.get('input')!r}"

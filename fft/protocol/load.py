"""Merges a spec from its files: ``include``, differences, and renamed effects and targets.

Reading files is its only side effect. A file with ``include: [part, …]`` is laid over the parts
that it names. Their paths are relative to the file, else to FFT's own specs. Mappings are merged
key by key, any other value replaces that of the parts, and a key without a value removes the part's
key. Two parts of one list must not set the same key. ``instead: {name: other}`` replaces an
effect or a row's target state wherever the parts name it. Nodes keep their marks, so an error names
file and line of the part.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from fft.errors import ConfigError
from fft.protocol.spec import FsmSpec, MachineSpec, ThreadSpec
from fft.protocol.spec_checks import check_spec
from fft.protocol.vocabulary import VOCABULARIES

Pair = tuple[yaml.Node, yaml.Node]


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader if PyYAML has it, because every process reads its spec and it is faster."""


class _Loader(_SafeLoader):  # type: ignore[misc]
    """A loader that reads a bare `on`, which is a key of specs, as a string and not as true."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rx) for tag, rx in rules if tag != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_NULL = "tag:yaml.org,2002:null"


def spec_dirs() -> list[Path]:
    """Return the directories of the shipped specs: in an installed wheel first, then a checkout.

    ``teaching`` holds specs that are wrong on purpose.
    """
    package = Path(__file__).resolve().parents[1]
    homes = [d for d in (package / "fsm_specs", package.parent / "fsm_specs") if d.is_dir()]
    return [d for home in homes for d in (home, home / "teaching")]


def read_whole(text: str, origin: str) -> yaml.Node:
    """Return the spec in ``text``, merged with everything that it includes.

    Args:
        origin: Its path, or a name for error messages.

    Raises:
        ConfigError: The text is not YAML or repeats a key; a part is missing, includes itself, or
            contradicts another part; or a difference removes something that the parts do not have.
    """
    return _read(text, origin, (_known_as(Path(origin)),))


def values_of(node: yaml.Node) -> Any:
    """Return the plain data of a node."""
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def place_of(node: yaml.Node, loc: tuple[Any, ...]) -> str:
    """Return ``file:line`` of the deepest existing element on the path ``loc``."""
    mark, at = node.start_mark, node
    for part in loc:
        if isinstance(at, yaml.MappingNode):
            match = [(k, v) for k, v in at.value if k.value == str(part)]
            if not match:
                break
            mark, at = match[0][0].start_mark, match[0][1]
        elif isinstance(at, yaml.SequenceNode) and isinstance(part, int) and part < len(at.value):
            at = at.value[part]
            mark = at.start_mark
        else:
            break
    return _at(mark)


def _at(mark: yaml.Mark) -> str:
    return f"{mark.name}:{mark.line + 1}"


def _known_as(path: Path) -> Path:
    return path.resolve()


def _read(text: str, origin: str, above: tuple[Path, ...]) -> yaml.Node:
    root = _composed(text, origin)
    if not isinstance(root, yaml.MappingNode):
        return root
    include, instead = _taken(root, "include"), _taken(root, "instead")
    if include is None:
        if instead is not None:
            raise ConfigError(f"{_at(instead.start_mark)}: instead: needs an include")
        return root
    whole: yaml.MappingNode | None = None
    for entry in _entries(include):
        part = _part(entry, Path(origin).parent, above)
        whole = part if whole is None else _joined(whole, part, _refuse)
    assert whole is not None, "include has an entry"
    if instead is not None:
        _rename(whole, instead)
    return _joined(whole, root, lambda old, new: _difference(old, new))


def _composed(text: str, origin: str) -> yaml.Node:
    stream = io.StringIO(text)
    stream.name = origin  # PyYAML puts it into the marks of the nodes
    loader = _Loader(stream)
    try:
        root: yaml.Node | None = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not YAML: {error}") from None
    finally:
        loader.dispose()
    if root is None:
        raise ConfigError(f"{origin}: the file is empty")
    _refuse_twice(root)
    return root


def _refuse_twice(node: yaml.Node) -> None:
    """Refuse a repeated key, of which YAML would keep the last value."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_twice(child)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                text = f"key {key.value!r} stands twice; keep one"
                raise ConfigError(f"{_at(key.start_mark)}: {text}")
            seen.add(key.value)
            _refuse_twice(value)


def _taken(root: yaml.MappingNode, name: str) -> yaml.Node | None:
    """Remove a top-level key and return its value."""
    found = [value for key, value in root.value if key.value == name]
    root.value = [pair for pair in root.value if pair[0].value != name]
    return found[0] if found else None


def _entries(include: yaml.Node) -> list[yaml.Node]:
    if not isinstance(include, yaml.SequenceNode) or not include.value:
        raise ConfigError(f"{_at(include.start_mark)}: include: write a list of files")
    return list(include.value)


def _part(entry: yaml.Node, folder: Path, above: tuple[Path, ...]) -> yaml.MappingNode:
    path = _found(str(entry.value), folder)
    if _known_as(path) in above:
        raise ConfigError(f"{_at(entry.start_mark)}: {path} includes itself")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        text = f"{path} cannot be included: {error.strerror}"
        raise ConfigError(f"{_at(entry.start_mark)}: {text}") from None
    part = _read(text, str(path), (*above, _known_as(path)))
    if not isinstance(part, yaml.MappingNode):
        raise ConfigError(f"{path}: a part is a mapping of keys to values")
    return part


def _found(name: str, folder: Path) -> Path:
    """The part relative to the file that names it, else the part of this name that FFT ships."""
    for home in (folder, *spec_dirs()):
        if (path := home / name).is_file():
            return path
    return folder / name


Meet = Callable[[Pair, Pair], Pair | None]
"""Merges two values of one key unless both are mappings; None removes the key."""


def _joined(below: yaml.MappingNode, above: yaml.MappingNode, meet: Meet) -> yaml.MappingNode:
    """Merge two mappings key by key, in the order of ``below``; new keys come last."""
    new = {key.value: (key, value) for key, value in above.value}
    found: list[Pair] = []
    for key, value in below.value:
        other = new.pop(key.value, None)
        if other is None:
            found.append((key, value))
        elif isinstance(value, yaml.MappingNode) and isinstance(other[1], yaml.MappingNode):
            found.append((key, _joined(value, other[1], meet)))
        elif (pair := meet((key, value), other)) is not None:
            found.append(pair)
    for key, value in new.values():
        if value.tag == _NULL:
            raise ConfigError(f"{_at(key.start_mark)}: there is no {key.value!r} to take away")
        found.append((key, value))
    return yaml.MappingNode(below.tag, found, below.start_mark, below.end_mark)


def _refuse(old: Pair, new: Pair) -> Pair | None:
    at, also = _at(new[0].start_mark), _at(old[0].start_mark)
    raise ConfigError(f"{at}: {new[0].value!r} stands in {also}, too; keep one")


def _difference(old: Pair, new: Pair) -> Pair | None:
    return None if new[1].tag == _NULL else new


def _rename(node: yaml.MappingNode, instead: yaml.Node) -> None:
    others: Mapping[str, str] = values_of(instead)
    if not isinstance(others, dict) or not all(isinstance(o, str) for o in others.values()):
        raise ConfigError(
            f"{_at(instead.start_mark)}: instead: write effect or state: the other one"
        )
    used: set[str] = set()
    _rename_in_rows(node, others, used, False)
    for sequences in (value for key, value in node.value if key.value == "sequences"):
        for _, parts in sequences.value:
            _rename_in_rows(parts, others, used, True)
    if unused := sorted(set(others) - used):
        at = place_of(instead, (unused[0],))
        raise ConfigError(f"{at}: no included row has the effect or target {unused[0]!r}")


def _rename_in_rows(
    node: yaml.Node, others: Mapping[str, str], used: set[str], is_named: bool
) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _rename_in_rows(value, others, used, key.value in ("effects", "to"))
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _rename_in_rows(child, others, used, is_named)
    elif is_named and node.value in others:
        used.add(node.value)
        node.value = others[node.value]


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
            "description": "effect or target state: the one that included rows have in its place",
        },
    }
    return schema


def _suggest_replacement(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"; unknown key {error['loc'][-1]!r}: remove it, or correct its spelling"
    if error["type"] == "missing":
        return f"; add the key {error['loc'][-1]!r}"
    return f"; found {error.get('input')!r}"

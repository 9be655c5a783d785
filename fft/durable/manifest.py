"""What the files of a checkpoint say of themselves: a receipt of each rank, and the manifest. Pure.

Both are JSON with a digest of themselves, so that an edit is seen. The form is strict: what is
unknown is refused as a whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fft.durable.stores import PARTIAL
from fft.util.errors import FftError
from fft.util.names import in_file_name

FORMAT = 1
"""Version of files and manifest; a reader refuses another one."""
_NAME = re.compile(r"^step-(0|[1-9][0-9]{0,17})$")
_FILE = r"^g[A-Za-z0-9_.-]{1,200}r[0-9]{1,6}\.(json|safetensors)$"

Count = Annotated[int, Field(ge=0)]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class DamagedCheckpoint(FftError):
    """A checkpoint that must not be loaded; names it, the file, and what is wrong."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class File(_Strict):
    """One file of a checkpoint."""

    name: Annotated[str, Field(pattern=_FILE)]
    size: Count
    sha256: Sha


class Scope(_Strict):
    """Where one scope of the job stands."""

    step: Count
    lineage: str
    batches: Count
    cursor: Count
    returned: tuple[Count, ...]
    """Slices before the cursor that are not consumed."""


class Receipt(_Strict):
    """What one rank has written and read again; written last of its files. Without files: it
    delivers nothing, so that nobody waits for it."""

    attempt: str
    group: str
    rank: Count
    files: tuple[File, ...]
    at: Scope | None = None
    """Where its scope stands, if each stage has one of its own."""


class Origin(_Strict):
    """The checkpoint that the job which took this one had begun with."""

    step: Count
    lineage: str


class Manifest(_Strict):
    """What a checkpoint is, and what belongs to it.

    ``scopes``: by name; of a job with one scope, ``job``. Where each stage has one, step, lineage
    and place in the data are those of the first, and others may be some slices behind. ``writer``:
    the group whose files hold what all groups have in common. ``groups``: those of whose ranks
    buffers and random states are there. ``ranks``: of each group.
    """

    format: Literal[1] = 1
    step: Count
    lineage: str
    batches: Count
    cursor: Count
    returned: tuple[Count, ...]
    scopes: dict[str, Scope]
    writer: str
    groups: tuple[str, ...]
    ranks: Annotated[int, Field(ge=1)]
    spec: str
    spec_digest: str
    fft_version: str
    torch_version: str
    attempt: str
    written_at: float
    resumed_from: Origin | None = None
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def files_of(self, group: str, rank: int) -> dict[str, File]:
        """``json`` and ``safetensors`` of a rank; empty if it wrote none."""
        stem = file_stem(group, rank)
        return {
            file.name.rpartition(".")[2]: file
            for file in self.files
            if file.name.rpartition(".")[0] == stem
        }


_Sealed = TypeVar("_Sealed", Receipt, Manifest)


def step_of(directory: str) -> int | None:
    """The step that a directory's name says; None: it is not that of a checkpoint."""
    found = _NAME.match(directory)
    return int(found[1]) if found else None


def name_of(step: int) -> str:
    """The directory of a checkpoint."""
    return f"step-{step}"


def partial_name(step: int, attempt: str) -> str:
    """The directory in which an attempt at a checkpoint is written."""
    return f"{name_of(step)}{PARTIAL}{attempt}"


def attempt_name(life: str, record: str) -> str:
    """Of an attempt: equal on all ranks, and of no other ``life`` of the job's bus."""
    return f"{_short(life, 4)}-{_short(record, 8)}"


def life_of(attempt: str) -> str:
    """The life of the bus in which an attempt was made; empty: in none."""
    life, dash, _ = attempt.partition("-")
    return life if dash else ""


def _short(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def file_stem(group: str, rank: int) -> str:
    """Of a rank's files; groups of unlike names have unlike stems."""
    return f"g{in_file_name(group)}r{rank}"


def receipt_name(group: str, rank: int) -> str:
    """Of a rank's receipt. It is not part of the checkpoint."""
    return f"{file_stem(group, rank)}.receipt"


def sealed(thing: Receipt | Manifest) -> bytes:
    """As JSON, with a digest of itself."""
    data = thing.model_dump(mode="json")
    return json.dumps({**data, "sha256": _digest(data)}, indent=1).encode()


def unsealed(kind: type[_Sealed], data: bytes, place: str) -> _Sealed:
    """What `sealed` has made. Raises DamagedCheckpoint, which names ``place``."""
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{place}: no JSON ({error})") from None
    if not isinstance(found, dict):
        raise DamagedCheckpoint(f"{place}: no JSON object")
    digest = found.pop("sha256", None)
    if digest != _digest(found):
        raise DamagedCheckpoint(f"{place}: it was changed after it was written")
    try:
        return kind.model_validate_json(json.dumps(found))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedCheckpoint(f"{place}: {where}: {first['msg']}") from None


def _digest(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

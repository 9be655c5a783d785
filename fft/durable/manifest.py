"""The metadata of a checkpoint: a receipt of each rank, and the manifest. Pure.

Both are JSON with a digest of their own contents, so that an edit is detected. The format is
strict: data with unknown fields is refused as a whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fft.durable.stores import PARTIAL
from fft.errors import CheckpointError
from fft.util.names import in_file_name

FORMAT = 1
"""Version of the files and the manifest; a reader refuses any other version."""
_NAME = re.compile(r"^step-(0|[1-9][0-9]{0,17})$")
_FILE = r"^g[A-Za-z0-9_.-]{1,200}r[0-9]{1,6}\.(json|safetensors)$"

Count = Annotated[int, Field(ge=0)]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class DamagedCheckpoint(CheckpointError):
    """A checkpoint must not be loaded; the message names it, the file and the problem."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class File(_Strict):
    """One file of a checkpoint."""

    name: Annotated[str, Field(pattern=_FILE)]
    size: Count
    sha256: Sha


class Scope(_Strict):
    """The position of one scope of the job."""

    step: Count
    lineage: str
    batches: Count
    cursor: Count
    returned: tuple[Count, ...]
    """Slices before the cursor that are not consumed."""


class Receipt(_Strict):
    """The files that one rank has written and read back; the receipt is written after them.

    A receipt without files means that the rank delivers nothing, so that the writer of the manifest
    does not wait for it.
    """

    attempt: str
    group: str
    rank: Count
    files: tuple[File, ...]
    at: Scope | None = None
    """Position of the rank's scope, if each stage has its own scope."""


class Origin(_Strict):
    """The checkpoint from which the job that took this one had resumed."""

    step: Count
    lineage: str


class Manifest(_Strict):
    """The description of a checkpoint and the list of its files.

    Attributes:
        step: Committed steps. If each stage has its own scope, ``step``, ``lineage``, ``batches``,
            ``cursor`` and ``returned`` are those of the first stage; others may be some slices
            behind.
        scopes: Position of each scope by name; ``job`` for a job with one scope.
        writer: The group whose files hold the state that all groups have in common.
        groups: The groups whose buffers and random states are in the checkpoint.
        ranks: Number of ranks of each group.
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
        """Total size of the files in bytes."""
        return sum(file.size for file in self.files)

    def files_of(self, group: str, rank: int) -> dict[str, File]:
        """Return a rank's files by suffix, ``json`` and ``safetensors``; empty if it wrote none."""
        stem = file_stem(group, rank)
        return {
            file.name.rpartition(".")[2]: file
            for file in self.files
            if file.name.rpartition(".")[0] == stem
        }


_Sealed = TypeVar("_Sealed", Receipt, Manifest)


def step_of(directory: str) -> int | None:
    """Return the step in a directory's name, or None if it is not the name of a checkpoint."""
    found = _NAME.match(directory)
    return int(found[1]) if found else None


def name_of(step: int) -> str:
    """Return the directory of the checkpoint of ``step``."""
    return f"step-{step}"


def partial_name(step: int, attempt: str) -> str:
    """Return the directory in which an attempt at a checkpoint is written."""
    return f"{name_of(step)}{PARTIAL}{attempt}"


def attempt_name(life: str, record: str) -> str:
    """Return the name of an attempt: equal on all ranks, and unique to a ``life`` of the bus."""
    return f"{_short(life, 4)}-{_short(record, 8)}"


def life_of(attempt: str) -> str:
    """Return the life of the bus in which an attempt was made, or an empty string if in none."""
    life, dash, _ = attempt.partition("-")
    return life if dash else ""


def _short(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def file_stem(group: str, rank: int) -> str:
    """Return the stem of the names of a rank's files; different groups have different stems."""
    return f"g{in_file_name(group)}r{rank}"


def receipt_name(group: str, rank: int) -> str:
    """Return the name of a rank's receipt, which is not part of the checkpoint."""
    return f"{file_stem(group, rank)}.receipt"


def sealed(thing: Receipt | Manifest) -> bytes:
    """Encode a receipt or manifest as JSON with a digest of its contents."""
    data = thing.model_dump(mode="json")
    return json.dumps({**data, "sha256": _digest(data)}, indent=1).encode()


def unsealed(kind: type[_Sealed], data: bytes, place: str) -> _Sealed:
    """Decode the output of `sealed`. Raises DamagedCheckpoint, whose message names ``place``."""
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

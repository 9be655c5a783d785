"""The contents of a checkpoint: a copy of a rank's state at a commit, and its two files.

A rank writes a safetensors file with the tensors and a JSON file that refers to them; there is no
pickle. A value that JSON lacks is encoded as a dict with a single key that begins with ``$``.

The main thread immediately copies state that forward and backward may change. Parameters and
optimizer state do not change before the next update. A background thread copies them during the
next forward and backward. Code that is about to change them waits for that thread
(`Snapshot.finish`). A snapshot holds one copy of this rank's state.
"""

from __future__ import annotations

import base64
import json
import math
import threading
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fft.checkpoints.files import File, file_stem
from fft.checkpoints.stores import Store
from fft.errors import CheckpointError, FftError
from fft.train.session.rank_state import RankState
from fft.train.state.local_tensors import local_of, version_of
from fft.train.state.plain_state import merged, plain
from fft.train.state.random_states import export_random
from fft.train.state.step_state import export_parameters

# --- the files of a rank ---


class UnreadableFile(CheckpointError):
    """A file of a checkpoint does not have the expected contents."""


def packed(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split plain data that contains tensors into a JSON value and the tensors by name.

    Raises CheckpointError.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _packed(tree, "", tensors), tensors


def unpacked(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Reverse `packed`. Raises UnreadableFile."""
    try:
        return _unpacked(data, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableFile(f"the JSON does not fit its tensors: {error!r}") from error


def write_rank(
    store: Store,
    directory: str,
    place: tuple[str, int],
    data: Any,
    tensors: Mapping[str, torch.Tensor],
) -> tuple[File, ...]:
    """Write both files of a group's rank and read them back for their digests.

    Args:
        place: Group and rank.
        tensors: Tensors on the CPU that share no memory.

    Raises OSError, CheckpointError.
    """
    stem = file_stem(*place)
    with store.writing(f"{directory}/{stem}.safetensors") as path:
        _write_tensors(path, tensors)
    store.write(f"{directory}/{stem}.json", to_json(data))
    sizes, names = store.files(directory), (f"{stem}.json", f"{stem}.safetensors")
    if lost := [name for name in names if name not in sizes]:
        raise OSError(f"{', '.join(lost)} in {directory} was removed after it had been written")
    return tuple(
        File(name=name, size=sizes[name], sha256=store.digest(f"{directory}/{name}"))
        for name in names
    )


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"safetensors has no type for tensors of {error}") from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file. Raises UnreadableFile, OSError."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UnreadableFile(f"{path.name}: no safetensors file: {error}") from error


def to_json(data: Any) -> bytes:
    """Encode ``data`` as the bytes of a JSON file."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def from_json(data: bytes, name: str) -> Any:
    """Decode the bytes of the JSON file ``name``. Raises UnreadableFile."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{name}: no JSON ({error})") from error


def _packed(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = place.lstrip(".") or "value"
        while name in tensors:  # keys of different types may have the same text
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [_packed(item, f"{place}.{i}", tensors) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [(k, _packed(v, f"{place}.{k}", tensors)) for k, v in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[_packed(k, f"{place}.key", tensors), v] for k, v in pairs]}
    raise CheckpointError(
        f"{place.lstrip('.')} is a {type(value).__name__}, which a checkpoint cannot hold: it "
        "takes tensors, dicts, lists, tuples, str, bytes, bool, int, float and None"
    )


def _unpacked(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(data, list):
        return [_unpacked(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((kind, value),) = data.items()
        if kind == "$tensor":
            return tensors[value]
        if kind == "$float":
            return float(value)
        if kind == "$bytes":
            return base64.b64decode(value, validate=True)
        if kind == "$tuple":
            return tuple(_unpacked(item, tensors) for item in value)
        if kind == "$dict":
            return {_unpacked(k, tensors): _unpacked(v, tensors) for k, v in value}
    return {key: _unpacked(value, tensors) for key, value in data.items()}


PARAMETERS = "state.parameters."
LATE = (PARAMETERS, "state.optimizers.")
"""Name prefixes, in a file, of the state that forward and backward do not change.

For groups with local steps this is the shared state. The local state of a group has other names,
and the main thread copies it immediately.
"""


COPY_LIMIT_S = 30.0
"""Timeout of the next update for a copy; on expiry the checkpoint fails, and the step continues."""


class Staging:
    """Memory for one copy of a rank's state, which later checkpoints reuse."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def keep_only(self, names: Set[str]) -> None:
        """Free the memory of tensors with other names."""
        self._held = {name: held for name, held in self._held.items() if name in names}

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor of the same shape and dtype, reusing that of ``name`` if it fits."""
        held = self._held.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu"
            )
            self._held[name] = held
        return held


@dataclass(frozen=True)
class Layout:
    """The shard of a tensor on this rank."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offset: tuple[int, ...]


class Snapshot:
    """One copy of a rank's state.

    The constructor runs on the main thread between two steps, and `copy` runs on another thread.

    Args:
        state: State of this rank.
        staging: The memory for the copy.
        shared: Whether to include the shared state of all groups.
        at_once: Parameters that code other than updates and the step function changes. The
            constructor copies them immediately.
        gives: Slices whose stage outputs are included.

    Raises:
        TypeError, CheckpointError: The state contains a value that no file can hold; the message
            names its place.
    """

    def __init__(
        self,
        state: RankState,
        staging: Staging,
        shared: bool,
        at_once: Set[str] = frozenset(),
        gives: range = range(0),
    ) -> None:
        tree, self._watched = _tree_of(state, shared, gives)
        self._data, live = packed(tree)
        self._step = state.registered_state if self._watched else None
        """The state whose parameters and optimizer state `copy` looks up."""
        self._late: dict[str, torch.Tensor] = {}
        # the shared state may contain no model parameters
        if not self._watched:
            self._late = {name: t for name, t in live.items() if name.startswith(LATE)}
        early = self._early(at_once)
        parameters = export_parameters({name: self._watched[name] for name in early})
        live |= packed({"state": {"parameters": parameters}})[1]
        now = {name: tensor for name, tensor in live.items() if name not in self._late}
        self._targets = {n: staging.like(n, tensor).copy_(tensor) for n, tensor in now.items()}
        self._staging = staging
        self._streams = _mark_streams((*self._late.values(), *self._watched.values()))
        self._by_bodies = bool(self._watched)
        """Whether forward and backward could change state that `copy` copies."""
        self._versions = {name: version_of(t) for name, t in self._watched.items()}
        self._late_names = self._watched.keys() - early
        """Names of the parameters that `copy` copies."""
        self._copied = threading.Event()
        self.confirmed = threading.Event()
        """Set after the check that the state did not change during the copy.

        If it did change, `problem` is set, too.
        """
        self._lock = threading.Lock()
        self.copy_s = 0.0
        self.problem: str | None = None
        """The reason why the copy must not be used, or None."""
        self.edited: tuple[str, ...] = ()
        """Parameters that changed during the copy."""

    @property
    def data(self) -> Any:
        """The part of the state that JSON can hold, once `copy` has returned True."""
        return self._data

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The copied tensors, once `copy` has returned True."""
        return self._targets

    def _early(self, at_once: Set[str]) -> Set[str]:
        """Return the parameters that forward and backward change, and those of ``at_once``."""
        if self._step is None:
            return frozenset()
        edited = self._step.edited  # None if not determined yet
        return self._watched.keys() if edited is None else self._watched.keys() & (edited | at_once)

    def copy(self) -> bool:
        """Copy the rest; return whether the result is the complete state at the commit."""
        began = time.monotonic()
        try:
            with torch.no_grad():
                self._look_up()
                self._copy()
        except (TypeError, LookupError, FftError) as error:
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self.copy_s = time.monotonic() - began
            with self._lock:
                self._late, self._step = {}, None
                self._copied.set()
            if not self._by_bodies:
                self.confirmed.set()
        return self.problem is None

    def _look_up(self) -> None:
        if self._step is None:
            return
        names = self._watched
        lasting = {"state": self._step.export_lasting(names), "layouts": _layouts(names)}
        data, live = packed(lasting)
        self._data = merged(self._data, data)
        self._late = {name: t for name, t in live.items() if name not in self._targets}

    def _copy(self) -> None:
        self._staging.keep_only(self._targets.keys() | self._late.keys())
        # on this thread, because allocating pinned memory takes as long as filling it
        self._targets |= {n: self._staging.like(n, tensor) for n, tensor in self._late.items()}
        for device in {t.device for t in self._late.values() if t.is_cuda}:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                if device in self._streams:
                    stream.wait_event(self._streams[device])
                else:  # it holds optimizer state only
                    torch.cuda.synchronize(device)
                for name, tensor in self._late.items():
                    if tensor.device == device:
                        self._targets[name].copy_(tensor, non_blocking=True)
            stream.synchronize()
        for name, tensor in self._late.items():
            if self.problem is not None:
                return
            if not tensor.is_cuda:
                self._targets[name].copy_(tensor)

    def finish(self, limit_s: float) -> float:
        """Wait for the copy, on the main thread, before the state may change.

        The copy fails if it takes longer than ``limit_s``, or if a parameter has changed.

        Returns:
            Seconds waited.
        """
        began = time.monotonic()
        if self.confirmed.is_set():
            return 0.0
        if not self._copied.wait(limit_s):
            self._give_up(f"its copy was not done {limit_s:g} s after the vote")
        watched, self._watched = self._watched, {}
        self.edited = tuple(n for n, t in watched.items() if version_of(t) != self._versions[n])
        if self._late_names & set(self.edited):
            self._give_up(
                f"{', '.join(self.edited[:3])} was changed while it was copied; from now on it is "
                "copied before anybody can"
            )
        self.confirmed.set()
        return time.monotonic() - began

    def await_confirmation(self) -> None:
        """Wait for `confirmed`: the update, a rollback or the end of the script sets it.

        Raises:
            FftError: The copy is not usable.
        """
        self.confirmed.wait()
        if self.problem is not None:
            raise FftError(self.problem)

    def _give_up(self, problem: str) -> None:
        with self._lock:
            self.problem = self.problem or problem


class Copies:
    """The successive copies of a rank's state in the same memory; used on the main thread."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._staging = Staging()
        self._open: Snapshot | None = None
        self._changed_late: frozenset[str] = frozenset()
        """Parameters that code other than updates and the step function has changed."""

    def begin(self, shared: bool, gives: range) -> Snapshot:
        """Start a copy of the state. See `Snapshot` for arguments and errors."""
        state, staging, edited = self._state, self._staging, self._changed_late
        self._open = Snapshot(state, staging, shared, edited, gives)
        return self._open

    def finish(self) -> float:
        """Finish the copy in progress before the state changes; return the seconds waited."""
        snapshot, self._open = self._open, None
        if snapshot is None:
            return 0.0
        waited = snapshot.finish(COPY_LIMIT_S)
        self._changed_late |= frozenset(snapshot.edited)
        return waited

    def leave_memory(self) -> None:
        """Use new memory, and leave the old memory to copies that are still being written."""
        self._staging = Staging()


def _tree_of(
    state: RankState, shared: bool, gives: range
) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
    """Return the contents of a rank's files, and the parameters by name."""
    step = state.registered_state
    own: dict[str, Any] = {"random": export_random(step.generators if step is not None else None)}
    if step is not None:
        own["buffers"] = step.export_buffers()
    own |= state.paradigm.export_own(gives)
    if not shared:
        return {"own": own}, {}
    found: dict[str, Any] = {
        "own": own,
        "user": {
            key: plain(value(), f"state_dict of {key!r}") for key, value in state.users.items()
        },
        "data": state.export_data(),
    }
    if step is None:
        return found | {"state": None}, {}
    found["aliases"] = step.aliases()
    found["state"], watched = state.paradigm.export_shared()
    if not watched:  # otherwise `copy` adds the layouts
        found["layouts"] = _layouts(step.resharded_named_parameters())
    return found, watched


def _layouts(names: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return this rank's layouts of sharded parameters, as plain data."""
    return {
        name: {
            "shape": list(layout.shape),
            "offset": list(layout.offset),
            "local": list(local_of(tensor).shape),
        }
        for name, tensor in names.items()
        if (layout := layout_of(tensor)) is not None
    }


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return this rank's layout of a DTensor, or None for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return None
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Layout(tuple(tensor.shape), tuple(offset))


def _mark_streams(late: Iterable[torch.Tensor]) -> dict[torch.device, torch.cuda.Event]:
    """Record an event after all issued work on each device of the tensors in ``late``."""
    found: dict[torch.device, torch.cuda.Event] = {}
    for device in {tensor.device for tensor in late if tensor.is_cuda}:
        found[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        found[device].record(torch.cuda.current_stream(device))
    return found

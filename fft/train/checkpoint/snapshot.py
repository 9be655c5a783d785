"""The state of a rank as of a commit, copied beside the training.

State that forward and backward may change is copied at once, on the main thread. Parameters and
optimizer state do not change before the next update, so a thread looks them up and copies them
while the next forward and backward run. Code that is about to change them waits for the thread
(`Snapshot.finish`). A snapshot holds one copy of this rank's state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fft.errors import FftError
from fft.train.checkpoint.rank_file import packed
from fft.train.local_tensors import edit_count, local_of
from fft.train.rank_state import RankState
from fft.train.state.plain_state import merged, plain
from fft.train.state.random_states import export_random
from fft.train.state.step_state import export_parameters

PARAMETERS = "state.parameters."
LATE = (PARAMETERS, "state.optimizers.")
"""Prefixes of the names, in a file, of what forward and backward do not change. For groups that
train locally that is the state they share; a group's own state has other names and is copied at
once."""


class Staging:
    """Memory for one copy of a rank's state, reused by each checkpoint."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def keep_only(self, names: Set[str]) -> None:
        """Free the memory for tensors of other names."""
        self._held = {name: held for name, held in self._held.items() if name in names}

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor of the same shape and type; the one of ``name`` is reused if it
        fits."""
        held = self._held.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._held[name] = held
        return held


@dataclass(frozen=True)
class Layout:
    """The part of a sharded tensor that this rank has."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]


class Snapshot:
    """One copy. The constructor runs on the main thread between two steps, `copy` on another
    thread.

    Args:
        state: State of this rank.
        shared: Include the state that all groups have in common, not only this rank's own.
        at_once: Parameters that code other than updates and the step function changes.
        gives: Slices whose entries this stage gives to the next one, to be included.

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
        self._step = state.step if self._watched else None
        """The state whose parameters and optimizer state `copy` looks up."""
        self._late: dict[str, torch.Tensor] = {}
        # the state that groups share may consist of no model parameters
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
        """Whether forward and backward could change state that is copied late."""
        self._versions = {name: edit_count(t) for name, t in self._watched.items()}
        self._late_names = self._watched.keys() - early
        """Names of the parameters that are copied late."""
        self._copied = threading.Event()
        self.confirmed = threading.Event()
        """Set when the copied state is known to be unchanged during the copy; otherwise `problem`
        is set."""
        self._lock = threading.Lock()
        self.copy_s = 0.0
        self.problem: str | None = None
        """Why the copy must not be used."""
        self.edited: tuple[str, ...] = ()
        """Parameters that were changed while they were copied."""

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
        edited = self._step.edited  # None if it is not known yet
        return self._watched.keys() if edited is None else self._watched.keys() & (edited | at_once)

    def copy(self) -> bool:
        """Copy the rest; return whether the result is the complete state as of the commit."""
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
        # here, since allocating pinned memory takes as long as filling it
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
        """Wait for the copy before state that was not copied at once may change. Main thread.

        The copy is given up if that takes longer than ``limit_s``, or if a parameter was changed
        meanwhile. Returns the seconds waited.
        """
        began = time.monotonic()
        if self.confirmed.is_set():
            return 0.0
        if not self._copied.wait(limit_s):
            self._give_up(f"its copy was not done {limit_s:g} s after the vote")
        watched, self._watched = self._watched, {}
        self.edited = tuple(n for n, t in watched.items() if edit_count(t) != self._versions[n])
        if self._late_names & set(self.edited):
            self._give_up(
                f"{', '.join(self.edited[:3])} was changed while it was copied; from now on it is "
                "copied before anybody can"
            )
        self.confirmed.set()
        return time.monotonic() - began

    def _give_up(self, problem: str) -> None:
        with self._lock:
            self.problem = self.problem or problem


def _tree_of(
    state: RankState, shared: bool, gives: range
) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
    """Return the contents of a rank's files, and the parameters by name."""
    step = state.step
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
    if not watched:  # else they come with what is copied later
        found["layouts"] = _layouts(step.sharded_names())
    return found, watched


def _layouts(names: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the parts that this rank has of sharded parameters."""
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
    """Return the part of a DTensor that this rank has, or None for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return None
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Layout(tuple(tensor.shape), tuple(offset))


def _mark_streams(late: Iterable[torch.Tensor]) -> dict[torch.device, torch.cuda.Event]:
    """Record events behind all work issued so far on the devices of the tensors copied later."""
    found: dict[torch.device, torch.cuda.Event] = {}
    for device in {tensor.device for tensor in late if tensor.is_cuda}:
        found[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        found[device].record(torch.cuda.current_stream(device))
    return found

"""A job of several managers in threads of one process, for the tests of the manager.

Each group is one thread with a model, a gloo group and a store; the bus is in memory, and there is
no lighthouse. All waits are bounded: a thread that does not end in time fails the test.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft import ProcessGroupGloo

import fft
from fft.bus.tcpserver import host_store
from fft.trace.audit import AuditReport, audit_dir, read_lines

PG_TIMEOUT = timedelta(seconds=60)
JOIN_S = 60.0
WIDTH = 8


class Noisy(nn.Module):
    """Two layers with batch norm between, and noise from the group's own generator."""

    def __init__(self, group: str) -> None:
        super().__init__()
        torch_state = torch.Generator().manual_seed(3)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.generator = torch.Generator().manual_seed(100 + int(group))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch_state) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        return self.last(torch.relu(self.norm(self.first(x))))


class Numbers(torch.utils.data.Dataset[int]):
    """A data set whose sample ``i`` is ``i``."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> int:
        return index


def batch_of(indices: torch.Tensor) -> torch.Tensor:
    """Return the input that belongs to sample indexes."""
    return torch.sin(indices.float()[:, None] * torch.arange(1, WIDTH + 1))


def weights(model: nn.Module) -> str:
    """Return a digest of every bit of the parameters and buffers."""
    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()[:16]


def parameters(model: nn.Module) -> list[list[float]]:
    """Return every parameter's values, which must be equal on all groups."""
    return [p.detach().reshape(-1).tolist() for p in model.parameters()]


class Member:
    """One rank of a group: its model, optimizer and manager, and the record of its thread.

    A group has one rank, unless ``rank=`` and ``ranks=`` are given; ``leader=`` is then rank 0,
    whose store the others use.
    """

    def __init__(self, job: Job, group: str, **settings: Any) -> None:
        self.group = group
        self.job = job
        self.model = settings.pop("model", None) or Noisy(group)
        kind = settings.pop("optimizer", torch.optim.AdamW)
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters(), lr=1e-2)
        rank, ranks = settings.pop("rank", 0), settings.pop("ranks", 1)
        leader: Member | None = settings.pop("leader", None)
        self.store, self.port = host_store() if leader is None else (leader.store, leader.port)
        self.name = group if ranks == 1 else f"{group}.{rank}"
        register = settings.pop("register", True)
        values: dict[str, Any] = {
            "load_state_dict": None,
            "state_dict": None,
            "min_replica_size": 1,
            "expected_groups": job.groups,
            "init_sync": False,
            "bus": job.bus,
            "trace_dir": job.traces,
            "digest": "commit" if register else "never",
            "quorum_timeout": timedelta(seconds=20),
            "timeout": timedelta(seconds=20),
            **settings,
        }
        fields = fft.ManagerConfig.model_fields.keys() & values.keys()
        config = {name: values.pop(name) for name in fields}
        values["config"] = fft.ManagerConfig(**config)
        self.manager = fft.ManagerFFT(
            pg=ProcessGroupGloo(timeout=PG_TIMEOUT),
            replica_id=group,
            store_addr="127.0.0.1",
            store_port=self.port,
            **{"rank": rank, "world_size": ranks, **values},
        )
        if register:
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
            noise = [self.model.generator]
            self.manager.register(self.model, self.optimizer, self.schedule, generators=noise)
            self.manager.sync_gradients(self.model)
        self.consumed: list[int] = []
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def train(
        self,
        steps: int | None,
        loader: Any = None,
        body: Callable[[Member, fft.Transaction], None] | None = None,
    ) -> None:
        """Train until ``steps`` or the end; ``body`` runs in each txn before the backward pass."""
        loader = loader or fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in self.manager.transactions(loader, steps):
            with txn:
                if body is not None:
                    body(self, txn)
                x = batch_of(txn.batch)
                self.model(x).sub(x.mean(1, keepdim=True)).square().mean().backward()
            if txn.committed and self.manager.participating_rank() is not None:
                self.consumed += txn.batch.tolist()

    def start(self, work: Callable[[Member], None]) -> Member:
        """Run ``work`` in its own thread, and shut the manager down after it."""
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"group-{self.name}")
        self._thread.start()
        return self

    def _run(self, work: Callable[[Member], None]) -> None:
        try:
            work(self)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.manager.shutdown()

    @property
    def has_left(self) -> bool:
        """Whether the participant has left the job for good."""
        local = self.manager._parts.job.local
        return local is not None and local.role == "terminal"

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether the participant was asked to leave, by a call, a signal or a notice."""
        return self.manager._parts.leaving.is_asked

    @property
    def is_at_work(self) -> bool:
        """Whether its thread is still running."""
        return self._thread is not None and self._thread.is_alive()

    def end(self, within: float = JOIN_S) -> None:
        """Wait for the end of the thread."""
        assert self._thread is not None
        self._thread.join(within)
        assert not self._thread.is_alive(), f"group {self.name} is not through after {within} s"


class Job:
    """A bus, by default in memory, and the members."""

    def __init__(self, traces: Path, groups: int, bus: str | None = None) -> None:
        self.traces = traces
        self.groups = groups
        self.bus = bus or f"memory://e2e-{uuid.uuid4().hex[:12]}"
        self.members: list[Member] = []

    def member(self, group: str, **settings: Any) -> Member:
        """Add a group."""
        made = Member(self, group, **settings)
        self.members.append(made)
        return made

    def ranks(self, group: str, own: Sequence[dict[str, Any]]) -> list[Member]:
        """Add a group with a rank for each of ``own``, the arguments of that rank."""
        made: list[Member] = []
        for rank, settings in enumerate(own):
            leader = made[0] if made else None
            made.append(self.member(group, rank=rank, ranks=len(own), leader=leader, **settings))
        return made

    def run(self, work: Callable[[Member], None], **settings: Any) -> list[Member]:
        """Run the same work on all groups to their end; raise an error of one."""
        made = [self.member(str(g), **settings) for g in range(self.groups)]
        for member in made:
            member.start(work)
        for member in made:
            member.end()
        for member in made:
            if member.error is not None:
                raise member.error
        return made

    def audit(self) -> AuditReport:
        """Audit the job and check that there are no findings."""
        report = audit_dir(self.traces)
        assert report.ok, report.render()
        return report


@contextmanager
def job(traces: Path, groups: int, bus: str | None = None) -> Iterator[Job]:
    """Yield a job; its members are shut down at the end in any case."""
    made = Job(traces, groups, bus)
    try:
        yield made
    finally:
        for member in made.members:
            member.manager.shutdown()
        for member in made.members:
            if member._thread is not None:
                member.end()


# --- what the traces say --------------------------------------------------------------------------


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Return the trace records of events of one type, with the event under ``event``."""
    return [r for r in read_lines(directory) if (r.get("event") or {}).get("type") == kind]


def aborts(directory: Path) -> list[dict[str, Any]]:
    """Return the rollbacks before the last commit; a group that ends first ends the others'
    epoch."""
    return [r for r in _while_committing(directory) if r["kind"] == "abort"]


def epochs(directory: Path) -> int:
    """Return the epochs before the last commit."""
    return sum(r["kind"] == "epoch" for r in _while_committing(directory))


def _while_committing(directory: Path) -> list[dict[str, Any]]:
    found = records(directory)
    last = max((r["n"] for r in found if r["kind"] == "commit"), default=0)
    return [r for r in found if r["n"] < last]


def records(directory: Path) -> list[dict[str, Any]]:
    """Return the values of the head register that any rank saw, in order."""
    seen: dict[int, dict[str, Any]] = {}
    for line in read_lines(directory):
        if record := (line.get("event") or {}).get("record"):
            seen.setdefault(record["n"], record)
    return [seen[n] for n in sorted(seen)]


def assert_in_order(words: Sequence[str], causes: Sequence[str]) -> None:
    """Check that each of these words is in a different cause, in this order.

    There may be more causes, because a machine under load adds unplanned faults.
    """
    rest = iter(causes)
    for word in words:
        assert any(word in cause for cause in rest), f"{word!r} is missing, or late, in {causes}"


def fetches(directory: Path) -> list[tuple[str, int, int, int, str]]:
    """Return (group, rank, incarnation, bytes, source) of every transfer of state."""
    return [
        (r["group"], r["rank"], r["inc"], r["event"]["bytes"], r["event"]["source"])
        for r in events(directory, "healed")
        if r["event"]["bytes"] > 0
    ]


def slices(directory: Path) -> dict[int, list[int]]:
    """Return the slices consumed by committed txns, for each rank number."""
    found: dict[int, list[int]] = {}
    for line in read_lines(directory):
        if line.get("note") == "consumed" and line["data"]["slice"] is not None:
            found.setdefault(line["rank"], []).append(line["data"]["slice"])
    return found


def digests(directory: Path) -> dict[tuple[str, int, int], set[str]]:
    """Return the digests of the state after each step, by group, rank and step."""
    found: dict[tuple[str, int, int], set[str]] = {}
    for line in events(directory, "applied"):
        if digest := line["event"].get("digest"):
            found.setdefault((line["group"], line["rank"], line["step"]), set()).add(digest)
    return found


def notes(directory: Path, name: str) -> list[dict[str, Any]]:
    """Return the trace notes of one name."""
    return [line for line in read_lines(directory) if line.get("note") == name]


def dump(value: Any) -> str:
    """Format a value for messages of failed assertions."""
    return json.dumps(value, indent=1, default=str)[:4000]

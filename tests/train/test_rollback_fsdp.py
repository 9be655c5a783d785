"""Tests that a failed attempt of FSDP2 on two real ranks, rolled back and replayed, leaves no
trace."""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from rollback_harness import client, run
from torch import nn
from torch.distributed.fsdp import fully_shard

from fft.errors import StateMismatch
from fft.train.process_groups import AbortableGroup, ShardProcessGroupGloo
from fft.train.state.step_state import StepState

STEPS = 6
BLOCKS = 3
LIMIT = timedelta(seconds=20)


class Block(nn.Module):
    """A model with attention, dropout and a batch norm, whose buffers change in every forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(torch.relu(self.linear(x)))


class Model(nn.Module):
    def __init__(self, width: int = 16, words: int = 23) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Cursor:
    """A data position, as a user registers it."""

    position: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Fault(RuntimeError):
    pass


class Trainer:
    """A sharded model with everything a step changes, from one seed."""

    def __init__(self, group: ShardProcessGroupGloo, seed: int, prefetch: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        mesh = group.mesh()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        if prefetch:
            for module in [*self.model.blocks, self.model]:
                module._set_unshard_async_op(True)
            for first, second in zip(self.model.blocks, list(self.model.blocks)[1:], strict=False):
                first.set_modules_to_forward_prefetch([second])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.9)
        self.cursor = Cursor()
        self.state = StepState(
            [self.model], [self.optimizer], [self.schedule], {"cursor": self.cursor}
        )

    def compute(self, rank: int, fault: tuple[str, int] | None = None) -> float:
        """Run forward and backward over the next batch; `fault` names the place to fail."""
        generator = torch.Generator().manual_seed(100 * self.cursor.position + rank)
        words = torch.randint(0, 23, (4, 8), generator=generator)
        self.cursor.position += 1
        handles = self._plant(fault) if fault else []
        try:
            logits = self.model(words)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.roll(-1, 1).flatten())
            if fault and fault[0] == "between":
                raise Fault(str(fault))
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        return float(loss.detach())

    def _plant(self, fault: tuple[str, int]) -> list[Any]:
        phase, where = fault
        block = self.model.blocks[where]

        def fail(*_: object) -> None:
            raise Fault(str(fault))

        def fail_in_backward(_: object, __: object, output: torch.Tensor) -> None:
            output.register_hook(fail)

        if phase == "forward":
            return [block.linear.register_forward_hook(fail)]
        if phase == "backward":
            return [block.linear.register_forward_hook(fail_in_backward)]
        return []

    def apply(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)


class Member:
    """One rank: its group, and votes over the store in the place of FFT's bus."""

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        self.rank, self.ranks, self.port = rank, ranks, port
        self.store, self.ears = client(port), client(port)
        self.pg = ShardProcessGroupGloo(timedelta(seconds=60))
        self.group = AbortableGroup(self.pg)
        self.epoch = 0
        self.causes: list[str] = []
        self.configure()

    def configure(self) -> None:
        self.epoch += 1
        self.group.configure(
            f"localhost:{self.port}/shard/{self.epoch}",
            "0",
            self.rank,
            self.ranks,
            timeout=LIMIT,
        )

    def attempt(self, trainer: Trainer, fault: tuple[str, int] | None) -> bool:
        """Make one attempt at a step; return True if both ranks succeeded."""
        key, peer = f"vote/{self.epoch}", 1 - self.rank
        votes: list[bytes] = []

        def listen() -> None:
            votes.append(self.ears.get(f"{key}/{peer}"))
            if votes[0] == b"no":
                self.group.abort("the peer failed")

        ear = threading.Thread(target=listen)
        ear.start()
        try:
            trainer.compute(self.rank, fault)
            mine = "yes"
        except Exception as error:  # noqa: BLE001 - whatever a broken collective raises
            self.causes.append(type(error).__name__)
            mine = "no"
        self.store.set(f"{key}/{self.rank}", mine)
        ear.join()
        return mine == "yes" and votes == [b"yes"]

    def step(self, trainer: Trainer, fault: tuple[str, int] | None) -> None:
        trainer.state.capture()
        committed = self.attempt(trainer, fault)
        while not committed:
            self.group.abort("rollback")
            self.group.quiesce(LIMIT)
            trainer.state.restore()
            self.configure()
            committed = self.attempt(trainer, None)
        trainer.apply()
        self.configure()  # a new epoch, so that votes have new keys

    def close(self) -> None:
        self.group.close()
        self.pg.unregister()


FAULTS: dict[int, tuple[int, tuple[str, int]]] = {
    0: (0, ("forward", 0)),
    1: (1, ("backward", 2)),
    2: (0, ("backward", 1)),
    3: (1, ("backward", 0)),
    4: (0, ("between", 0)),
    5: (1, ("forward", 2)),
}


def _train(member: Member, faults: dict[int, Any], prefetch: bool) -> tuple[Any, ...]:
    trainer = Trainer(member.pg, seed=7, prefetch=prefetch)
    digests = []
    for step in range(STEPS):
        where, fault = faults.get(step, (None, None))
        member.step(trainer, fault if where == member.rank else None)
        digests.append(trainer.state.digest())
    exported = trainer.state.export()
    buffer = io.BytesIO()
    torch.save(exported, buffer)
    return (
        digests,
        buffer.getvalue(),
        torch.get_rng_state().tolist(),
        trainer.schedule.get_last_lr(),
    )


def _replay(rank: int, ranks: int, port: int, prefetch: bool) -> Any:
    member = Member(rank, ranks, port)
    plain = _train(member, {}, prefetch)
    assert member.causes == []
    faulty = _train(member, FAULTS, prefetch)
    member.close()
    return plain, faulty, member.causes


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "prefetch", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "prefetch"]
)
def test_faults_in_forward_and_backward_leave_no_trace(prefetch: bool) -> None:
    results = run(2, _replay, prefetch)
    for plain, faulty, causes in results:
        assert plain[0] == faulty[0], "digest after each step"
        assert len(set(plain[0])) == STEPS, "every step changes the state"
        assert plain[2:] == faulty[2:], "random state and learning rate"
        assert _equal(_read(plain[1]), _read(faulty[1]))
        assert "Fault" in causes
    # a rank that did not fail itself was blocked in a collective, and its own abort freed it
    assert sum(len(causes) for *_, causes in results) > len(FAULTS)


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _heal(rank: int, ranks: int, port: int) -> Any:
    member = Member(rank, ranks, port)
    source, fresh = Trainer(member.pg, seed=7), Trainer(member.pg, seed=8)
    for _ in range(3):
        member.step(source, None)
    buffer = io.BytesIO()
    torch.save(source.state.export(), buffer)
    assert fresh.state.digest() != source.state.digest()
    loaded = fresh.state.load(_read(buffer.getvalue()))
    assert fresh.state.digest() == source.state.digest()
    kinds = {
        type(value).__name__ + str(getattr(value, "placements", ""))
        for values in fresh.optimizer.state.values()
        for value in values.values()
    }
    expected = {
        type(value).__name__ + str(getattr(value, "placements", ""))
        for values in source.optimizer.state.values()
        for value in values.values()
    }
    after = []
    for trainer in (source, fresh):
        torch.manual_seed(99 + rank)
        member.step(trainer, None)
        after.append((trainer.state.digest(), trainer.cursor.position, trainer.schedule.last_epoch))
    total = sum(t.to_local().nbytes for t in source.model.parameters())  # type: ignore[attr-defined]
    broken = source.state.export()
    name = next(iter(broken["parameters"]))  # type: ignore[call-overload]
    broken["parameters"][name] = broken["parameters"][name].double()  # type: ignore[index]
    try:
        fresh.state.load(broken)
        refused = ""
    except StateMismatch as error:
        refused = str(error)
    same = fresh.state.digest() == after[1][0]
    member.close()
    return loaded, total, kinds, expected, after, refused, same


@pytest.mark.multiprocess
def test_export_loads_into_a_fresh_sharded_model() -> None:
    for loaded, total, kinds, expected, after, refused, same in run(2, _heal):
        assert loaded > 3 * total
        assert kinds == expected and any(kind.startswith("DTensor(Shard") for kind in kinds)
        assert after[0] == after[1]
        assert "embedding.weight]: expected dtype torch.float32, got torch.float64" in refused
        assert same

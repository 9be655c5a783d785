"""Tests of the data and the state that `FFTStrategy` takes from Lightning, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from fft.errors import FftError
from fft.train.data.source import Due

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")
import lightning
from lightning.pytorch.callbacks import Timer

from fft.integrations import lightning_parts
from fft.integrations.lightning import FFTStrategy

SAMPLES = TensorDataset(torch.arange(50))


def batches(
    loader: Any, world: int = 2, accumulate: int = 1, limit: int | float = 1.0, **trainer: Any
) -> lightning_parts.Batches:
    values = {"max_steps": -1, "max_epochs": 3, **trainer}
    made: Any = SimpleNamespace(
        accumulate_grad_batches=accumulate,
        limit_train_batches=limit,
        max_steps=values["max_steps"],
        fit_loop=SimpleNamespace(max_epochs=values["max_epochs"]),
        lightning_module=SimpleNamespace(automatic_optimization=True),
    )
    return lightning_parts.Batches(loader, made, world, lambda: None)


def drawn(made: lightning_parts.Batches, rank: int, world: int, items: int) -> list[list[int]]:
    """Return the samples of each micro-batch of a rank, in the order of its steps."""
    numbers = range(rank, items, world)
    taken = [made.source.take(Due(number, number, world)) for number in numbers]
    return [batch[0].tolist() for item in taken for batch in item]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_rank_draws_the_batches_of_lightnings_ddp(
    monkeypatch: pytest.MonkeyPatch, world: int, drop_last: bool
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    made = batches(DataLoader(SAMPLES, batch_size=4, shuffle=True, drop_last=drop_last), world)
    for epoch in (0, 1):
        for rank in range(world):
            sampler = DistributedSampler(SAMPLES, world, rank, shuffle=True, seed=5)
            sampler.set_epoch(epoch)
            own = DataLoader(SAMPLES, batch_size=4, sampler=sampler, drop_last=drop_last)
            expected = [batch[0].tolist() for batch in own]
            per_epoch = world * len(made)
            found = drawn(made, rank, world, (epoch + 1) * per_epoch)[epoch * len(made) :]
            assert found == expected


def test_micro_batches_of_a_step_are_one_item_and_the_rest_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = batches(DataLoader(SAMPLES, batch_size=4), accumulate=2, limit=5)
    assert len(made) == 4
    assert "the last 1 batches of each epoch are left out" in caplog.text
    assert [len(made.source.take(Due(n, n, 2))) for n in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_epochs": 3}, 21),
        ({"max_epochs": -1, "max_steps": 5}, 5),
        ({"max_epochs": 3, "max_steps": 100}, 21),
        ({"max_epochs": -1}, None),
    ],
)
def test_last_step_is_the_first_limit_of_the_trainer(
    limits: dict[str, int], expected: int | None
) -> None:
    assert batches(DataLoader(SAMPLES, batch_size=4), **limits).total_steps == expected


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream(), batch_size=2), "an IterableDataset"),
        (
            DataLoader(
                SAMPLES,
                batch_sampler=type("Own", (BatchSampler,), {})(
                    SequentialSampler(SAMPLES), 2, False
                ),
            ),
            "a batch_sampler",
        ),
        ([1, 2], "a list"),
        (DataLoader(SAMPLES, batch_size=64, drop_last=True), "reduce batch_size"),
    ],
)
def test_data_that_cannot_be_divided_is_refused_with_the_fix(loader: Any, message: str) -> None:
    with pytest.raises(FftError, match=message):
        batches(loader)


def test_fetched_counters_are_advanced_by_the_batches_of_the_open_step() -> None:
    before = {"ready": 4, "total": {"done": 4}, "is_last": False}
    now = {"ready": 6, "total": {"done": 5}, "is_last": True}
    fetched = {"ready": 10, "total": {"done": 10}, "is_last": False}
    moved = lightning_parts._advanced(fetched, before, now)
    assert moved == {"ready": 12, "total": {"done": 11}, "is_last": False}


class Linear(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0].float()[:, None]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


class Iterating(Linear):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        raise NotImplementedError


class Gathering(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.all_gather(super().training_step(batch, batch_idx)).mean()


def fit(model: Linear, **options: Any) -> lightning.Trainer:
    """Train in this process, as a script that is started without `fft run`."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FFTStrategy(),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, DataLoader(SAMPLES, batch_size=5))
    return trainer


def test_script_without_a_launcher_trains_alone() -> None:
    assert fit(Linear()).global_step == 20


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Linear(), {"callbacks": [Timer("00:01:00:00")]}, "Timer is not supported; use Trainer"),
        (Linear(), {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        (Iterating(), {}, "dataloader_iter"),
    ],
)
def test_unsupported_settings_are_refused_with_the_fix(
    model: Linear, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FftError, match=message):
        fit(model, **options)


def test_gathering_in_a_step_is_refused_with_the_fix() -> None:
    with pytest.raises(FftError) as raised:
        fit(Gathering())
    assert "manager.allreduce()" in "".join(map(str, (raised.value, raised.value.__cause__)))


def test_strategy_rejects_options_next_to_a_manager() -> None:
    manager: Any = object()
    with pytest.raises(FftError, match="min_replica_size=, timeouts="):
        FFTStrategy(manager=manager, min_replica_size=2, timeouts={})

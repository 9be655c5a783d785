"""Tests of Lightning's Trainer on FFT's transactions, with one group in the process of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fft.errors import FftError

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler

from fft.integrations.lightning import FFTStrategy

DATA = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
TrainerOf = Callable[..., Trainer]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PlansItsSteps(Model):
    def configure_optimizers(self) -> Any:
        self.planned = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class SkipsRestOfEpoch(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class StepsEverySecondBatch(Model):
    def optimizer_step(self, epoch: Any, batch_idx: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        if batch_idx % 2 == 0:
            optimizer.step(closure=closure)
        else:
            closure()


class GathersInValidation(Model):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.all_gather(self.layer(batch)).mean(), sync_dist=True)


class Hooked(LightningModule):
    """Its hooks change, before each step, the batch, the learning rate and the random numbers."""

    def __init__(self, fails: bool, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.layer, self.norm = torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(4)
        self.drop, self.fails, self.starts = torch.nn.Dropout(), fails, 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + torch.rand(batch.shape) if self.trainer.training else batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.starts += 1
        batch.mul_(torch.rand(()))
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + batch_idx // 2)

    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        optimizer.param_groups[0]["weight_decay"] = torch.rand(()).item()
        optimizer.step(closure=closure)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(self.drop(self.norm(batch.mul_(2)))).square().mean()
        if self.fails and batch_idx == 5:
            self.fails = False
            raise RuntimeError("once")
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.layer(self.norm(batch)).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithNorm(Hooked):
    """Without random numbers, which Lightning's checkpoints do not have."""

    def __init__(self) -> None:
        super().__init__(fails=False, manual=False)
        self.drop = torch.nn.Identity()  # type: ignore[assignment]

    on_after_batch_transfer = LightningModule.on_after_batch_transfer  # type: ignore[assignment]
    on_train_batch_start = LightningModule.on_train_batch_start
    optimizer_step = LightningModule.optimizer_step  # type: ignore[assignment]


class StopsAfterBatch(Callback):
    def __init__(self, batch_idx: int) -> None:
        self.batch_idx = batch_idx

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = args[-1] == self.batch_idx


@pytest.fixture
def trainer_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TrainerOf]:
    """Return a function that makes a Trainer on an FFTStrategy of one group."""
    for name in ("FFT_BUS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    strategies = []

    def make(**options: Any) -> Trainer:
        strategies.append(FFTStrategy())
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        if "callbacks" not in options:
            quiet["enable_checkpointing"] = False
        paths = {"default_root_dir": tmp_path}
        where = {"accelerator": "cpu", "devices": 1, "strategy": strategies[-1]}
        return Trainer(**{**paths, **where, **quiet, **options})

    yield make
    for each in strategies:
        each.manager.shutdown()


def test_fractional_limit_of_batches_is_applied_once(trainer_of: TrainerOf) -> None:
    trainer = trainer_of(max_epochs=2, limit_train_batches=0.5)
    trainer.fit(Model(), DataLoader(DATA, batch_size=2))
    assert trainer.num_training_batches == 8
    assert trainer.global_step == 16


def test_module_may_ask_for_the_number_of_steps(trainer_of: TrainerOf) -> None:
    trainer, model = trainer_of(max_epochs=3, accumulate_grad_batches=2), PlansItsSteps()
    trainer.fit(model, DataLoader(DATA, batch_size=2))
    assert model.planned == trainer.global_step == 24


def test_stop_between_two_micro_batches_drops_the_step(trainer_of: TrainerOf) -> None:
    found = []
    for batch_idx in (3, 4):  # the last one of the second step, and the first one of the third
        torch.manual_seed(1)
        model = Model()
        trainer = trainer_of(
            max_epochs=1, accumulate_grad_batches=2, callbacks=[StopsAfterBatch(batch_idx)]
        )
        trainer.fit(model, DataLoader(DATA, batch_size=2))
        assert trainer.global_step == 2
        found.append(model.layer.weight.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("accumulate, manual", [(1, False), (2, False), (1, True)])
def test_repeated_step_keeps_the_changes_of_the_hooks_before_it(
    trainer_of: TrainerOf, accumulate: int, manual: bool
) -> None:
    found = []
    for fails in (False, True):
        torch.manual_seed(1)
        trainer, model = (
            trainer_of(max_epochs=1, accumulate_grad_batches=accumulate),
            Hooked(fails, manual),
        )
        trainer.fit(model, DataLoader(DATA, batch_size=2))
        assert model.starts == 16 and not model.fails
        found.append({name: value.tolist() for name, value in model.state_dict().items()})
    assert found[0] == found[1]


def test_checkpoint_between_two_micro_batches_is_that_of_the_last_commit(
    trainer_of: TrainerOf, tmp_path: Path
) -> None:
    found, data = [], DataLoader(DATA, batch_size=2)
    first = ModelCheckpoint(tmp_path, save_top_k=-1, monitor="loss", filename="{step}")
    options = {"accumulate_grad_batches": 4, "val_check_interval": 6}
    for path, callback in ((None, first), (tmp_path / "step=1.ckpt", Callback())):
        torch.manual_seed(1)
        model = WithNorm()
        trainer = trainer_of(max_epochs=2, callbacks=[callback], **options)
        trainer.fit(model, data, data, ckpt_path=path, weights_only=False)
        assert trainer.global_step == 8
        found.append({name: value.tolist() for name, value in model.state_dict().items()})
    assert found[0] == found[1]


def test_validation_between_two_micro_batches_needs_no_group(
    trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fft.Transaction.mean", None)
    data = DataLoader(DATA, batch_size=2)
    trainer = trainer_of(max_epochs=1, accumulate_grad_batches=2, val_check_interval=3)
    trainer.fit(GathersInValidation(), data, data)
    assert "mean" in trainer.callback_metrics


@pytest.mark.parametrize(
    "model, collate",
    [
        (SkipsRestOfEpoch, torch.stack),
        (StepsEverySecondBatch, torch.stack),
        (Model, lambda samples: None),
    ],
)
def test_skipped_batch_is_refused(trainer_of: TrainerOf, model: Any, collate: Any) -> None:
    with pytest.raises(FftError, match="expected a step for each batch"):
        trainer_of(max_epochs=1).fit(model(), DataLoader(DATA, batch_size=2, collate_fn=collate))


@pytest.mark.parametrize(
    "options, fix",
    [
        ({"val_check_interval": timedelta(seconds=5)}, "pass a number of batches"),
        (
            {"callbacks": [ModelCheckpoint(train_time_interval=timedelta(seconds=5))]},
            "pass every_n_train_steps=",
        ),
        ({"callbacks": [StochasticWeightAveraging(swa_lrs=0.1)]}, "use WeightAveraging"),
    ],
)
def test_trainer_refuses_unsupported_options(
    trainer_of: TrainerOf, options: dict[str, Any], fix: str
) -> None:
    with pytest.raises(FftError, match=fix):
        trainer_of(max_epochs=1, **options).fit(Model(), DataLoader(DATA, batch_size=2))


class ByEpoch(torch.utils.data.Dataset[torch.Tensor]):
    epoch = -1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(self.epoch), 0.0, 0.0])


class Sees(Model):
    """Records the samples of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[list[float]]] = []

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.epoch = self.current_epoch
        self.seen.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen[-1] += batch[:, :2].tolist()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_follow_the_value_that_an_epoch_hook_sets(trainer_of: TrainerOf, workers: int) -> None:
    trainer, model = trainer_of(max_epochs=3), Sees()
    trainer.fit(model, DataLoader(ByEpoch(), batch_size=2, num_workers=workers))
    assert model.seen == [[[i, epoch] for i in range(8)] for epoch in range(3)]


def test_generator_of_a_dataloader_is_left_out_as_in_ddp(trainer_of: TrainerOf) -> None:
    found = []
    for generator in (None, torch.Generator()):
        model, data = Sees(), ByEpoch()
        options: Any = {"batch_size": 2, "generator": generator}
        trainer_of(max_epochs=3).fit(model, DataLoader(data, shuffle=True, **options))
        found.append(model.seen)
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_generator_of_a_sampler_is_seeded_for_each_epoch(trainer_of: TrainerOf) -> None:
    model = Sees()
    sampler = WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator())
    trainer_of(max_epochs=2).fit(model, DataLoader(ByEpoch(), batch_size=2, sampler=sampler))
    first, second = ([index for index, _ in epoch] for epoch in model.seen)
    assert len(first) == len(second) == 8 and first != second


class StepsOptimizerOfItsOwn(Hooked):
    def __init__(self) -> None:
        super().__init__(fails=False, manual=True)
        self.own = torch.optim.SGD(self.parameters(), lr=0.1)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.own


def test_optimizer_that_lightning_does_not_know_is_refused(trainer_of: TrainerOf) -> None:
    with pytest.raises(FftError, match=r"return it from configure_optimizers\(\)"):
        trainer_of(max_epochs=1).fit(StepsOptimizerOfItsOwn(), DataLoader(DATA, batch_size=2))


def test_batch_sampler_is_refused(trainer_of: TrainerOf) -> None:
    sampler = BatchSampler(SequentialSampler(DATA), batch_size=2, drop_last=False)
    with pytest.raises(FftError, match="cannot divide a batch_sampler"):
        trainer_of(max_epochs=1).fit(Model(), DataLoader(DATA, batch_sampler=sampler))


def test_second_fit_is_refused(trainer_of: TrainerOf) -> None:
    trainer, data = trainer_of(max_epochs=1), DataLoader(DATA, batch_size=2)
    trainer.fit(Model(), data)
    with pytest.raises(FftError, match="expected one call"):
        trainer.fit(Model(), data)


def test_checkpoints_are_written_to_a_url(trainer_of: TrainerOf) -> None:
    trainer = trainer_of(max_epochs=1, default_root_dir="memory://fft", callbacks=[])
    trainer.fit(Model(), DataLoader(DATA, batch_size=2))
    (callback,) = trainer.checkpoint_callbacks
    assert callback.best_model_path.startswith("memory://fft/checkpoints/")

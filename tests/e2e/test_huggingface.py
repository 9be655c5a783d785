"""Tests of FFTTrainer: Hugging Face's Trainer under faults, compared with its own DDP.

Every job is a real one of `fft run`, mostly with two groups. Final parameters must have the bits
of DDP, or of an undisturbed run where the model has dropout, since DDP draws other random numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_run import fft as run_fft

import fft
from fft.trace.report import history_of
from fft.trace.resumed import audit_job

# the jobs import the packages, and importing them here as well takes each worker 3 s
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs the extra: pip install 'fft-torch[hf]'",
)

SCRIPT = Path(__file__).with_name("hf_script.py")
LIMIT_S = 240
FAULTS = [
    {"name": "raise", "kind": "exception", "step": 2, "group": 1, "rank": 0, "phase": "backward"},
    {"name": "one-sided", "kind": "one_sided", "step": 4, "group": 0},
    {
        "name": "cut",
        "kind": "network_cut",
        "step": 6,
        "group": 1,
        "rank": 0,
        "phase": "during_allreduce",
    },
]
STEP = ("step_begin", "step_end")
KILL = [{"name": "kill", "kind": "kill", "step": 4, "group": 1, "phase": "backward"}]
SAVING = {"save_strategy": "steps", "save_steps": 4}
BATCH = 4  # samples in a micro-batch of the script
SHARDED = {"fsdp": True, "layers": 2}


def train(
    folder: Path,
    options: dict[str, Any],
    *run_options: str,
    kind: str = "fft",
    faults: Any = None,
    status: int = 0,
    groups: int = 2,
) -> list[dict[str, Any]]:
    """Run a job, audit it, and return the results of the ranks. A sharded group has two ranks."""
    out, traces, plan = folder / "out", folder / "traces", folder / "plan.yaml"
    out.mkdir(parents=True, exist_ok=True)
    ranks = 2 if "fsdp" in options else 1
    command = ["run", "--groups", str(groups), "--ranks", str(ranks), "--no-progress"]
    command += ["--no-lighthouse", *run_options]
    if faults is not None:
        plan.write_text(json.dumps({"faults": faults}))
        command += ["--faults", str(plan)]
    command += ["--trace-dir", str(traces), str(SCRIPT), str(out), kind, json.dumps(options)]
    done = run_fft(*command, folder=folder, within=LIMIT_S)
    assert done.returncode == status, done.stdout + done.stderr
    assert audit_job(traces).ok
    return [json.loads(path.read_text()) for path in sorted(out.glob("result-*.json"))]


def train_ddp(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Run the plain Trainer on two processes of torchrun, and return the result of the first."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(SCRIPT), str(folder), "ddp", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "result-0.json").read_text())
    return found


def losses(result: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in result["history"] if "loss" in entry]


@pytest.mark.multiprocess
def test_trainer_counts_logs_and_saves_each_committed_step_once(tmp_path: Path) -> None:
    options = {"max_steps": 8, "gradient_accumulation_steps": 2, "dropout": 0.1, **SAVING}
    one, other = train(tmp_path, options, faults=FAULTS)
    steps = [
        event
        for n in range(8)
        for event in (["step_begin", n], ["step_end", n + 1], ["save", n + 1])
    ]
    expected = [e for e in steps if e[0] != "save" or e[1] % 4 == 0]
    expected = [["epoch_begin", 0], *expected, ["epoch_end", 8]]
    assert one["events"] == other["events"] == expected
    assert one["digest"] == other["digest"] and one["epoch"] == 0.5
    assert [e["step"] for e in one["history"]] == [2, 4, 6, 8, 8]
    assert (one["is_writer"], other["is_writer"]) == (True, False)
    assert history_of(tmp_path / "traces").course.goal.samples == 2 * BATCH
    logs = [path.read_text() for path in sorted((tmp_path / "traces" / "logs").glob("*.log"))]
    assert ["'loss':" in log for log in logs] == [True, False]
    saved = sorted(path.parent.name for path in (tmp_path / "out").glob("*/fft_manager.pt"))
    assert saved == ["checkpoint-4", "checkpoint-8"]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 10},
        {
            "num_train_epochs": 2,
            "samples": 64,
            "gradient_accumulation_steps": 2,
            "train_sampling_strategy": "sequential",
            "permuted": True,
            "bf16": True,
            "save_strategy": "epoch",
            "eval_strategy": "epoch",
        },
        {"num_train_epochs": 2, "samples": 64, "stream": "sized"},
    ],
    ids=["shuffled", "accumulated", "stream"],
)
def test_trainer_has_the_bits_and_events_of_ddp_under_faults(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    ddp = train_ddp(tmp_path / "ddp", options)
    for result in train(tmp_path / "fft", options, faults=FAULTS):
        assert result["digest"] == ddp["digest"]
        assert result["events"] == ddp["events"]
        assert losses(result) == pytest.approx(losses(ddp), rel=1e-6)


@pytest.mark.long
@pytest.mark.multiprocess
def test_killed_group_rejoins_and_the_bits_stay(tmp_path: Path) -> None:
    options = {"max_steps": 12}
    undisturbed, _ = train(tmp_path / "whole", options)
    one, other = train(tmp_path / "killed", options, kind="both", faults=KILL)
    assert one["digest"] == other["digest"] == undisturbed["digest"]
    assert one["events"] == undisturbed["events"]
    assert losses(one) == losses(other) == losses(undisturbed)
    assert other["events"][:2] == [["epoch_begin", 4], ["step_begin", 4]]


@pytest.mark.multiprocess
def test_evaluations_of_all_groups_have_equal_running_statistics(tmp_path: Path) -> None:
    """Otherwise early stopping by an evaluation would stop one group and not the other."""
    options = {"max_steps": 6, "norm": True, "eval_strategy": "steps", "eval_steps": 2}
    one, other = train(tmp_path, options, faults=FAULTS[:2])
    evaluated = [[e["eval_loss"] for e in r["history"] if "eval_loss" in e] for r in (one, other)]
    assert len(evaluated[0]) == 3 and evaluated[0] == evaluated[1]
    assert one["buffers"] == other["buffers"] and len(one["buffers"]) == 2
    assert one["digest"] == other["digest"]


@pytest.mark.multiprocess
def test_stream_with_a_length_has_the_steps_of_its_epochs(tmp_path: Path) -> None:
    options = {"num_train_epochs": 2, "samples": 24, "stream": "shuffled"}
    one, other = train(tmp_path, options | {"ddp_bucket_cap_mb": 1})
    assert (one["step"], one["epoch"]) == (other["step"], other["epoch"]) == (6, 2.0)
    ends = [event for event in one["events"] if event[0].startswith("epoch")]
    assert ends == [["epoch_begin", 0], ["epoch_end", 3], ["epoch_begin", 3], ["epoch_end", 6]]
    logs = [path.read_text() for path in sorted((tmp_path / "traces" / "logs").glob("*.log"))]
    ignored = "FFTTrainer ignores ddp_bucket_cap_mb"
    assert [log.count(ignored) for log in logs] == [1, 0]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("stream", ["endless", "shuffled"])
def test_stream_without_index_is_trained_and_rejoined(tmp_path: Path, stream: str) -> None:
    options = {"max_steps": 8, "samples": 64, "stream": stream, "gradient_accumulation_steps": 2}
    options |= {"permuted": True}
    undisturbed, _ = train(tmp_path / "whole", options)
    one, other = train(tmp_path / "killed", options, kind="both", faults=KILL)
    assert one["digest"] == other["digest"] == undisturbed["digest"]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("more", [{}, SHARDED], ids=["replicated", "sharded"])
def test_job_resumes_from_checkpoints_of_both_kinds_with_the_same_bits(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    options = {"max_steps": 12, "dropout": 0.1, **SAVING, **more}
    whole = train(tmp_path / "whole", options)[0]
    killed = options | {"kill_at": 9}
    saved = ["--checkpoint", str(tmp_path / "saved"), "--every", "4"]
    for result in train(tmp_path / "durable", killed, *saved):
        assert (result["digest"], losses(result)) == (whole["digest"], losses(whole))
    train(tmp_path / "own", killed, status=1)
    again = tmp_path / "own" / "traces"
    again.rename(tmp_path / "earlier")
    for result in train(tmp_path / "own", options | {"resume": True}):
        assert (result["digest"], losses(result)) == (whole["digest"], losses(whole))
        assert result["events"][1] == ["step_begin", 8]


@pytest.mark.long
@pytest.mark.multiprocess
def test_early_stopping_ends_the_job_where_ddp_stops(tmp_path: Path) -> None:
    options = {"max_steps": 40, "eval_strategy": "steps", "eval_steps": 2, "patience": 2, **SAVING}
    options |= {"save_steps": 2, "metric_for_best_model": "loss", "load_best_model_at_end": True}
    ddp = train_ddp(tmp_path / "ddp", options)
    saved = ["--checkpoint", str(tmp_path / "saved"), "--every", "1000"]
    for result in train(tmp_path / "fft", options, *saved):
        assert (result["step"], result["digest"]) == (ddp["step"], ddp["digest"])
        assert result["events"] == ddp["events"]
    assert (tmp_path / "saved" / f"step-{ddp['step']}" / "manifest.json").exists()


# --- several ranks in a group ---


@pytest.mark.multiprocess
@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=pytest.mark.long)])
def test_sharded_groups_log_and_save_each_committed_step_once(tmp_path: Path, groups: int) -> None:
    options: dict[str, Any] = {"max_steps": 3, "logging_steps": 1, "save_steps": 3}
    options |= SHARDED | {"save_strategy": "steps"}
    faults = [FAULTS[0] | {"group": groups - 1, "rank": 1}]
    results = train(tmp_path, options, faults=faults, groups=groups)
    events = [[name, n + (name == "step_end")] for n in range(3) for name in STEP]
    for result in results:
        assert result["is_sharded"]
        assert result["events"] == [["epoch_begin", 0], *events, ["save", 3], ["epoch_end", 3]]
        assert result["digest"] == results[0]["digest"] and losses(result) == losses(results[0])
    others = 2 * groups - 1
    assert [result["is_writer"] for result in results] == [True, *[False] * others]
    logs = [path.read_text() for path in sorted((tmp_path / "traces" / "logs").glob("*.log"))]
    assert [log.count("'loss':") for log in logs] == [3, *[0] * others]
    assert (tmp_path / "out" / "checkpoint-3" / "fft_manager.pt").exists()


@pytest.mark.long
@pytest.mark.multiprocess
def test_sharded_group_has_the_bits_of_ddp(tmp_path: Path) -> None:
    options = {"max_steps": 40, "eval_strategy": "steps", "eval_steps": 2, "patience": 2, **SAVING}
    options |= {"save_steps": 2, "metric_for_best_model": "loss", "load_best_model_at_end": True}
    options |= {"export": True, "layers": 2}
    ddp = train_ddp(tmp_path / "ddp", options)
    saved = ["--checkpoint", str(tmp_path / "saved"), "--every", "1000"]
    for result in train(tmp_path / "fft", options | SHARDED, *saved, groups=1):
        assert result["is_sharded"]
        assert (result["step"], result["digest"]) == (ddp["step"], ddp["digest"])
        assert result["events"] == ddp["events"]
        assert losses(result) == pytest.approx(losses(ddp), rel=1e-6)
        evaluated = [entry["eval_loss"] for entry in result["history"] if "eval_loss" in entry]
        assert evaluated[-1] == evaluated[-2], "after the training as at its last step"
    assert (tmp_path / "saved" / f"step-{ddp['step']}" / "manifest.json").exists()
    exported = tmp_path / "ddp" / "export", tmp_path / "fft" / "out" / "export"
    whole = [(folder / "model.safetensors").read_bytes() for folder in exported]
    assert whole[0] == whole[1]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 2},
        {"bf16": True, "fsdp_config": {"activation_checkpointing": True}},
    ],
    ids=["accumulated", "bf16"],
)
def test_sharded_groups_under_faults_have_the_bits_of_an_undisturbed_run(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    options = SHARDED | {"max_steps": 8, "dropout": 0.1, "eval_strategy": "steps"} | more
    options |= {"eval_steps": 3}
    whole = train(tmp_path / "whole", options)
    faults = [fault | {"rank": 1} if "rank" in fault else fault for fault in FAULTS]
    for result in train(tmp_path / "disturbed", options, faults=faults):
        assert result["digest"] == whole[0]["digest"] and result["events"] == whole[0]["events"]
        assert losses(result) == losses(whole[0])


@pytest.mark.long
@pytest.mark.multiprocess
def test_killed_rank_of_a_sharded_group_changes_no_bit(tmp_path: Path) -> None:
    options = SHARDED | {"max_steps": 12}
    whole = train(tmp_path / "whole", options)
    killed = train(tmp_path / "killed", options, kind="both", faults=[KILL[0] | {"rank": 1}])
    assert {result["digest"] for result in killed} == {whole[0]["digest"]}
    assert killed[0]["events"] == whole[0]["events"]
    for result in killed[2:]:
        assert losses(result) == losses(whole[0])
        assert result["events"][:2] == [["epoch_begin", 4], ["step_begin", 4]]


# --- without a job ---


FINE = {
    "n_gpu": 0,
    "deepspeed": None,
    "fsdp": None,
    "fsdp_plugin_args": None,
    "fp16": False,
    "auto_find_batch_size": False,
}


@pytest.mark.parametrize(
    ("ranks", "wrong", "words"),
    [
        (2, {}, "fsdp=True: pass it, or use more groups"),
        (1, {"fsdp": True}, "--ranks 2"),
        (2, {"fsdp": True, "fsdp_plugin_args": {"fsdp_version": 1}}, "version=2"),
        (2, {"fsdp": True, "fsdp_plugin_args": {"cpu_offload": True}}, "leave them out"),
        (2, {"fsdp": True, "fsdp_plugin_args": {"state_dict_type": "SHARDED_STATE_DICT"}}, "whole"),
        (2, {"fsdp": True, "fp16": True}, "pass bf16=True"),
        (1, {"n_gpu": 2}, "one GPU"),
        (1, {"deepspeed": "config.json"}, "leave it out"),
        (1, {"auto_find_batch_size": True}, "set a batch size"),
    ],
)
def test_trainer_refuses_unsupported_options(ranks: int, wrong: dict[str, Any], words: str) -> None:
    from fft.integrations import huggingface

    huggingface._refuse_unsupported(SimpleNamespace(**FINE), 1)
    huggingface._refuse_unsupported(SimpleNamespace(**(FINE | {"fsdp": True})), 2)
    with pytest.raises(fft.FftError, match=words):
        huggingface._refuse_unsupported(SimpleNamespace(**(FINE | wrong)), ranks)


class Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def test_log_history_has_the_evaluation_on_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import TrainingArguments

    from fft.integrations.huggingface import FFTTrainer

    for name in ("FFT_BUS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    data = [{"x": torch.ones(1), "labels": torch.zeros(1)} for _ in range(8)]
    args = TrainingArguments(
        str(tmp_path), max_steps=2, eval_on_start=True, eval_strategy="no", use_cpu=True
    )
    trainer = FFTTrainer(model=Squares(), args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert [(e["step"], "eval_loss" in e) for e in trainer.state.log_history] == [
        (0, True),
        (2, False),
    ]


class Shuffled(torch.utils.data.IterableDataset[int]):
    """Shuffles by the global generator, at the beginning and between its rows."""

    def __iter__(self) -> Iterator[int]:
        rows = torch.randperm(8).tolist()
        while rows:
            yield rows.pop(int(torch.randint(len(rows), ())))


def test_stream_that_shuffles_has_one_order_on_all_groups() -> None:
    from fft.integrations.huggingface_data import Steps

    def drawn(count: int, first: int = 0) -> list[int]:
        steps = Steps(torch.utils.data.DataLoader(Shuffled(), batch_size=2), 1, seed=3)
        steps.load_state_dict({"drawn": first})
        found: list[int] = []
        for (batch,), _ in zip(steps, range(count), strict=False):
            found += batch.tolist()
            torch.rand(7)  # of the training
        return found

    torch.manual_seed(0)
    rows = drawn(8)
    assert sorted(rows[:8]) == sorted(rows[8:]) == list(range(8)) and rows[:8] != rows[8:]
    torch.manual_seed(1)
    assert drawn(8) == rows
    assert drawn(3, first=5) == rows[10:]


def test_dataloader_without_a_dataset_is_refused() -> None:
    from fft.integrations import huggingface

    with pytest.raises(fft.FftError, match="expected a torch DataLoader"):
        huggingface.FFTTrainerMixin.set_initial_training_values(object(), None, [])


def test_group_with_different_max_steps_is_refused_with_the_fix() -> None:
    from fft.integrations.huggingface_progress import Progress

    trainer = SimpleNamespace(state=SimpleNamespace(max_steps=50))
    with pytest.raises(fft.FftError, match="Pass max_steps=100 in TrainingArguments"):
        Progress(trainer).load_state_dict({"counters": {"max_steps": 100}})


def test_newest_complete_checkpoint_is_chosen(tmp_path: Path) -> None:
    from fft.integrations import huggingface

    assert huggingface._newest_complete(tmp_path) is None
    for step in (9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / huggingface._MANAGER_FILE).touch()
    assert huggingface._newest_complete(tmp_path) == str(tmp_path / "checkpoint-10")

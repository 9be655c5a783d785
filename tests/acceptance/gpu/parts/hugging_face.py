"""Part 10: Hugging Face's Trainer with fp16 and a scaler, under FFT and under torch's DDP.

``run`` is the part; the module is also the script of its jobs, each with two processes that share
the device: ``python -m tests.acceptance.gpu.parts.hugging_face fft|ddp FOLDER DEVICE STEPS``. On
CPU, where fp16 has no scaler, it trains with bf16.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import nets
from tests.acceptance.gpu.parts.nccl_pair import run_ranks

STEPS = 8
"""Number of applied steps; one that overflows is not applied."""
_SCALE = 2.0**16
"""torch's first scale; it is halved with each overflow, and grows only after 2,000 steps."""
_DDP_S = 60.0
FAULTS = [
    {"name": "exception", "kind": "exception", "step": 2, "group": 1, "rank": 0}
    | {"phase": "backward"},
    {"name": "one-sided", "kind": "one_sided", "step": 4, "group": 0},
    {"name": "cut", "kind": "network_cut", "step": 5, "group": 1, "rank": 0}
    | {"phase": "during_allreduce"},
]


def run(pen: Pen, setting: Setting) -> None:
    """Run the whole part."""
    with pen.trial("Trainer with fp16"):
        importlib.import_module("fft.integrations.huggingface")
        _compare(pen, setting)


def _compare(pen: Pen, setting: Setting) -> None:
    from tests.acceptance.gpu.parts import jobs

    words = ["fft", "{folder}", setting.device, str(STEPS)]
    script = Path(__file__)
    plain = jobs.run_script(setting, "plain", [], script, words)
    pen.check("Trainer with fp16 on two groups", plain.is_whole, plain.in_words())
    if not plain.is_whole:
        return
    faulty = jobs.run_script(setting, "faulty", FAULTS, script, words)
    pen.check("the same under three faults", faulty.is_whole, faulty.in_words())
    same = plain.bits == faulty.bits
    pen.check("the bits are those without faults", same, f"{plain.bits} {faulty.bits}")
    scale = plain.words[0]["scale"] or _SCALE
    skipped = round(math.log2(_SCALE / scale))
    pen.measured("steps that overflowed and were skipped", skipped=skipped)
    with pen.trial("torch's DDP"):
        ddp = _ddp(setting, STEPS + skipped)
        pen.check("the bits are those of DDP", {ddp["bits"]} == plain.bits, str(ddp["bits"]))


def _ddp(setting: Setting, steps: int) -> dict[str, Any]:
    """Return the result of the plain Trainer on two processes."""
    folder = setting.folder / "ddp"
    folder.mkdir()
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)
    del store  # the first process binds the port
    command = [sys.executable, __file__, "ddp", str(folder), setting.device, str(steps)]
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    where |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"rank{rank}.txt" for rank in range(2)]
    codes = run_ranks(
        [command] * 2,
        [{**os.environ, **where, "RANK": str(rank)} for rank in range(2)],
        logs,
        min(_DDP_S, setting.left()),
    )
    if codes != [0, 0]:
        raise RuntimeError(f"exit codes {codes}: {logs[0].read_text(errors='replace')[-800:]}")
    found: dict[str, Any] = json.loads((folder / "end-0.json").read_text())
    return found


def main() -> None:
    """Train in one process of a job."""
    sys.path.insert(0, str(Path(__file__).parents[4] / "examples"))
    import torchft
    from hf_trainer import LENGTH, Sequences
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import fft
    from fft.integrations.huggingface import FFTTrainer

    kind, folder, device, steps = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        full_determinism=True,  # the backward pass of an embedding varies otherwise
        ddp_backend="gloo" if kind == "ddp" else None,
        use_cpu=device == "cpu",
        fp16=device == "cuda",
        bf16=device == "cpu",
    )
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    given: dict[str, Any] = {}
    if kind == "fft":
        pg = torchft.ProcessGroupGloo(timedelta(seconds=60))  # NCCL refuses one GPU for two groups
        given["manager"] = fft.ManagerFFT(pg, None, None, min_replica_size=2)
    model = GPT2LMHeadModel(config)
    data = Sequences(256, seed=1)
    trainer = (FFTTrainer if kind == "fft" else Trainer)(model, args, train_dataset=data, **given)
    trainer.train()
    scaler = trainer.accelerator.scaler
    process = os.environ["REPLICA_GROUP_ID" if kind == "fft" else "RANK"]
    end = {
        "group": process,
        "step": trainer.state.global_step,
        "bits": nets.bits(model.parameters()),
    }
    end["scale"] = None if scaler is None else scaler.get_scale()
    (folder / f"end-{process}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()

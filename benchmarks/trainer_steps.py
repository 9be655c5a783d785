"""The cost of a step of Hugging Face's Trainer and of Lightning's, on FFT and on their own DDP.

``python -m benchmarks.trainer_steps [--reps N]`` prints a page with a table; ``--write`` also
writes docs/trainer_steps.md. Both systems of a framework train a GPT of `benchmarks.whole_step` in
two processes, one thread each, in turn. A ratio is the median of the repetitions' own ratios.

With ``worker`` it is one of the processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.pages import markdown, spread
from benchmarks.whole_step import BATCH, CONTEXT, GPT, SIZES, Clock, Windows, ratio

STEPS = {"6 M": 60, "25 M": 25}
PAGE = Path(__file__).parents[1] / "docs" / "trainer_steps.md"
FRAMEWORKS = {"hf": "Hugging Face", "lightning": "Lightning"}
SYSTEMS = ("ddp", "fft")
LIMIT_S = 240


def train_hf(system: str, size: str, clock: Clock, out: Path) -> None:
    """Train with Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fft.integrations.huggingface import FFTTrainer

    class Model(GPT):
        def forward(self, text: torch.Tensor) -> Any:
            return {"loss": super().forward(text)}

    class Laps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.lap()

    args = TrainingArguments(
        output_dir=str(out),
        max_steps=clock.steps,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    kind = FFTTrainer if system == "fft" else Trainer
    trainer = kind(
        model=Model(*SIZES[size]),
        args=args,
        train_dataset=Windows(),
        data_collator=lambda samples: {"text": torch.stack(samples)},
        callbacks=[Laps()],
    )
    trainer.train()


def train_lightning(system: str, size: str, clock: Clock, out: Path) -> None:
    """Train with Lightning's Trainer."""
    import lightning

    from fft.integrations.lightning import FFTStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(*SIZES[size])

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.lap()

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if system == "fft" else 2,
        strategy=FFTStrategy() if system == "fft" else "ddp",
        max_steps=clock.steps,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Windows(), batch_size=BATCH, shuffle=True))


def work(framework: str, system: str, size: str, out: Path) -> None:
    """Train in one process, and write its step times."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    clock = Clock(STEPS[size])
    (train_hf if framework == "hf" else train_lightning)(system, size, clock, out)
    process = os.environ["REPLICA_GROUP_ID" if system == "fft" else "RANK"]
    (out / f"times-{process}.json").write_text(json.dumps(clock.steps_ms()))


def repetition(framework: str, system: str, size: str) -> float:
    """Return the median step in ms, of the slower process."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["worker", framework, system, size, folder]
        if system == "fft":
            command = ["-m", "fft.cli", "run", "--groups", "2", "--no-progress", "--no-lighthouse"]
            command += ["--trace-dir", f"{folder}/traces", __file__, *own]
        else:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += [__file__, *own]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(
            [sys.executable, *command], env=env, capture_output=True, text=True, timeout=LIMIT_S
        )
        files = sorted(Path(folder).glob("times-*.json"))
        if done.returncode or len(files) != 2:
            logs = "".join(p.read_text() for p in Path(folder).glob("traces/logs/*"))
            raise RuntimeError(f"{framework} {system}: {done.stdout}{done.stderr}{logs}"[-4000:])
        return max(statistics.median(json.loads(path.read_text())) for path in files)


def page(rows: list[list[str]], reps: int) -> str:
    """Return the page with the table."""
    text = f"""\
# Step times of Hugging Face's Trainer and Lightning

Written by `python -m benchmarks.trainer_steps --write`. Each framework's trainer trains a GPT with
clipping and AdamW in two processes, on its own DDP and on FFT in turn: batch {BATCH} x {CONTEXT} a
process, CPU, gloo, one thread each; {os.cpu_count()} cores, torch {torch.__version__}. Median step
in ms of the slower process, over {reps} repetitions of {min(STEPS.values())} to
{max(STEPS.values())} steps; smallest and largest repetition in brackets. A ratio is the median of
the repetitions' ratios.

To DDP's step FFT adds the vote, with a pass over the gradients that looks for NaN and inf; the wait
for the decision; the mean of the loss; and the copy of the state that a rollback restores. The
processes beside the two trainers have no core of their own here: a monitor for each, the bus and
`fft run`.

"""
    head = ["trainer", "parameters", "its DDP (ms)", "on FFT (ms)", "FFT / DDP"]
    return text + "\n".join(markdown(head, rows)) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        framework, system, size, out = sys.argv[2:]
        work(framework, system, size, Path(out))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--frameworks", nargs="*", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args()
    if args.write and args.frameworks != list(FRAMEWORKS):
        parser.error("--write needs all frameworks: leave --frameworks out")
    rows = []
    for framework, size in itertools.product(args.frameworks, STEPS):
        times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for rep in range(args.reps):
            for system in SYSTEMS[:: 1 if rep % 2 else -1]:
                times[system].append(repetition(framework, system, size))
            last = [f"{s} {times[s][-1]:.1f}" for s in SYSTEMS]
            print(f"{framework} {size} {rep + 1}: {last}", flush=True)
        cells = [spread(times[system]) for system in SYSTEMS]
        rows.append([FRAMEWORKS[framework], size, *cells, ratio(times, "fft", "ddp")])
    print(text := page(rows, args.reps))
    if args.write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()

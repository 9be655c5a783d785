"""The cost of a step of other frameworks' trainers, on FFT and on their own data parallelism.

``python -m benchmarks.trainer_steps [--reps N]`` prints a page with a table; ``--write`` also
writes docs/trainer_steps.md. Hugging Face's Trainer and Lightning's train a GPT of
`benchmarks.whole_step` in two processes, beside their DDP. torchtitan trains its Llama 3 debug
model in four, beside its HSDP. The two systems of a framework have their turns, and each process
has one thread. A ratio is the median of the repetitions' own ratios. A framework that is not
installed is skipped.

With ``worker`` it is one of the processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.whole_step import BATCH, CONTEXT, GPT, SIZES, Clock, Windows, ratio
from tools.pages import markdown, spread

STEPS = {"6 M": 60, "25 M": 25}
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "trainer_steps.md"
LIMIT_S = 240
SYSTEMS = ("own", "fft")


@dataclass(frozen=True)
class Framework:
    """A framework with a trainer.

    Attributes:
        title: Its name in the table.
        module: The module that is there if it is installed.
        steps: Number of measured steps by the size of its models.
        own: Its data parallelism.
        ranks: Number of processes of each of the two replica groups.
    """

    title: str
    module: str
    steps: dict[str, int] = field(default_factory=lambda: STEPS)
    own: str = "DDP"
    ranks: int = 1

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


FRAMEWORKS = {
    "hf": Framework("Hugging Face", "transformers"),
    "lightning": Framework("Lightning", "lightning"),
    "titan": Framework("torchtitan", "torchtitan", {"6 M": 25}, "HSDP 2 x 2", 2),
}


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


def train_titan(system: str, size: str, clock: Clock, out: Path) -> None:
    """Train the debug model with torchtitan's Trainer, FSDP2 in two replicas of two processes."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torchtitan_debug
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    from fft.integrations.torchtitan import FFTTrainer

    kind: Any = FFTTrainer if system == "fft" else Trainer

    class Timed(kind):
        def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
            clock.lap()
            loss: torch.Tensor = super().forward_backward_step(**kwargs)
            return loss

    config: Any = torchtitan_debug.debugmodel()
    config.model_spec = model_registry("debugmodel")  # with all layers
    config.metrics = MetricsProcessor.Config()  # logs every tenth step
    config.dump_folder = str(out)
    shape = {"local_batch_size": BATCH, "seq_len": CONTEXT, "steps": clock.steps}
    config.training = replace(config.training, **shape)
    if system == "own":
        config.parallelism = replace(config.parallelism, data_parallel_replicate_degree=2)
    trainer = Timed(config)
    trainer.train()
    trainer.close()


TRAIN = {"hf": train_hf, "lightning": train_lightning, "titan": train_titan}


def work(framework: str, system: str, size: str, out: Path) -> None:
    """Train in one process, and write its step times."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    clock = Clock(FRAMEWORKS[framework].steps[size])
    process = f"{os.environ.get('REPLICA_GROUP_ID', 'own')}-{os.environ['RANK']}"
    TRAIN[framework](system, size, clock, out)
    (out / f"times-{process}.json").write_text(json.dumps(clock.steps_ms()))


def repetition(framework: str, system: str, size: str) -> float:
    """Return the median step in ms, of the slowest process."""
    ranks = FRAMEWORKS[framework].ranks
    with tempfile.TemporaryDirectory() as folder:
        own = ["worker", framework, system, size, folder]
        if system == "fft":
            command = ["-m", "fft.cli", "run", "--groups", "2", "--ranks", f"{ranks}"]
            command += ["--no-progress", "--no-lighthouse", "--trace-dir", f"{folder}/traces"]
        else:
            command = ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", f"{2 * ranks}"]
        command += [__file__, *own]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *command], env=env, capture_output=True, text=True, timeout=LIMIT_S
        )
        files = sorted(Path(folder).glob("times-*.json"))
        if done.returncode or len(files) != 2 * ranks:
            logs = "".join(p.read_text() for p in Path(folder).glob("traces/logs/*"))
            raise RuntimeError(f"{framework} {system}: {done.stdout}{done.stderr}{logs}"[-4000:])
        return max(statistics.median(json.loads(path.read_text())) for path in files)


def page(rows: list[list[str]], reps: int) -> str:
    """Return the page with the table."""
    missing = [f.title for f in FRAMEWORKS.values() if not f.is_installed]
    left_out = f"\nNot measured, because it was not installed: {', '.join(missing)}.\n"
    text = f"""\
# Step times of the trainers of other frameworks

Written by `python -m benchmarks.trainer_steps --write`. Each framework's trainer trains with
clipping and AdamW, on its own data parallelism and on FFT in turn: batch {BATCH} x {CONTEXT} a
process, CPU, gloo, one thread each; {os.cpu_count()} cores, torch {torch.__version__}. Hugging Face
and Lightning train a GPT in two processes. torchtitan trains its Llama 3 debug model in four, with
FSDP2 in 2 replicas of 2 ranks. Median step in ms of the slowest process, over {reps} repetitions of
{min(STEPS.values())} to {max(STEPS.values())} steps; smallest and largest repetition in brackets.
A ratio is the median of the repetitions' ratios.

To a framework's own step FFT adds the vote, with a pass over the gradients that looks for NaN and
inf; the wait for the decision; the mean of the loss; and the copy of the state that a rollback
restores. The processes beside the trainers have no core of their own here: a monitor for each rank,
the bus and `fft run`. torchtitan adds up its losses only at the steps that it logs, every tenth,
and FFT at each step.

"""
    head = ["trainer", "parameters", "baseline", "baseline (ms)", "FFT (ms)", "FFT / baseline"]
    return text + "\n".join(markdown(head, rows)) + "\n" + (left_out if missing else "")


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
    due = []
    for name in args.frameworks:
        if FRAMEWORKS[name].is_installed:
            due += [(name, size) for size in FRAMEWORKS[name].steps]
        else:
            print(f"{name}: skipped, because {FRAMEWORKS[name].module} is not installed")
    for name, size in due:
        times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for rep in range(args.reps):
            for system in SYSTEMS[:: 1 if rep % 2 else -1]:
                times[system].append(repetition(name, system, size))
            last = [f"{s} {times[s][-1]:.1f}" for s in SYSTEMS]
            print(f"{name} {size} {rep + 1}: {last}", flush=True)
        cells = [spread(times[system]) for system in SYSTEMS]
        begin = [FRAMEWORKS[name].title, size, FRAMEWORKS[name].own]
        rows.append([*begin, *cells, ratio(times, "fft", "own")])
    print(text := page(rows, args.reps))
    if args.write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()

"""Single bit flips in the numbers of a rank, and what FFT's checks before the vote find of them.

The replicas are models in one process. Gradients are averaged in memory, and each step is judged by
the shipped parts: the check for finite gradients (`fft.train.session.step_results`), the
fingerprints (`fft.train.state`), and the guards of the core on the ballot. ``python -m
benchmarks.wrong_numbers [--write]`` runs 1,000 flips and 10,000 quiet steps in each of two layouts,
measures the costs, and prints the tables, or writes them into docs/bit_flips.md.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fft.errors import GradientsNotReproducible
from fft.messages.effects import StartTxn
from fft.messages.protocol import Manifest, Peer, Token, Vote
from fft.protocol.equality import differing, divergent_ranks, gradient_digest
from fft.train.gradients.recomputation import Recomputation, Recompute
from fft.train.session.step_results import are_finite, sum_of_squares
from fft.train.state.fingerprint import fingerprint

PAGE = Path(__file__).resolve().parents[1] / "docs" / "bit_flips.md"
KINDS = (
    "gradient, before the reduction",
    "gradient, after the reduction",
    "parameter, after the step",
    "byte of a state transfer",
)
LAYOUTS = {"2 x 2": (2, 2), "3 x 1": (3, 1)}
FLIPS, QUIET = 250, 10_000
EVERY = (1, 16, 0)
BEFORE, AFTER, NOT = "before the commit", "after one step", "not"
_WIDTH = 48


class Rank:
    """One rank: its parameters, optimizer and data."""

    def __init__(self, group: int, number: int) -> None:
        self.peer = Peer(str(group), number, 1)
        torch.manual_seed(number)
        self.model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(1000 * group + number)

    def backward(self) -> None:
        """Compute the gradients of the next batch."""
        x = torch.randn(16, _WIDTH, generator=self.generator)
        self.model(x).sub(x.mean(1, keepdim=True)).square().mean().backward()

    def gradients(self) -> list[torch.Tensor]:
        """Return its gradients."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def state(self) -> list[torch.Tensor]:
        """Return parameters and optimizer state, as `StepState.fingerprint` covers them."""
        held = self.optimizer.state.values()
        moments = [v for state in held for v in state.values() if isinstance(v, torch.Tensor)]
        return [*(p.detach() for p in self.model.parameters()), *moments]

    def fetch(self, source: Rank) -> None:
        """Take over the state of another rank."""
        with torch.no_grad():
            for mine, other in zip(self.state(), source.state(), strict=True):
                mine.copy_(other)


def flip(tensors: Sequence[torch.Tensor], rng: random.Random) -> None:
    """Flip one bit at a random place."""
    weights = [tensor.numel() for tensor in tensors]
    (tensor,) = rng.choices(list(tensors), weights)
    words = tensor.view(-1).view(torch.int32)
    bit = rng.randrange(32)
    words[rng.randrange(len(words))] ^= (1 << bit) if bit < 31 else -(1 << 31)


class Job:
    """Replicas that compute a step, and vote on it."""

    def __init__(self, groups: int, ranks: int) -> None:
        self.ranks = [Rank(g, r) for g in range(groups) for r in range(ranks)]

    def alike(self, number: int) -> list[Rank]:
        """Return the ranks that hold the same shard."""
        return [rank for rank in self.ranks if rank.peer.rank == number]

    def compute(self, wrong: Callable[[Rank], None] = lambda _: None) -> None:
        """Compute the gradients, change them by ``wrong``, and average them."""
        for rank in self.ranks:
            rank.optimizer.zero_grad()
            rank.backward()
            wrong(rank)
        for number in {rank.peer.rank for rank in self.ranks}:
            held = [rank.gradients() for rank in self.alike(number)]
            for parts in zip(*held, strict=True):
                mean = torch.stack(parts).mean(0)
                for part in parts:
                    part.copy_(mean)

    def refuses(self) -> bool:
        """Whether any rank finds gradients that are not finite."""
        return any(
            not sum_of_squares(held).isfinite() and not are_finite(held)
            for held in (rank.gradients() for rank in self.ranks)
        )

    def votes(self) -> list[Vote]:
        """Return the votes of a step that compares the replicas."""
        return [
            Vote(
                rank.peer,
                Manifest(1, 4, "x", fingerprint=fingerprint(rank.gradients())),
                digest=fingerprint(rank.state()),
            )
            for rank in self.ranks
        ]

    def step(self) -> None:
        """Commit the step."""
        for rank in self.ranks:
            rank.optimizer.step()


@dataclass
class Findings:
    """Results of one layout: (kind, interval) → when flips were found; and how many were named."""

    caught: dict[tuple[str, int], Counter[str]]
    named: Counter[str]
    false_alarms: int


def run_flips(groups: int, ranks: int, flips: int, quiet: int) -> Findings:
    """Run all kinds of flips, and the quiet steps."""
    rng, found = random.Random(f"{groups}x{ranks}"), Findings({}, Counter(), 0)
    for kind in KINDS:
        job = Job(groups, ranks)
        for _ in range(2):  # so that the optimizers have their state
            job.compute()
            job.step()
        good = Job(groups, ranks)
        for each in range(flips):
            for mine, other in zip(job.ranks, good.ranks, strict=True):
                if each == 0:
                    other.optimizer.load_state_dict(mine.optimizer.state_dict())
                    other.model.load_state_dict(mine.model.state_dict())
                mine.fetch(other)
            _one(job, kind, rng, found)
    job = Job(groups, ranks)
    for _ in range(quiet):
        job.compute()
        votes = job.votes()
        found.false_alarms += bool(
            job.refuses() or differing(votes) or differing(votes, gradient_digest)
        )
        job.step()
    return found


def _one(job: Job, kind: str, rng: random.Random, found: Findings) -> None:
    """Make one flip of ``kind``, and record for each interval when it is found."""
    victim = rng.choice(job.ranks)
    phase = rng.randrange(16)  # of the step within an interval of 16
    if kind == KINDS[0]:
        job.compute(lambda rank: flip(rank.gradients(), rng) if rank is victim else None)
    else:
        job.compute()
    if kind == KINDS[1]:
        flip(victim.gradients(), rng)
    refused, votes = job.refuses(), job.votes()
    differ = bool(differing(votes, gradient_digest))
    if kind == KINDS[1]:
        found.named[kind] += divergent_ranks(votes, gradient_digest) == (victim.peer,)
    later = False
    if kind in KINDS[2:]:
        refused = False
        job.step()
        if kind == KINDS[3]:
            donor = next(r for r in job.alike(victim.peer.rank) if r is not victim)
            victim.fetch(donor)
        flip(victim.state()[: len(list(victim.model.parameters()))], rng)
        job.compute()
        votes = job.votes()
        later = bool(differing(votes))
        found.named[kind] += divergent_ranks(votes) == (victim.peer,)
    for every in EVERY:
        is_due = every > 0 and phase % every == 0
        at = BEFORE if refused or (differ and is_due) else NOT
        if at == NOT and (later or differ) and every:
            at = AFTER if every == 1 or (phase + 1) % every == 0 else f"within {every} steps"
        found.caught.setdefault((kind, every), Counter())[at] += 1


def run_recomputed(groups: int, ranks: int, flips: int) -> tuple[int, int, int]:
    """Compute each step twice, and flip a bit of one gradient before its reduction.

    Returns:
        The flips that were found, those whose rank was named, and false alarms in as many steps
        without a flip.
    """
    rng, job = random.Random(f"{groups}x{ranks} twice"), Job(groups, ranks)
    found = named = alarms = 0
    for step in range(2 * flips):
        victim = rng.choice(job.ranks) if step % 2 else None
        wrong = rng.randrange(2)
        accused = [
            rank for rank in job.ranks if _differs(rank, step, wrong if rank is victim else -1, rng)
        ]
        if victim is None:
            alarms += bool(accused)
        else:
            found += bool(accused)
            named += accused == [victim]
        job.step()
    return found, named, alarms


def _differs(rank: Rank, step: int, wrong: int, rng: random.Random) -> bool:
    """Compute a step twice, attempt ``wrong`` with a flip; return whether the rank notices."""
    recomputation, before = Recomputation(1), rank.generator.get_state()
    plan = StartTxn(Token(1, step), step, "x", step, 0, 1, (rank.peer.group,), 0)
    for attempt in range(2):
        rank.generator.set_state(before)
        rank.optimizer.zero_grad()
        rank.backward()
        if attempt == wrong:
            flip(rank.gradients(), rng)
        recomputation.begin(plan)
        for number, gradient in enumerate(rank.gradients()):
            recomputation.before_reduction(gradient, f"bucket {number}")
        try:
            recomputation.compare()
        except Recompute:
            continue
        except GradientsNotReproducible:
            return True
    return False


# --- costs ----------------------------------------------------------------------------------------


def cost_rows() -> list[str]:
    """Return the rows of the table of costs, at 10 and 100 MB of gradients."""
    rows = []
    for megabytes in (10, 100):
        each = megabytes * 2**18 // 100
        parameters = [nn.Parameter(torch.randn(each)) for _ in range(100)]
        for parameter in parameters:
            parameter.grad = torch.randn(each)
        optimizer = torch.optim.AdamW(parameters, foreach=True)
        optimizer.step()
        held = optimizer.state.values()
        moments = [v for state in held for v in state.values() if isinstance(v, torch.Tensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [*(p.detach() for p in parameters), *moments]
        update = _least_ms(optimizer.step)
        norm = _least_ms(lambda g=gradients: float(sum_of_squares(g)))
        own = _least_ms(lambda g=gradients: fingerprint(g))
        whole = _least_ms(lambda s=state: fingerprint(s))
        rows.append(
            f"| {megabytes} MB | {update:.1f} | 0 | {norm:.1f} | {own:.1f} | {whole:.1f} | "
            f"{own + whole + norm:.1f} | {(own + whole) / 16 + norm:.1f} |"
        )
    return rows


def _least_ms(work: Callable[[], object], times: int = 9) -> float:
    work()
    found = []
    for _ in range(times):
        begun = time.thread_time()
        work()
        found.append(time.thread_time() - begun)
    return 1000 * min(found)


# --- the page -------------------------------------------------------------------------------------


def page(flips: int, quiet: int) -> str:
    """Run everything and return the page."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines = [
        "# Bit flips, and what is found of them",
        "",
        "Written by `python -m benchmarks.wrong_numbers --write`. Each flip changes one random "
        f"bit of a float32 in one rank: {flips} flips of each kind in each layout, in a small "
        "model. The checks are the shipped ones; the replicas are models in one process. A "
        "gradient *before the reduction* is found only if it makes the average NaN or inf, since "
        "all replicas get the same average. The byte of a state transfer is flipped in the memory "
        "of the rank that fetches. *Named*: a majority shows which rank is wrong.",
        "",
        "| layout | kind | check_replicas | before the commit | after one step | within 16 steps "
        "| not | named |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    alarms = {}
    for layout, shape in LAYOUTS.items():
        found = run_flips(*shape, flips, quiet)
        alarms[layout] = found.false_alarms
        for (kind, every), at in found.caught.items():
            later = sum(n for when, n in at.items() if when.startswith("within"))
            named = f"{found.named[kind]}" if every == 1 and kind != KINDS[0] else "-"
            lines.append(
                f"| {layout} | {kind} | {every or 'off'} | {at[BEFORE]} | {at[AFTER]} | {later} | "
                f"{at[NOT]} | {named} |"
            )
    told = ", ".join(f"{n} in {layout}" for layout, n in alarms.items())
    lines += [
        "",
        "With `recompute_every=1` each step is computed twice, and a rank compares its gradients "
        f"before the reduction. A bit was flipped in every second of {2 * flips} steps:",
        "",
        "| layout | flips | found before the commit | rank named | false alarms |",
        "|---|--:|--:|--:|--:|",
    ]
    for layout, shape in LAYOUTS.items():
        caught, named_, wrongly = run_recomputed(*shape, flips)
        lines.append(f"| {layout} | {flips} | {caught} | {named_} | {wrongly} |")
    lines += [
        "",
        f"False alarms in {quiet:,} quiet steps of each layout: {told}.",
        "",
        f"Cost in ms of CPU time on one core, the least of 9, torch {torch.__version__}. AdamW's "
        "step of the same parameters is for comparison, and *none* is a step without checks. The "
        "default interval of `check_replicas` is chosen so that fingerprints take 1 % of the time.",
        "",
        "| gradients | AdamW's step | none | finite, or norm for a veto | fingerprint of gradients "
        "| of parameters and AdamW's state | all, every step | all, every 16 steps, per step |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
        *cost_rows(),
        "",
    ]
    torch.set_num_threads(threads)
    return "\n".join(lines)


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--flips", type=int, default=FLIPS)
    parser.add_argument("--quiet", type=int, default=QUIET)
    given = parser.parse_args()
    text = page(given.flips, given.quiet)
    if given.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()

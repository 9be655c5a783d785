"""Models that are not language models: shared and unused weights, vision, GANs, embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus import GPT, LETTERS, WIDTH, Text, Vectors, perceptron
from recipe_job import Job
from torch import nn

import fft
from fft.train.gradients.buckets import GradBucket


class Branches(nn.Module):
    """A model with tied weights, a reused module, a data-dependent branch, and an unused one."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gpt = GPT(dropout, tied=True)
        self.twice = nn.Linear(32, 32)
        self.h = nn.ModuleList([self.twice, nn.Tanh(), self.twice])
        self.odd, self.even = nn.Linear(32, 32), nn.Linear(32, 32)
        self.never = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, is_odd: bool) -> torch.Tensor:
        """Return the mean loss of predicting the letters ``x`` (batch, window) themselves."""
        hidden = self.gpt.wte(x)
        for module in self.h:
            hidden = module(hidden)
        hidden = hidden + (self.odd if is_odd else self.even)(hidden)
        return F.cross_entropy(self.gpt.lm_head(hidden).flatten(0, 1), x.flatten())


def tied_shared_unused(job: Job) -> None:
    """Train a model in which each branch may be used on one replica only, or on none."""
    model = Branches(job.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager()
    manager.register(model, optimizer)
    manager.sync_gradients(model, bucket_cap_mb=0.01, find_unused_parameters=True)
    loader = fft.CursorLoader(Text(), batch_size=4, seed=20)
    job.own_seed()
    odd: list[bool] = []
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, _, index = txn.batch
            is_odd = bool(index.sum() % 2)
            loss = model(x, is_odd)
            loss.backward()
            assert all(p.grad is None for p in model.never.parameters())
            job.reduced(model)
        if txn.committed:
            job.committed(index, loss.item())
            odd.append(is_odd)
    job.facts["odd"] = odd
    job.ended(model, optimizer)


class Stripes(torch.utils.data.Dataset[tuple[torch.Tensor, int, int]]):
    """A data set whose sample ``i`` is an image (1, 8, 8) of stripes, whether they are upright, and
    ``i``."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        stripes = (torch.arange(8) + index).remainder(2).float().expand(8, 8)
        image = stripes if index % 4 < 2 else stripes.T
        image = image.flip(0, 1) if torch.rand(()) < 0.5 else image
        return (image + 0.1 * torch.randn(8, 8))[None], int(index % 4 < 2), index


def batchnorm_cnn(job: Job) -> None:
    """Train with batch norm, and augmentation that the data-loader workers draw."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(job.dropout), nn.Linear(8, 2),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=job.steps)
    manager = job.manager()
    manager.register(model, optimizer, schedule)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Stripes(), batch_size=8, seed=21, num_workers=2)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            image, target, index = txn.batch
            loss = F.cross_entropy(model(image), target)
            loss.backward()
        if txn.committed:
            job.committed(index, loss.item())
    job.ended(model, optimizer, schedule)


class Gan(nn.Module):
    """A generator of vectors and its critic."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.d = perceptron(dropout)


def gan(job: Job) -> None:
    """Train with two optimizers that step in turn."""
    torch.manual_seed(4)
    model = Gan(job.dropout)
    g, d = model.g, model.d
    optimizers = [torch.optim.Adam(part.parameters(), lr=5e-3, betas=(0.5, 0.9)) for part in (g, d)]
    manager = job.manager()
    manager.register([g, d], optimizers)
    manager.sync_gradients(g)
    manager.sync_gradients(d)
    loader = fft.CursorLoader(Vectors(), batch_size=8, seed=22)
    noise = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, _, index = txn.batch
            trains_d = txn.step % 2 == 0
            d.requires_grad_(trains_d)
            g.requires_grad_(not trains_d)
            fake, real = d(g(noise[index])), d(x * 3 + 1)
            judged = F.softplus(fake).mean() + F.softplus(-real).mean()
            (judged if trains_d else F.softplus(-fake).mean()).backward()
        if txn.committed:
            job.committed(index, judged.item())
    d.requires_grad_(), g.requires_grad_()
    job.ended(model, optimizers)


def wgan_clamp(job: Job) -> None:
    """Clamp the critic's weights in the step function, before its loss."""
    torch.manual_seed(4)
    model = Gan(job.dropout)
    g, d = model.g, model.d
    optimizers = [torch.optim.RMSprop(part.parameters(), lr=5e-3) for part in (g, d)]
    manager = job.manager()
    manager.register([g, d], optimizers)
    manager.sync_gradients(g)
    manager.sync_gradients(d)
    loader = fft.CursorLoader(Vectors(), batch_size=8, seed=23)
    noise = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, _, index = txn.batch
            trains_d = txn.step % 4 < 3
            d.requires_grad_(trains_d)
            g.requires_grad_(not trains_d)
            with torch.no_grad():
                for parameter in d.parameters():
                    parameter.clamp_(-0.15, 0.15)
            fake, real = d(g(noise[index])), d(x * 3 + 1)
            distance = fake.mean() - real.mean()
            (distance if trains_d else -fake.mean()).backward()
        if txn.committed:
            job.committed(index, distance.item())
    d.requires_grad_(), g.requires_grad_()
    job.ended(model, optimizers)


def sparse_embedding(job: Job) -> None:
    """Train an embedding with sparse gradients and its own optimizer, beside the rest."""
    embedding = nn.Embedding(len(LETTERS), 16, sparse=True)
    head = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Dropout(job.dropout), nn.Linear(32, len(LETTERS))
    )
    model = nn.Sequential(embedding, head)
    optimizers = [
        torch.optim.SparseAdam(embedding.parameters(), lr=3e-2),
        torch.optim.Adam(head.parameters(), lr=3e-2),
    ]
    manager = job.manager()
    manager.register(model, optimizers)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Text(), batch_size=8, seed=24)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
        if txn.committed:
            job.committed(index, loss.item())
    job.ended(model, optimizers)


def compressed(job: Job) -> None:
    """Send gradients as float16, by a communication hook as DDP takes one."""

    def compress(manager: fft.ManagerFFT, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        small = buffer.to(torch.float16)
        work = manager.allreduce(small)
        work.wait()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(small.to(buffer.dtype))
        return future

    model = perceptron(job.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager()
    manager.register(model, optimizer)
    manager.sync_gradients(model, bucket_cap_mb=0.003)
    manager.register_comm_hook(manager, compress)
    loader = fft.CursorLoader(Vectors(), batch_size=8, seed=25)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            loss = F.mse_loss(model(x), y)
            loss.backward()
        if txn.committed:
            job.committed(index, loss.item())
    job.ended(model, optimizer)


def adaptive_clipping(job: Job) -> None:
    """Clip gradients to a fraction of the norm of their weights, and decay them by hand."""
    model = perceptron(job.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager()
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Vectors(), batch_size=8, seed=26)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            loss = F.mse_loss(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    limit = 0.1 * p.norm().clamp(min=1e-3)
                    p.grad.mul_((limit / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))
                    p.grad.add_(p, alpha=1e-3)
        if txn.committed:
            job.committed(index, loss.item())
    job.ended(model, optimizer)

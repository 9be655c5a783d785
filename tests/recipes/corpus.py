"""Tiny data sets and models that the recipes share. Every sample includes its number."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

TEXT = b"to be or not to be that is the question " * 8
LETTERS = sorted(set(TEXT))
WINDOW = 16
WIDTH = 16


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """A data set whose sample ``i`` is the letters from the i-th on, those one further, and
    ``i``."""

    def __init__(self) -> None:
        self.letters = torch.tensor([LETTERS.index(letter) for letter in TEXT])

    def __len__(self) -> int:
        return len(self.letters) - WINDOW - 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        piece = self.letters[index : index + WINDOW + 1]
        return piece[:-1], piece[1:], index


class Vectors(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """A data set whose sample ``i`` is a random vector, the mean of its squares, and ``i``."""

    def __init__(self) -> None:
        self.x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.x[index].square().mean(0, keepdim=True), index


class Block(nn.Module):
    """A transformer block: causal attention, then a perceptron, each after a norm."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        heads = [
            p.view(b, t, 2, c // 2).transpose(1, 2) for p in self.c_attn(self.ln_1(x)).chunk(3, -1)
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.c_proj(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """A model after nanoGPT; the output shares its weights with the embedding if ``tied``."""

    def __init__(self, dropout: float = 0.0, width: int = 32, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(len(LETTERS), width)
        self.wpe = nn.Embedding(WINDOW, width)
        self.h = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, len(LETTERS), bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the letters ``y`` (batch, window) that follow ``x`` (batch,
        window)."""
        hidden = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            hidden = block(hidden)
        logits = self.lm_head(self.ln_f(hidden))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def perceptron(dropout: float = 0.0) -> nn.Sequential:
    """Return a perceptron from `Vectors` to their targets."""
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1),
    )  # fmt: skip

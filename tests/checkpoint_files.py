"""Checkpoints as a job writes them, made without a job, for the tests of checkpoint files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from fft.checkpoints.files import (
    Checkpoints,
    File,
    Manifest,
    Receipt,
    Scope,
    file_stem,
    partial_name,
)
from fft.checkpoints.stores import Store

GROUPS, RANKS = ("0", "1"), 2


def deliver(store: Store, directory: str, attempt: str, group: str, rank: int, step: int) -> None:
    """Write one rank's files and receipt; the tensors depend on all arguments that name the
    rank."""
    stem = file_stem(group, rank)
    with store.writing(f"{directory}/{stem}.safetensors") as path:
        values = numpy.arange(64, dtype=numpy.float32) + step * 100 + int(group) * 10 + rank
        values += len(attempt) / 8
        save_file({"state.parameters.weight": values, "own.x": values[:3] * 2}, path)
    store.write(f"{directory}/{stem}.json", json.dumps({"step": step, "rank": rank}).encode())
    names = [f"{stem}.json", f"{stem}.safetensors"]
    sizes = store.files(directory)
    files = tuple(
        File(name=n, size=sizes[n], sha256=store.digest(f"{directory}/{n}")) for n in names
    )
    receipt = Receipt(attempt=attempt, group=group, rank=rank, files=files)
    Checkpoints(store).deliver(directory, receipt)


def manifest_of(store: Store, directory: str, attempt: str, step: int) -> Manifest:
    """Return the manifest that the first rank of the writing group would make."""
    receipts = Checkpoints(store).receipts(directory, attempt)
    return Manifest(
        step=step,
        lineage=f"lineage{step}",
        batches=2 * step,
        cursor=2 * step,
        returned=(),
        scopes={
            "job": Scope(
                step=step, lineage=f"lineage{step}", batches=2 * step, cursor=2 * step, returned=()
            )
        },
        writer="0",
        groups=GROUPS,
        ranks=RANKS,
        spec="hsdp",
        spec_digest="0" * 64,
        fft_version="0",
        torch_version="0",
        attempt=attempt,
        written_at=0.0,
        files=tuple(file for _, receipt in sorted(receipts.items()) for file in receipt.files),
    )


def written(store: Store, step: int, attempt: str = "a1") -> str:
    """Write a complete checkpoint that is not published yet, and return its directory."""
    directory = partial_name(step, attempt)
    for group in GROUPS:
        for rank in range(RANKS):
            deliver(store, directory, attempt, group, rank, step)
    return directory


def published(store: Store, *steps: int) -> Checkpoints:
    """Return a store with published checkpoints of ``steps``."""
    found = Checkpoints(store)
    for step in steps:
        directory = written(store, step)
        found.publish(directory, manifest_of(store, directory, "a1", step))
    return found


def bytes_below(root: Path) -> dict[str, bytes]:
    """Return the contents of every file below a directory."""
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }

"""Tests of copies of the state in memory as files: which one a job resumes from.

`tests/e2e/test_near_state.py` runs whole jobs.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fft.checkpoints.copies import HeldCopies, chosen, deliver, keep_newest
from fft.checkpoints.files import File, Manifest, Scope, file_stem, partial_name
from fft.checkpoints.plan import MemoryPlan, memory_interval
from fft.checkpoints.stores import LocalStore
from fft.errors import CheckpointError
from fft.train.checkpoint.memory import Pace

GROUPS, RANKS = ("0", "1"), 2


def part(root: Path, step: int, group: str, rank: int, lineage: str = "") -> None:
    """Write the copy of one rank; the shared tensors of both groups are equal."""
    store, directory = LocalStore(root), partial_name(step, f"a{step}")
    stem = file_stem(group, rank)
    store.write(f"{directory}/{stem}.safetensors", bytes([step, rank]) * 500)
    store.write(f"{directory}/{stem}.json", f"{step} {group} {rank}".encode())
    sizes = store.files(directory)
    names = (f"{stem}.json", f"{stem}.safetensors")
    at = Scope(
        step=step, lineage=lineage or f"l{step}", batches=2 * step, cursor=2 * step, returned=()
    )
    made = Manifest(
        **at.model_dump(),
        scopes={"job": at},
        writer=group,
        groups=GROUPS,
        ranks=RANKS,
        spec="hsdp",
        spec_digest="0",
        fft_version="0",
        torch_version="0",
        attempt=f"a{step}",
        written_at=rank,
        files=tuple(
            File(name=n, size=sizes[n], sha256=store.digest(f"{directory}/{n}")) for n in names
        ),
    )
    deliver(store, directory, made, rank)


def copied(root: Path, *steps: int) -> HeldCopies:
    """Return a folder with the copies of all ranks at ``steps``."""
    for step in steps:
        for group in GROUPS:
            for rank in range(RANKS):
                part(root, step, group, rank)
    return HeldCopies(root)


def newest(copies: HeldCopies, below: int | None = None) -> tuple[Manifest | None, list[str]]:
    """Return the newest copy of one folder, ready to be loaded, and why others are not used."""
    choice, problems = chosen([copies], below)
    if choice is None:
        return None, problems
    copies.adopt(choice, [""], 0)
    return choice.manifest, problems


def test_newest_complete_copy_is_one_checkpoint(tmp_path: Path) -> None:
    copies = copied(tmp_path, 4, 6)
    part(tmp_path, 8, "0", 1)  # the job ended in the midst of this copy
    found, problems = newest(copies)
    assert found is not None and not problems
    assert (found.step, found.lineage, found.groups, len(found.files)) == (6, "l6", GROUPS, 8)
    assert copies.checkpoints.verify(6) == found
    assert newest(copies, below=6)[0] == copies.checkpoints.manifest(4)
    assert newest(copies, below=4) == (None, [])


@pytest.mark.parametrize("seed", range(50))
def test_flipped_bit_is_found_before_the_copy_is_used(seed: int, tmp_path: Path) -> None:
    """A flip in a manifest or a file of one rank, at a random place."""
    copies, dice = copied(tmp_path, 4, 6), random.Random(seed)
    folder = tmp_path / partial_name(6, "a6")
    path = dice.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    found, problems = newest(copies)
    assert found is not None and found.step == 4, "the one with the own state of all groups"
    assert len(problems) == 1 and f"{folder.name}/{path.stem}" in problems[0]


def test_shards_come_from_the_groups_that_have_them(tmp_path: Path) -> None:
    copies = copied(tmp_path, 6)
    for group, rank in (("0", 1), ("1", 0)):
        path = tmp_path / partial_name(6, "a6") / f"{file_stem(group, rank)}.safetensors"
        path.write_bytes(b"damaged")
    found, problems = newest(copies)
    assert found is not None and (found.writer, found.groups) == ("0", ())
    assert len(problems) == 2
    assert copies.checkpoints.verify(6) == found
    held = tmp_path / copies.checkpoints.directory(found)
    for rank in range(RANKS):
        (name,) = [f.name for n, f in found.files_of("0", rank).items() if n == "safetensors"]
        assert (held / name).read_bytes() == bytes([6, rank]) * 500


def test_one_group_is_enough_if_the_host_of_the_other_is_lost(tmp_path: Path) -> None:
    for rank in range(RANKS):
        part(tmp_path, 6, "1", rank)
    found, problems = newest(HeldCopies(tmp_path))
    assert found is not None and (found.writer, found.groups, problems) == ("1", ("1",), [])


def test_shard_that_no_group_has_makes_the_copy_useless(tmp_path: Path) -> None:
    copies = copied(tmp_path, 4)
    part(tmp_path, 6, "0", 1), part(tmp_path, 6, "1", 1)
    found, _ = newest(copies)
    assert found is not None and found.step == 4


def test_parts_of_different_lineages_are_not_combined(tmp_path: Path) -> None:
    copies = copied(tmp_path, 4, 6)
    part(tmp_path, 6, "1", 1, lineage="another")
    found, problems = newest(copies)
    assert found is not None and found.step == 4
    assert "group 1 rank 1 has another lineage" in problems[0]


def test_rank_keeps_its_newest_complete_copy_alone(tmp_path: Path) -> None:
    copies = copied(tmp_path, 2, 4, 6)
    for group in GROUPS:
        for rank in range(RANKS):
            keep_newest(tmp_path, file_stem(group, rank), below=8)
    assert copies.steps() == [6]
    assert [p.name for p in tmp_path.iterdir()] == [partial_name(6, "a6")]


def test_copy_that_was_resumed_from_is_removed_like_others(tmp_path: Path) -> None:
    copies = copied(tmp_path, 2, 4)
    found, _ = newest(copies)
    copies.remove_others(found)
    assert copies.steps() == [4]
    copied(tmp_path, 5)
    for group in GROUPS:
        for rank in range(RANKS):
            keep_newest(tmp_path, file_stem(group, rank), below=6)
    assert copies.steps() == [5] and len(list(tmp_path.iterdir())) == 1


def test_pace_makes_copies_cost_one_percent() -> None:
    pace = Pace()
    assert pace.steps() == 4, "nothing is known yet"
    for _ in range(8):
        pace.stepped(0.05, has_copied=False)
    pace.stepped(0.07, has_copied=True)
    pace.stepped(0.06, has_copied=True)
    assert pace.is_measuring
    pace.stepped(0.05, has_copied=False)
    assert pace.steps() == 60, "30 ms are 1 % of 3 s"
    pace.stepped(5.0, has_copied=True)
    pace.disturbed()
    pace.stepped(0.05, has_copied=False)
    assert pace.steps() == 60, "a fault is no cost of a copy"


def test_settings_reach_the_ranks_by_the_environment(tmp_path: Path) -> None:
    for plan in (MemoryPlan(tmp_path, None, 10), MemoryPlan(tmp_path, 3, 10, 8, ("a", "b"))):
        assert MemoryPlan.from_env(plan.to_env()) == plan
    assert MemoryPlan.from_env({}) is None
    assert (memory_interval("auto"), memory_interval("7")) == (None, 7)
    with pytest.raises(CheckpointError, match="--memory 0: give auto, off, or the number"):
        memory_interval("0")

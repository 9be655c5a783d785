"""Tests of the layout of a mesh: what is refused, lines of ranks, and batches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fft.checkpoints.files import Manifest, Scope
from fft.errors import FftError, UnfitCheckpoint
from fft.train.checkpoint.loading import CheckpointLoader, Loaded
from fft.train.process_groups.mesh_layout import BatchShare, MeshLayout


def layout(
    names: Sequence[str],
    shape: Sequence[int],
    rank: int = 0,
    ranks: int = 4,
    same_batch: Sequence[str] | None = None,
) -> MeshLayout:
    return MeshLayout.checked(names, shape, same_batch, rank, ranks)


@pytest.mark.parametrize(
    ("names", "shape", "same_batch", "message"),
    [
        (("fsdp", "tp"), (2, 3), None, r"multiply to 6, but this replica group has 4 ranks"),
        (("fsdp", "tp"), (-2, -2), None, r"positive int sizes, got -2"),
        (("fsdp", "tp"), (2.0, 2), None, r"positive int sizes, got 2.0"),
        (("fsdp", "tp"), "22", None, r"positive int sizes, got '2'"),
        (("fsdp", "tp"), (4,), None, r"different names and one size for each name"),
        (("tp", "tp"), (2, 2), None, r"different names"),
        ((), (), None, r"different names"),
        (("fsdp", "rows"), (2, 2), None, r"along 'rows' work on the same batch; pass the names"),
        (("fsdp", "rows"), (2, 2), ("tp",), r"names 'tp', which is not a dimension"),
    ],
)
def test_layout_refuses_arguments_that_do_not_fit(
    names: Sequence[str], shape: Sequence[int], same_batch: Sequence[str] | None, message: str
) -> None:
    with pytest.raises(FftError, match=message):
        layout(names, shape, same_batch=same_batch)


def test_one_dimension_needs_no_sequence() -> None:
    made = MeshLayout.checked("tp", 4, "tp", 0, 4)
    assert made == MeshLayout.checked(("tp",), (4,), ("tp",), 0, 4)


def test_lines_are_those_of_torchs_mesh() -> None:
    shape = (2, 3, 2)
    mesh = torch.arange(12).view(shape)
    for rank in range(12):
        at = (mesh == rank).nonzero()[0].tolist()
        made = layout(("fsdp", "cp", "tp"), shape, rank, 12)
        for dimension, name in enumerate(made.sizes):
            index = tuple(slice(None) if i == dimension else c for i, c in enumerate(at))
            assert made.line(name) == mesh[index].tolist()


def test_ranks_along_tp_share_a_batch() -> None:
    made = [layout(("fsdp", "tp"), (2, 2), rank) for rank in range(4)]
    firsts = [(0, True), (0, False), (1, True), (1, False)]
    assert [each.batches for each in made] == [BatchShare(2, *first) for first in firsts]
    turned = [layout(("cp", "fsdp"), (2, 2), rank).batches.number for rank in range(4)]
    assert turned == [0, 1, 0, 1]


def test_same_batch_overrides_the_meaning_of_names() -> None:
    assert layout(("rows", "columns"), (2, 2), 3, same_batch=()).batches == (4, 3, True)
    assert layout(("rows", "tp"), (2, 2), 3, same_batch=("rows",)).batches == (2, 1, False)
    assert layout("tp", (4,), 3).batches == (1, 0, False)


def test_text_differs_for_different_layouts() -> None:
    made = [
        layout(("fsdp", "tp"), (2, 2)),
        layout(("tp", "fsdp"), (2, 2)),
        layout(("fsdp", "tp"), (4, 1)),
        layout(("fsdp", "tp"), (2, 2), same_batch=()),
    ]
    assert str(made[0]) == "fsdp=2 x tp=2 (same batch)"
    assert len({str(each) for each in made}) == 4
    assert str(layout(("fsdp", "tp"), (2, 2), rank=3)) == str(made[0])


# --- the data position of a checkpoint from another mesh ---


def loaded(own_items: int, own_mesh: str, **written: Any) -> Loaded:
    """Return the position at which a job of 4 ranks resumes.

    Args:
        own_items: Number of batches of a group in a step of this job.
        own_mesh: Its mesh.
        written: Fields of the manifest.
    """
    at = {"step": 6, "lineage": "l", "batches": 12, "cursor": 12, "returned": ()}
    fields: dict[str, Any] = {**at, "writer": "0", "groups": ("0", "1"), "ranks": 4}
    fields |= {"spec": "hsdp", "spec_digest": "d", "fft_version": "1", "attempt": "a", "wall": 1.0}
    fields |= {"digests": {}, "files": (), **written}
    fields = {name: value for name, value in fields.items() if name in Manifest.model_fields}
    loader = CheckpointLoader.__new__(CheckpointLoader)
    loader._ranks = 4
    loader._rank = cast(Any, SimpleNamespace(groups=SimpleNamespace(mesh_text=own_mesh)))
    paradigm = SimpleNamespace(items_per_step=own_items)
    loader._state = cast(Any, SimpleNamespace(paradigm=paradigm))
    place = Scope(**at)
    return loader._stands_anew(Manifest.model_construct(**fields, scopes={"job": place}), place)


@pytest.mark.parametrize(
    ("written", "items", "cursor"),
    [
        ({"mesh": "fsdp=2 x tp=2 (same batch)", "items": 2}, 4, 6),
        ({"mesh": "fsdp=2 x tp=2 (same batch)", "items": 2}, 2, 12),
        ({"mesh": "", "items": 4}, 2, 24),
        ({"mesh": "", "items": 0}, 2, 24),
        ({"mesh": "", "items": 0, "ranks": 8}, 4, 24),
        ({"mesh": "", "items": 0, "ranks": 8}, 1, 12),
    ],
    ids=["mesh_to_ranks", "same_share", "ranks_to_mesh", "old", "old_8_ranks", "old_per_group"],
)
def test_checkpoint_of_another_mesh_continues_at_the_same_batch(
    written: dict[str, Any], items: int, cursor: int
) -> None:
    found = loaded(items, "another mesh", **written)
    assert found.cursor == cursor and found.lineage != "l"


def test_checkpoint_within_the_batches_of_a_step_is_refused() -> None:
    with pytest.raises(UnfitCheckpoint, match="stands at item 26 of the data"):
        loaded(4, "", mesh="fsdp=2 x tp=2 (same batch)", items=2, cursor=13)
    with pytest.raises(UnfitCheckpoint, match="in slices of 2 batches"):
        loaded(4, "", mesh="fsdp=2 x tp=2 (same batch)", items=2, returned=(3,))

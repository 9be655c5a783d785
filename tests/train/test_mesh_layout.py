"""Tests of the layout of a mesh: what is refused, lines of ranks, and batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fft.errors import FftError
from fft.train.mesh_layout import BatchShare, MeshLayout


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
        (("fsdp", "tp"), (-2, -2), None, r"multiply to 4"),
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

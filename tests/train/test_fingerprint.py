"""Tests that the fingerprint detects each change of a bit or a place, and of when it is due."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import pytest
import torch

from fft.errors import FftError
from fft.train.state.equality_checks import EqualityChecks
from fft.train.state.fingerprint import fingerprint

ROW = (1 << 15) * 8
"""Bytes that the fingerprint processes at once."""
SIZES = {"small": 1001, "one row": ROW, "rows and a tail": 2 * ROW + 40, "odd": 3 * ROW + 13}
"""Sizes of a tensor in bytes; the dtype rounds them down."""
DTYPES = [torch.float32, torch.float64, torch.int8, torch.bool, torch.bfloat16]
MAKE = torch.Generator


def made(nbytes: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Return a flat tensor with random content."""
    count = nbytes // dtype.itemsize
    drawn = torch.randint(-100, 100, (count,), generator=MAKE().manual_seed(seed))
    return (drawn > 0) if dtype is torch.bool else (drawn / 8).to(dtype)


def flipped(tensor: torch.Tensor, byte: int, bit: int) -> torch.Tensor:
    """Return a copy with one bit changed."""
    copy = tensor.clone(memory_format=torch.preserve_format)
    copy.view(-1).view(torch.uint8)[byte] ^= 1 << bit
    return copy


def places(nbytes: int) -> Iterator[int]:
    """Return bytes to try: both ends, around the ends of rows, and some between."""
    edges = {0, 1, 7, 8, nbytes // 3, nbytes // 2, nbytes - 9, nbytes - 8, nbytes - 2, nbytes - 1}
    edges |= {end + near for end in range(ROW, nbytes + 1, ROW) for near in (-8, -1, 0, 7)}
    return (place for place in sorted(edges) if 0 <= place < nbytes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_flipped_bit_changes_the_fingerprint(size: str, dtype: torch.dtype) -> None:
    tensor = made(SIZES[size], dtype)
    nbytes = tensor.nbytes
    bits = [0] if dtype is torch.bool else [0, 3, 7]  # a bool has no other valid bit
    before = fingerprint([tensor])
    for byte in places(nbytes):
        for bit in bits:
            assert fingerprint([flipped(tensor, byte, bit)]) != before, (byte, bit)


def test_every_bit_of_a_short_tensor_changes_the_fingerprint() -> None:
    tensor = made(24, torch.float32)
    seen = {fingerprint([tensor])}
    seen |= {fingerprint([flipped(tensor, byte, bit)]) for byte in range(24) for bit in range(8)}
    assert len(seen) == 24 * 8 + 1


@pytest.mark.parametrize("which", range(5))
def test_every_one_of_several_tensors_counts(which: int) -> None:
    sizes = (40, ROW + 8, 13, 2 * ROW, 24)  # some are concatenated, some are not
    tensors = [made(size, torch.int8, seed) for seed, size in enumerate(sizes)]
    before = fingerprint(tensors)
    last = tensors[which].nbytes - 1
    for byte in (0, last):
        changed = list(tensors)
        changed[which] = flipped(tensors[which], byte, 7)
        assert fingerprint(changed) != before, byte
    assert fingerprint(tensors) == before


@pytest.mark.parametrize("nbytes", [64, ROW * 2])
def test_swapped_tensors_change_the_fingerprint(nbytes: int) -> None:
    first, second = made(nbytes, torch.float32, 1), made(nbytes, torch.float32, 2)
    assert fingerprint([first, second]) != fingerprint([second, first])
    between = made(64, torch.float64, 3)
    assert fingerprint([first, between, second]) != fingerprint([second, between, first])


def test_swapped_words_or_rows_change_the_fingerprint() -> None:
    drawn = torch.randn(3, ROW // 8, generator=MAKE().manual_seed(1), dtype=torch.float64)
    before = fingerprint([drawn])
    for a, b in ((0, 1), (1, 2), (0, 2)):
        table = drawn.clone()
        table[[a, b]] = drawn[[b, a]]
        assert fingerprint([table]) != before, f"rows {a} and {b}"
    flat, lanes = drawn.view(-1), ROW // 8
    for a, b in ((0, 1), (5, lanes + 9), (lanes - 1, lanes), (7, 2 * lanes + 7), (3, -1)):
        words = flat.clone()
        words[a], words[b] = flat[b], flat[a]
        assert fingerprint([words]) != before, f"words {a} and {b}"


def test_rows_swapped_between_tensors_change_the_fingerprint() -> None:
    first, second = (torch.randn(3, ROW // 4, generator=MAKE().manual_seed(i)) for i in (1, 2))
    before = fingerprint([first, second])
    for a, b in ((0, 0), (1, 0), (0, 1), (2, 1)):
        one, other = first.clone(), second.clone()
        one[a], other[b] = second[b], first[a]
        assert fingerprint([one, other]) != before, (a, b)


# Only the highest bits of words change here: a plain sum modulo 2 ** 64 loses all but one of them.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("nbytes", [256, 2 * ROW + 64])
def test_two_flipped_signs_change_the_fingerprint(dtype: torch.dtype, nbytes: int) -> None:
    tensor = made(nbytes, dtype)
    before = fingerprint([tensor])
    last = tensor.numel() - 1
    for a, b in ((1, 3), (1, last), (3, last // 2)):
        changed = tensor.clone()
        changed[[a, b]] = changed[[a, b]].add(0.5).neg()
        plus = changed.clone()
        plus[[a, b]] = -plus[[a, b]]
        assert fingerprint([changed]) != fingerprint([plus]), (a, b)
    assert fingerprint([-tensor]) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [4, 9, 2 * ROW])
def test_two_zeros_of_another_sign_change_the_fingerprint(dtype: torch.dtype, numel: int) -> None:
    zeros = torch.zeros(numel, dtype=dtype)
    changed = zeros.clone()
    changed[[1, 3]] = -0.0
    assert torch.equal(zeros, changed), "equal as numbers"
    seen = {fingerprint([zeros]), fingerprint([changed]), fingerprint([-zeros])}
    assert len(seen) == 3
    pairs = [[zeros, zeros], [zeros, changed], [changed, zeros], [changed, changed]]
    assert len({fingerprint(pair) for pair in pairs}) == 4


def test_equal_content_is_equal_in_any_memory() -> None:
    for shape in ((5, 7), (300, 301)):
        plain = torch.randn(shape, generator=MAKE().manual_seed(1))
        wanted = fingerprint([plain])
        wide = torch.zeros(shape[0], 2 * shape[1])
        wide[:, ::2] = plain
        offset = torch.empty(plain.numel() + 1)[1:].view(shape).copy_(plain)
        unaligned = torch.empty(plain.nbytes + 4, dtype=torch.uint8)[4:].view(torch.float32)
        unaligned = unaligned.view(shape).copy_(plain)
        ways = {
            "transposed in memory": plain.t().contiguous().t(),
            "every second column": wide[:, ::2],
            "behind one element": offset,
            "off by four bytes": unaligned,
            "with a gradient": plain.clone().requires_grad_(),
            "flat": plain.reshape(-1),
        }
        for how, same in ways.items():
            assert fingerprint([same]) == wanted, how
            assert fingerprint([same, plain]) == fingerprint([plain, plain]), how
        assert fingerprint([plain.t()]) != wanted, "another order of the elements"
    image = torch.randn(2, 3, 100, 101)
    last = image.contiguous(memory_format=torch.channels_last)
    assert fingerprint([last]) == fingerprint([image])


def test_edit_of_a_strided_view_changes_the_fingerprint() -> None:
    base = torch.zeros(400, 400)
    view = base[:, ::2]
    before = fingerprint([view])
    base[399, 398] = 1.0
    assert fingerprint([view]) != before
    before = fingerprint([view])
    base[0, 1] = 1.0
    assert fingerprint([view]) == before, "not in the view"


def test_empty_tensors_and_none_at_all() -> None:
    empty, some = torch.empty(0), made(24, torch.float32)
    assert fingerprint([]) == fingerprint([empty]) == fingerprint([empty, torch.empty(3, 0)])
    assert fingerprint([empty, some]) == fingerprint([some]) == fingerprint([some, empty])
    assert len(fingerprint([])) == len(fingerprint([some])) == 16
    assert fingerprint([torch.tensor(1.0)]) != fingerprint([torch.tensor(2.0)])


# --- when it is due -------------------------------------------------------------------------------


class Work:
    """A fingerprint that takes a given time, by the clock that the checks read."""

    def __init__(self) -> None:
        self.cost_s = 0.0
        self.calls = 0

    def fingerprint(self) -> str:
        self.calls += 1
        end = time.monotonic() + self.cost_s
        while time.monotonic() < end:
            pass
        return f"{self.calls:016x}"


def steps_with_a_digest(checks: EqualityChecks, steps: Iterable[int]) -> list[int]:
    """Return the steps with a digest; each step is committed."""
    taken = []
    for step in steps:
        if checks.digest(step) is not None:
            taken.append(step)
        checks.committed()
    return taken


@pytest.mark.parametrize("every", [1, 4])
def test_fixed_interval_is_kept_at_any_cost(every: int) -> None:
    work = Work()
    work.cost_s = 0.001
    checks = EqualityChecks(work.fingerprint, every)
    assert steps_with_a_digest(checks, range(9)) == list(range(0, 9, every))
    assert checks.every == every
    assert work.calls == len(range(0, 9, every)), "it is computed only when it is due"


def test_replay_of_a_due_step_is_due_although_the_interval_has_grown() -> None:
    work = Work()
    work.cost_s = 0.1
    checks = EqualityChecks(work.fingerprint, None)
    assert steps_with_a_digest(checks, [15, 16, 16, 32]) == [16, 16]
    assert checks.every == 1024


def test_never_is_never() -> None:
    work = Work()
    assert steps_with_a_digest(EqualityChecks(work.fingerprint, 0), range(40)) == []
    assert work.calls == 0


@pytest.mark.parametrize("every", [3, -1, -2, 12])
def test_an_interval_that_ranks_could_not_share_is_refused(every: int) -> None:
    with pytest.raises(FftError, match="power of 2"):
        EqualityChecks(Work().fingerprint, every)


def test_the_interval_follows_the_measured_cost_up_and_down() -> None:
    work = Work()
    work.cost_s = 0.1  # far more than the steps, which do nothing
    checks = EqualityChecks(work.fingerprint, None)
    assert steps_with_a_digest(checks, range(1025)) == [0, 16, 1024]
    assert checks.every == 1024
    work.cost_s = 0.0
    for attempt in range(2, 22):  # a machine under load may take long even for nothing
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass
        assert steps_with_a_digest(checks, [1024 * attempt]) == [1024 * attempt]
        if checks.every <= 8:
            return
    raise AssertionError(f"the interval stays {checks.every} although it costs nothing")


@pytest.mark.parametrize(
    ("cost_s", "every"),
    [(0.0, 1), (0.01, 1), (0.011, 2), (0.02, 2), (0.021, 4), (0.5, 64), (10.2, 1024), (99.0, 1024)],
)
def test_the_interval_is_the_shortest_that_takes_a_hundredth(cost_s: float, every: int) -> None:
    """The steps take about a second by given numbers, not by a clock (99.5 % to avoid rounding)."""
    checks = EqualityChecks(Work().fingerprint, None)
    for before in (0.0, 99.0):  # first down from 16 or up; then back from the longest
        begun = checks._since
        for _ in range(8):
            checks.committed()
        checks._adapt(begun + 8 * 1.005, before or cost_s)
        assert checks.every == (1024 if before else every)
    begun = checks._since
    for _ in range(4):
        checks.committed()
    checks._adapt(begun + 4 * 1.005, cost_s)
    assert checks.every == every, "what was before does not count, the cost of the check neither"


def test_interval_counts_the_fingerprint_of_the_gradients() -> None:
    checks = EqualityChecks(Work().fingerprint, None)
    checks._gradients_s = 0.04
    for _ in range(8):
        checks.committed()
    checks._adapt(checks._since + 8 * 1.005, 0.0)
    assert checks.every == 4


def test_fingerprint_covers_indices_and_values_of_sparse_gradients() -> None:
    dense = torch.zeros(8, 4)
    dense[3] = torch.arange(4.0) + 1
    moved, changed = dense.roll(1, 0), dense.clone()
    changed[3, 2] = 9.0
    found = {fingerprint([each.to_sparse()]) for each in (dense, moved, changed)}
    assert len(found) == 3
    assert fingerprint([dense.to_sparse()]) == fingerprint([dense.clone().to_sparse()])


def test_nothing_is_learnt_before_the_first_commit() -> None:
    work = Work()
    checks = EqualityChecks(work.fingerprint, None)
    assert checks.digest(0) and checks.digest(0)  # the same step again, after a rollback
    assert checks.every == 16

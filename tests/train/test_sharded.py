"""Tests of loaders over a share of the data: counts, published states, restores and refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fft
from fft.errors import DataError, UnequalData
from fft.messages.effects import StartTxn
from fft.messages.protocol import Token
from fft.protocol.invariants import Finding
from fft.trace.inputs import Given, Inputs, Items, Owed, judge_shards, told_of_ids
from fft.train.data import retries, sharded
from fft.train.data.digests import ids_of
from fft.train.data.sharded import ShardedInputs, ShardedSource, ShardStateStore


class Share:
    """A data set whose item n of the shard of ``group`` is ``100 * group + n``."""

    def __init__(self, group: int, end: int = 50, restores: bool = True) -> None:
        self.group, self.end, self.restores = group, end, restores
        self.position = self.drawn = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < self.end:
            self.position += 1
            self.drawn += 1
            yield torch.tensor(100 * self.group + self.position - 1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"] + (not self.restores)


class Job:
    """Sources of several ranks that share a shelf, and commit together."""

    def __init__(self, kind: str = "group", ranks: int = 1) -> None:
        self.kind, self.ranks, self.step = kind, ranks, 0
        self.shelf: dict[str, bytes] = {}
        self.consumed: list[int] = []

    def source(self, group: int, rank: int = 0, loader: Any = None) -> ShardedSource:
        shelf = ShardStateStore(self.shelf.get, self.shelf.__setitem__)
        loader = loader or Share(group + 10 * rank if self.kind == "rank" else group)
        return ShardedSource(loader, self.kind, str(group), rank, self.ranks, shelf)  # type: ignore[arg-type]

    def plan(self, source: ShardedSource, groups: str) -> StartTxn:
        mine = source.shard[0]
        index = groups.index(mine) if mine in groups else None
        members = tuple(groups) if mine in groups else (*groups, mine)
        start = Token(1, 1), self.step, "lineage", 0, index, len(groups), members, 0
        return StartTxn(*start, contributors=tuple(groups))

    def txn(self, groups: str, sources: list[ShardedSource], commits: bool = True) -> list[int]:
        taken = []
        for source in sources:
            plan = self.plan(source, groups)
            drawn = ShardedInputs(source).draw(plan)
            assert drawn is not None and drawn.shard == source.shard
            if plan.index is not None:
                taken.append(int(drawn.batch))
            if commits:
                source.committed(plan)
        if commits:
            self.step += 1
            self.consumed += taken
        return taken


def test_each_group_takes_the_items_of_its_shard_once() -> None:
    job = Job(ranks=2)
    sources = [job.source(group, rank) for group in (0, 1) for rank in (0, 1)]
    assert job.txn("01", sources, commits=False) == [0, 1, 100, 101]
    assert job.txn("01", sources) == [0, 1, 100, 101], "a replay has the same batches"
    assert job.txn("01", sources) == [2, 3, 102, 103]
    assert job.txn("0", sources[:2]) == [4, 5], "group 1 is away, and its shard waits"
    for source in sources[2:]:
        source.load(sources[0].export(0), 0)
    assert job.txn("01", sources) == [6, 7, 104, 105]


def test_member_without_a_contribution_does_not_consume_its_shard() -> None:
    job = Job()
    sources = [job.source(0), job.source(1)]
    job.txn("01", sources)
    learning = job.plan(sources[1], "0")
    assert learning.members == ("0", "1") and learning.contributors == ("0",)
    for source in sources:
        source.committed(learning)
        assert source.positions == {"0": 2, "1": 1}
    job.step += 1
    assert job.txn("01", sources) == [2, 101]


def test_each_rank_takes_the_items_of_its_own_shard() -> None:
    job = Job("rank", ranks=2)
    sources = [job.source(0, rank) for rank in (0, 1)]
    assert [job.txn("0", sources) for _ in range(2)] == [[0, 1000], [1, 1001]]


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("kind", ["group", "rank"])
def test_a_process_that_comes_back_continues_its_shard(
    kind: str, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(kind)
    sources = [job.source(0), job.source(1)]
    for _ in range(5):
        job.txn("01", sources)
    monkeypatch.setattr(sharded, "PUBLISH_S", 0.0)
    job.txn("01", sources)
    monkeypatch.setattr(sharded, "PUBLISH_S", 1e9)
    job.txn("01", sources)
    job.txn("0", sources[:1])  # group 1 has died
    if not published:
        job.shelf.clear()
    loader = Share(1)
    back = job.source(1, loader=loader)
    back.load(sources[0].export(0), 0)
    assert loader.drawn == (2 if published else 7), "from the newest state on, and no item more"
    for _ in range(3):
        job.txn("01", [sources[0], back])
    assert sorted(job.consumed) == [*range(11), *range(100, 110)]


class Fails(Share):
    """A share whose item 3 cannot be read the first ``times`` times."""

    def __init__(self, times: int) -> None:
        super().__init__(1)
        self.left = times

    def __iter__(self) -> Iterator[torch.Tensor]:
        for item in super().__iter__():
            if item == 103 and self.left > 0:
                self.left -= 1
                raise ValueError("not now")
            yield item


@pytest.mark.parametrize("times", [1, 3])
def test_error_while_items_are_skipped_leaves_the_shard_usable(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One further attempt follows each error, and load() can be called again."""
    monkeypatch.setattr(retries, "PAUSES_OF_OTHERS_S", (0.0,))
    job = Job()
    sources = [job.source(0), job.source(1)]
    for _ in range(5):
        job.txn("01", sources)
    job.shelf.clear()
    back = job.source(1, loader=Fails(times))
    if times == 3:
        with pytest.raises(ValueError, match="not now") as caught:
            back.load(sources[0].export(0), 0)
        assert caught.value.fft_item == "item 3 of shard 1"  # type: ignore[attr-defined]
    back.load(sources[0].export(0), 0)
    assert job.txn("01", [sources[0], back]) == [5, 105]


def test_unreadable_item_of_a_shard_is_named_when_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retries, "PAUSES_OF_OTHERS_S", (0.0,))
    job = Job()
    sources = [job.source(0), job.source(1, loader=Fails(99))]
    assert [job.txn("01", sources) for _ in range(3)][-1] == [2, 102]
    with pytest.raises(ValueError, match="not now") as caught:
        job.txn("01", sources)
    assert caught.value.fft_item == "item 3 of shard 1"  # type: ignore[attr-defined]


def test_rank_that_fetches_the_state_keeps_its_drawn_items() -> None:
    job = Job()
    sources = [job.source(0), job.source(1)]
    job.txn("01", sources)
    sources[1].draw(job.plan(sources[1], "01"))
    sources[0].draw(job.plan(sources[0], "01"))
    sources[0].committed(job.plan(sources[0], "01"))  # group 1's update failed
    job.shelf.clear()
    sources[1].load(sources[0].export(0), 0)
    assert job.txn("01", sources) == [2, 102]


def test_a_state_beyond_the_commits_of_its_group_is_not_used() -> None:
    job = Job()
    sources = [job.source(0), job.source(1)]
    job.txn("01", sources)
    early = sources[0].export(0)
    sources[1]._published_at = -1e9
    job.txn("01", sources)
    sources[1]._published_at = -1e9
    job.txn("01", sources)
    back = job.source(1)
    back.load(early, 0)
    assert job.txn("1", [back]) == [101]


def test_shard_with_an_unrestored_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "PUBLISH_S", 0.0)
    job = Job()
    sources = [job.source(0), job.source(1)]
    for _ in range(3):
        job.txn("01", sources)
    back = job.source(1, loader=Share(1, restores=False))
    with pytest.raises(UnequalData, match="does not continue with the same items"):
        back.load(sources[0].export(0), 0)


def resumed(job: Job, groups: str, saved: Any) -> list[ShardedSource]:
    found = [job.source(int(group)) for group in groups]
    for source in found:
        source.resume(saved, 0)
    return found


def test_a_checkpoint_has_the_states_of_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    sources = [job.source(0), job.source(1)]
    for _ in range(4):
        job.txn("01", sources)
    saved = sources[0].export_all()
    assert saved["positions"] == {"0": 4, "1": 4} and set(saved["states"]) == {"0", "1"}
    later = Job()
    assert later.txn("01", resumed(later, "01", saved)) == [4, 104]


@pytest.mark.parametrize(
    ("groups", "words"), [("0", "begins without 1, whose data"), ("012", "this is group '2'")]
)
def test_a_checkpoint_is_not_resumed_with_other_groups(groups: str, words: str) -> None:
    job = Job()
    sources = [job.source(0), job.source(1)]
    job.txn("01", sources)
    later = Job()
    with pytest.raises(DataError, match=f"{words}.* cannot be redistributed: resume with"):
        later.txn(groups, resumed(later, groups, sources[0].export_all()))


def test_a_state_of_data_that_are_divided_otherwise_is_refused() -> None:
    source = Job().source(0)
    with pytest.raises(DataError, match="comes from a loader that is not sharded"):
        source.load({"loader_state": 1, "next_digests": []}, 0)
    with pytest.raises(DataError, match="comes from sharded='rank'"):
        source.load(Job("rank").source(0).export(0), 0)
    with pytest.raises(
        DataError, match="from groups that take 2 items in a step, and this group takes 1"
    ):
        source.load(Job(ranks=2).source(0).export(0), 0)


def test_loaders_that_cannot_be_shards_are_refused() -> None:
    with pytest.raises(DataError, match="has no state_dict and load_state_dict"):
        fft.Loader([1, 2], sharded="group")
    with pytest.raises(DataError, match="divides the data among the groups itself"):
        fft.Loader(fft.CursorLoader([1, 2], 1), sharded="group")
    with pytest.raises(DataError, match="expected 'group' or 'rank'"):
        fft.Loader(Share(0), sharded="node")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="pass all settings to one of them"):
        fft.Loader(fft.Loader(Share(0), sharded="group"), replay_only=True)


def test_the_last_item_of_a_shard_is_known() -> None:
    job = Job()
    source = job.source(0, loader=Share(0, end=2))
    ends = []
    while (drawn := ShardedInputs(source).draw(job.plan(source, "0"))) is not None:
        ends.append(drawn.is_last)
        source.committed(job.plan(source, "0"))
    assert ends == [False, True]


def test_shards_that_are_not_consumed_alike_are_named(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    sources = [job.source(0), job.source(1)]
    job.txn("01", sources)
    job.txn("0", sources[:1])
    sources[0].close()
    assert "different parts of their shards (slices by group: 0: 2, 1: 1): group 1" in caplog.text
    assert "unequal lengths" not in caplog.text


def test_source_names_a_shard_that_is_shorter_than_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    sources = [job.source(0), job.source(1, loader=Share(1, end=1)), job.source(2)]
    job.txn("012", sources)
    job.txn("02", [sources[0], sources[2]])
    job.txn("0", sources[:1])
    sources[0].close()
    expected = "(slices by group: 0: 3, 1: 1, 2: 2): group"
    assert f"the shards have unequal lengths {expected} 1 had no more data" in caplog.text
    assert f"different parts of their shards {expected} 2 was absent" in caplog.text


def test_audit_names_doubled_and_missing_samples() -> None:
    given = Given()
    assert told_of_ids(given) == []
    given.ids.update([0, 1, 2, 3, 3, 5, 9])
    assert told_of_ids(given) == [
        "6 different samples were consumed, each at least 1 times",
        "1 samples were consumed more often: ids 3",
        "4 samples of the ids 0 to 9 were never consumed: ids 4, 6, 7, 8",
    ]
    given.ids = Counter({"a": 2, "b": 2})
    assert told_of_ids(given) == ["2 different samples were consumed, each at least 2 times"]


def _owed(rank: int, samples: str) -> Owed:
    """The notes that rank ``rank`` of two owes."""
    config = {"leases": None, "flow": [], "world": 2, "me": ["0", rank]}
    spec = {"parameter_groups": {"model": {"samples": samples}}}
    return Owed({"config": config, "spec": spec, "start": {"step": 0, "cursor": 0}})


def _note(slice_: int | None, ids: list[int] | None) -> dict[str, Any]:
    data: dict[str, Any] = {"token": [1, 1], "slice": slice_, "item": 0}
    return {"note": "consumed", "data": data if ids is None else data | {"ids": ids}}


def test_audit_does_not_judge_missing_samples_beyond_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fft.trace.inputs.MOST_IDS", 4)
    given = Given()
    inputs = Inputs(Finding("inputs"), given, _owed(0, "per_rank"), "0", "trace")
    inputs.note("line 1", _note(0, [0, 1, 9]))
    assert not given.is_cut and "7 samples of the ids 0 to 9" in told_of_ids(given)[1]
    inputs.note("line 2", _note(1, [2, 3, 1]))
    assert told_of_ids(given) == [
        "more than 4 different samples were consumed, each at least 1 times",
        "1 samples were consumed more often: ids 1",
        "only 4 samples were counted; missing samples are not judged",
    ]


@pytest.mark.parametrize(("samples", "unnamed"), [("per_rank", 2), ("shared", 1)])
def test_audit_judges_no_samples_if_a_batch_has_no_ids(samples: str, unnamed: int) -> None:
    given = Given()
    for rank in (0, 1):
        owed = _owed(rank, samples)
        inputs = Inputs(Finding("inputs"), given, owed, "0", f"trace {rank}")
        inputs.note("line 1", _note(0, [0, 4]))
        inputs.note("line 2", _note(None, None))
        inputs.note("line 3", _note(1, None))
    assert told_of_ids(given) == [
        f"the traces name 2 different samples and have no ids of {unnamed} batches; doubled and "
        "missing samples are not judged"
    ]


def test_ids_of_a_batch_are_traced_where_they_are_a_list() -> None:
    source = Job().source(0)
    assert source.ids(torch.tensor([1])) is None, "the user has not said what identifies a batch"
    for identity, ids in (
        (torch.tensor([[1, 2]]), [1, 2]),
        (7, [7]),
        (["a", "b"], ["a", "b"]),
        ([torch.tensor(3)], [3]),
        (torch.tensor([0.5]), None),
        ({"x": 1}, None),
        (torch.zeros(5000, dtype=torch.int64), None),
    ):
        assert ids_of(identity) == ids


def test_audit_finds_slices_of_a_shard_that_are_left_out_or_doubled() -> None:
    items = Items()
    assert all(items.add(n) for n in (3, 1, 2, 0, 7, 5)) and not items.add(2)
    assert items.ranges == [range(4), range(5, 6), range(7, 8)] and items.missing() == [4, 6]
    given, finding = Given(), Finding("inputs")
    given.shards[("1", 0)] = items
    items.traces = {"one", "other", "third"}
    assert judge_shards(finding, given) == ["slices 0 to 7 of shard 1 were consumed"]
    assert finding.violation is None, "each of two kills may have cost a note"
    items.traces = {"one", "other"}
    judge_shards(finding, given)
    assert finding.violation is not None and "2 slices without a note" in finding.violation

"""Judge the data that committed txns were computed on, by the notes of the ranks. Pure.

A ``loop`` note states the txn from which a process runs its txns in FFT's own loop or in torchft's.
The notes that are required for a txn that a process applies, and that counts for it, depend on the
loop and on the job. FFT's own loop owes a ``consumed`` note, and a stage that takes the entries of
another owes an ``entry`` note. Jobs with such stages, and jobs whose groups commit local steps,
have no other loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, pairwise
from typing import Any, NamedTuple

from fft.messages.effects import StartTxn
from fft.messages.protocol import Applied, ApplyFailed, Token
from fft.protocol.flow import has_left_well
from fft.protocol.invariants import Claim, Finding, Move, Same
from fft.protocol.state import Local

MOST_IDS = 1_000_000
"""Maximum number of different samples that are counted."""
_NAMED = 5
"""Maximum number of samples that a text names."""
LOOP = "loop"
CONSUMED = "consumed"
ENTRY = "entry"
MADE_ANEW = "entry_made_anew"
RESTORED = "entry_restored"
"""Note of an entry that was restored from a checkpoint."""
TRANSACTIONS, TORCHFT = "transactions", "torchft"
"""The loops: ``manager.transactions``, and ``start_quorum`` with ``should_commit``."""

Weigh = Callable[[Finding, Claim, str], None]


class _Told(NamedTuple):
    """A note and its place."""

    name: str
    data: Mapping[str, Any]
    token: Token
    place: str


def batches_of(head: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Return the number of data items that the ranks of a group take in a step, which of them the
    rank with this header takes, and whether it is the first rank that takes that item."""
    world, rank = head["config"]["world"], head["config"]["me"][1]
    samples = next(iter(head["spec"]["parameter_groups"].values()))["samples"]
    # earlier versions did not trace them
    default = (world, rank, True) if samples == "per_rank" else (1, 0, rank == 0)
    count, number, is_first = head.get("batches", default)
    return count, number, is_first


class Owed:
    """The notes that a process owes, by its trace's header: the kind of its job, and its rank."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        config = head["config"]
        self.is_periodic = bool(config["leases"])
        self.takes = any(not other["ahead"] for other in config["flow"])
        """Whether it takes entries of the stage before."""
        self.only_loop = TRANSACTIONS if self.is_periodic or config["flow"] else ""
        """The only loop that the job can have; empty if it can have both."""
        self.items, self._item, self.is_first = batches_of(head)
        """Number of data items that the ranks of a group take in a step, which of them this rank
        takes, and whether it is the first rank that takes that item."""
        self.begins_at = head["start"]["step"], head["start"]["cursor"]
        self.rank = config["me"][1]

    def item(self, number: int) -> int:
        """Return the data item that this rank takes from slice ``number``."""
        return number * self.items + self._item


class Runs:
    """Pairs (version, slice) in the order of arrival, stored as runs of equal strides."""

    def __init__(self) -> None:
        self._runs: list[list[int]] = []
        """For each run: its first version and slice, their strides, and its length."""
        self._at = 0
        """Index of the run that contained the last pair looked up."""

    def add(self, version: int, number: int) -> None:
        """Append a pair; a pair that repeats the last one is dropped."""
        if self._runs:
            run = self._runs[-1]
            count = run[4]
            if (version, number) == _nth(run, count - 1):
                return
            if count == 1:
                run[2:4] = version - run[0], number - run[1]
            if (version, number) == _nth(run, count):
                run[4] += 1
                return
        self._runs.append([version, number, 0, 0, 1])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for run in self._runs:
            yield from (_nth(run, k) for k in range(run[4]))

    def __contains__(self, pair: tuple[int, int]) -> bool:
        for k in range(len(self._runs)):
            at = (self._at + k) % len(self._runs)
            if _has(self._runs[at], *pair):
                self._at = at
                return True
        return False


def _nth(run: list[int], k: int) -> tuple[int, int]:
    return run[0] + k * run[2], run[1] + k * run[3]


def _has(run: list[int], version: int, number: int) -> bool:
    stride, far = (run[2], version - run[0]) if run[2] else (run[3], number - run[1])
    k = far // stride if stride else 0
    return 0 <= k < run[4] and _nth(run, k) == (version, number)


class Given:
    """Entries of one scope: those it gave to the next scope and took from the one before."""

    def __init__(self) -> None:
        self.offered: dict[str, list[Runs]] = {}
        """Group → for each of its processes, the computed entries and the recomputed or restored
        ones."""
        self.ids: Counter[int | str] = Counter()
        """Number of times that each sample was consumed, as far as ids are traced."""
        self.is_cut = False
        """Whether ``ids`` omits samples beyond `MOST_IDS`."""
        self.unnamed = 0
        """Number of consumed batches whose ids are not in the traces."""
        self.shards: dict[tuple[str, int], Items] = {}
        """(shard, rank) → the consumed slices of the shard, counted from its beginning."""
        self.taken: dict[tuple[str, str], Runs] = {}
        """(group, trace) → the entries that the applied txns were computed on."""

    def count_ids(self, ids: list[int | str] | None, owed: Owed) -> None:
        """Count the samples of a batch that a rank consumed.

        Ranks that take the same samples count once.

        Args:
            ids: The ids in the note of the batch, or None if it has none.
            owed: The notes that the process of the rank owes.
        """
        if not owed.is_first:
            return
        if ids is None:
            self.unnamed += 1
            return
        for each in ids:
            if each in self.ids or len(self.ids) < MOST_IDS:
                self.ids[each] += 1
            else:
                self.is_cut = True


def _holds(local: Local) -> bool:
    """Whether it has the state that its epoch begins with and fetches none; an epoch may be formed
    while an entry is being recomputed."""
    return local.epoch is not None and local.lineage == local.epoch.lineage


class Inputs:
    """Check of the notes of one process, with its moves, in the order of its trace.

    Args:
        finding: The finding on these checks: each txn has the notes that are owed for it, once and
            for its slice, and recomputed entries use the weights of the job.
        given: Receives the entries that this process gives and takes.
        owed: The notes that it owes; None if that is unknown or judged elsewhere.
        group: Group of the process.
        name: Name of its trace.
    """

    def __init__(
        self, finding: Finding, given: Given, owed: Owed | None, group: str, name: str
    ) -> None:
        self.finding, self._given, self._owed = finding, given, owed
        self._group, self._name = group, name
        self._computed, self._anew = Runs(), Runs()
        given.offered.setdefault(group, []).extend((self._computed, self._anew))
        self._local: Local | None = None
        """The state after the last move."""
        self._plan: StartTxn | None = None
        self._loops: list[tuple[Token, str]] = []
        """(first txn, loop) for the loop of the present txn and of later ones."""
        self._told: list[_Told] = []

    def note(self, place: str, line: Mapping[str, Any]) -> None:
        """Take one note and its place."""
        name, data = line["note"], line["data"]
        if name == MADE_ANEW:
            self._make_anew(data["slice"], data["version"], place)
        elif name == RESTORED:
            self._restore(data["slice"], data["version"], place)
        elif name == LOOP:
            self._loops.append((Token(*data["from"]), data["runs"]))
        elif name in (CONSUMED, ENTRY):
            self._told.append(_Told(name, data, Token(*data["token"]), place))
            if name == CONSUMED and data["slice"] is not None and self._owed is not None:
                self._given.count_ids(data.get("ids"), self._owed)
            if "shard" in data and data["slice"] is not None and self._owed is not None:
                self._take(data["shard"], data["item"], self._owed.rank, place)

    def move(self, move: Move, weigh: Weigh) -> None:
        """Take one move. ``weigh`` gets the facts that must be equal in all ranks' traces."""
        event, self._local = move.event, move.after
        is_live = move.before.vote is not None and move.before.vote.manifest.block
        if isinstance(event, Applied | ApplyFailed) and move.out.verdict == "row" and not is_live:
            self._judge(event.token, move.place, weigh)
        for effect in move.out.effects:
            if isinstance(effect, StartTxn):
                self._plan = effect
                self._told = [t for t in self._told if t.token >= effect.token]
                if (number := effect.slice) is not None:
                    self._computed.add(effect.step, number)

    def _make_anew(self, number: int, version: int, place: str) -> None:
        local, state, is_right = self._local, "without the state of the job", False
        if local is not None and (local.healed or has_left_well(local) or _holds(local)):
            state = f"at step {local.step}"
            # 1: the engine has not been notified of the newest step yet
            is_right = version - local.step in (0, 1)
        text = (
            f"the entry of slice {number} was made anew with version {version}, by a rank {state}"
        )
        self.finding.expect(is_right, text, place)
        self._anew.add(version, number)

    def _restore(self, number: int, version: int, place: str) -> None:
        if self._owed is not None:
            step, cursor = self._owed.begins_at
            text = (
                f"the entry of slice {number} with version {version} is said to be from the "
                f"checkpoint, and this rank begins at step {step}, slice {cursor}"
            )
            self.finding.expect(number < cursor and version <= step, text, place)
        self._anew.add(version, number)

    def _judge(self, token: Token, place: str, weigh: Weigh) -> None:
        """Judge a txn that this process computed and now applies."""
        plan, owed = self._plan, self._owed
        if plan is None or plan.token != token or owed is None:
            return
        if (number := plan.slice) is None:
            self._judge_uncounted(token)
            return
        loop = self._loop_of(token)
        text = f"txn {token} took slice {number} here, and was committed; "
        said = f"the loop {loop!r} has run it" if loop else "no note names the loop that ran it"
        is_loop = loop == owed.only_loop if owed.only_loop else loop in (TRANSACTIONS, TORCHFT)
        need = f", and its job has only the loop {owed.only_loop!r}" if owed.only_loop else ""
        self.finding.expect(is_loop, text + said + need, place)
        alike = f"{text}{said}, and on another rank it was {{was}}"
        weigh(self.finding, Same(("loop", token), loop or "none", alike), place)
        for name, is_owed in ((CONSUMED, True), (ENTRY, owed.takes)):
            told = [t for t in self._told if t.name == name and t.token == token]
            wanted = int(is_owed and (owed.only_loop or loop) == TRANSACTIONS)
            has = f"{text}the trace has {len(told)} notes {name!r} of it"
            has += "" if wanted else f", and owes none ({said})"
            self.finding.expect(len(told) == wanted, has, place)
            for each in told:
                self._judge_note(each, plan, owed, text)

    def _loop_of(self, token: Token) -> str:
        """Return the loop that ran the txn, by the notes; empty if no note states it."""
        while len(self._loops) > 1 and self._loops[1][0] <= token:
            del self._loops[0]
        begun = bool(self._loops) and self._loops[0][0] <= token
        return self._loops[0][1] if begun else ""

    def _judge_uncounted(self, token: Token) -> None:
        """Judge an applied txn in which this process was a spare or fetched its state."""
        for told in (t for t in self._told if t.name == CONSUMED and t.token == token):
            text = (
                f"txn {token} took no slice here, and the trace has a note {CONSUMED!r} of slice "
            )
            self.finding.expect(
                told.data["slice"] is None, f"{text}{told.data['slice']}", told.place
            )

    def _judge_note(self, told: _Told, plan: StartTxn, owed: Owed, text: str) -> None:
        name, data, place, number = told.name, told.data, told.place, plan.slice
        assert number is not None, "the txn counts"
        of = f"{text}the trace has a note {name!r} of slice {data['slice']}"
        self.finding.expect(data["slice"] == number, of, place)
        if plan.fixed_slices:
            taken, items = list(plan.slices), [owed.item(n) for n in plan.slices]
            found = f"slices {data.get('slices')} with items {data.get('items')}"
            of = f"{text}the note {name!r} has {found}, and not {taken} with {items}"
            is_right = (data.get("slices"), data.get("items")) == (taken, items)
            self.finding.expect(is_right, of, place)
        if name == ENTRY:
            at = (self._group, self._name)
            self._given.taken.setdefault(at, Runs()).add(data["version"], number)
        elif not owed.is_periodic and "shard" not in data:
            item, due = data.get("item"), owed.item(number)
            has = f"{text}this rank has item {item} of the data in it, and not {due}"
            self.finding.expect(item == due, has, place)

    def _take(self, shard: str, item: int, rank: int, place: str) -> None:
        """Record that a txn of the rank consumed a slice of a shard."""
        items = self._given.shards.setdefault((shard, rank), Items())
        items.traces.add(self._name)
        text = f"slice {item} of shard {shard} is consumed by rank {rank} in two txns"
        self.finding.expect(items.add(item), text, place)


class Items:
    """Numbers of consumed items, stored as ranges."""

    def __init__(self) -> None:
        self.ranges: list[range] = []
        """Disjoint ranges, in ascending order."""
        self.traces: set[str] = set()
        """Names of the traces that contain the items."""

    def add(self, item: int) -> bool:
        """Add an item. Returns whether it is new."""
        if any(item in each for each in self.ranges):
            return False
        kept = [r for r in self.ranges if item not in (r.start - 1, r.stop)]
        start, stop = item, item + 1
        for near in self.ranges:
            if near not in kept:
                start, stop = min(start, near.start), max(stop, near.stop)
        self.ranges = sorted([*kept, range(start, stop)], key=lambda r: r.start)
        return True

    def missing(self) -> list[int]:
        """Return the missing items between the first and the last one."""
        pairs = zip(self.ranges, self.ranges[1:], strict=False)
        return [number for one, other in pairs for number in range(one.stop, other.start)]


def judge_shards(finding: Finding, given: Given) -> list[str]:
    """Check that no slice of a shard was skipped, and return a sentence for each shard.

    A process that is killed between a commit and its note leaves one slice without a note.
    """
    told: dict[str, str] = {}
    for (shard, rank), items in sorted(given.shards.items()):
        missing = items.missing()
        text = (
            f"rank {rank} of shard {shard} has {len(missing)} slices without a note, the first "
            f"are {missing[:5]}, and {len(items.traces)} processes have traced it"
        )
        finding.expect(len(missing) < len(items.traces), text, f"shard {shard}")
        first, last = items.ranges[0].start, items.ranges[-1].stop - 1
        told[shard] = f"slices {first} to {last} of shard {shard} were consumed"
    return list(told.values())


def told_of_ids(given: Given) -> list[str]:
    """Return sentences on the samples by their ids: how many were consumed, and which unequally.

    Data that are read in several data epochs contain each sample equally often. So a sample is
    doubled if it was consumed more often than the rarest one. A sample with a consecutive number is
    missing if it was not consumed at all. If the traces lack the ids of a batch, neither is judged;
    if there are more than `MOST_IDS` samples, missing ones are not judged.
    """
    ids = given.ids
    if not ids:
        return []
    if given.unnamed:
        return [
            f"the traces name {len(ids)} different samples and have no ids of {given.unnamed} "
            "batches; doubled and missing samples are not judged"
        ]
    least = min(ids.values())
    doubled = sorted((i for i, n in ids.items() if n > least), key=str)
    limit = "more than " if given.is_cut else ""
    told = [f"{limit}{len(ids)} different samples were consumed, each at least {least} times"]
    if doubled:
        told.append(f"{len(doubled)} samples were consumed more often: ids {_first(doubled)}")
    if given.is_cut:
        told.append(f"only {len(ids)} samples were counted; missing samples are not judged")
        return told
    numbers = sorted(i for i in ids if isinstance(i, int))
    if numbers and (missing := numbers[-1] - numbers[0] + 1 - len(numbers)):
        gaps = (n for one, other in pairwise(numbers) for n in range(one + 1, other))
        absent = _first(list(islice(gaps, _NAMED + 1)))
        told.append(
            f"{missing} samples of the ids {numbers[0]} to {numbers[-1]} were never consumed: "
            f"ids {absent}"
        )
    return told


def _first(ids: list[Any]) -> str:
    more = ", …" if len(ids) > _NAMED else ""
    return ", ".join(map(str, ids[:_NAMED])) + more

"""Tests of how the protocol scales with the job: the model over the shipped engine, and closed
forms."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.scale_model.costs import NEXT, SHIPPED, Costs, Design, Handling, Prices, prices_from
from benchmarks.scale_model.formula import PhaseName, counts
from benchmarks.scale_model.job import LargeJob, Phase, Stalled
from fft.protocol.load import load_spec

SPEC = load_spec("hsdp")
KINDS = ["add", "append", "compare_set", "delete", "set", "push", "pop", "hear", "wait_pop"]
COSTS = Costs(
    Prices(dict.fromkeys(KINDS, 10e-6), byte_in=2e-9, byte_out=1e-9, hop=20e-6),
    Handling({"other": (100e-6, 0.0)}),
)


def job(
    design: Design, groups: int, ranks: int = 2, seed: int = 1, formed: bool = True
) -> LargeJob:
    return LargeJob(SPEC, design, COSTS, groups, ranks, seed, formed)


def phases(design: Design, groups: int, ranks: int = 2, seed: int = 1) -> dict[str, Phase]:
    """Return the cost of one phase of each kind; the step is one that follows other steps."""
    made = job(design, groups, ranks, seed)
    made.step()
    step, rollback, _, kill = made.step(), made.rollback(), made.step(), made.kill()
    return {p.name: p for p in (step, rollback, kill)}


@pytest.mark.parametrize("design", [SHIPPED, NEXT], ids=lambda d: d.name)
@pytest.mark.parametrize(("groups", "ranks"), [(2, 1), (2, 2), (3, 4), (5, 8), (10, 2)])
def test_requests_match_the_closed_form(design: Design, groups: int, ranks: int) -> None:
    found = phases(design, groups, ranks)
    names: tuple[PhaseName, ...] = ("step", "rollback", "kill")
    for name in names:
        left = groups - (name == "kill")
        assert Counter(found[name].operations) == counts(design, name, left, ranks), name


def test_every_listener_receives_each_message() -> None:
    found = phases(SHIPPED, 4, 2)
    assert found["step"].heard == 8  # the commit, received by every rank
    assert found["rollback"].heard == 3 * 8 + 2 * 7  # abort, epoch, begin; and 7 send to one, twice
    found = phases(NEXT, 4, 2)
    assert found["step"].heard == 4  # one rank of each group, at the job's store
    # votes and their reads, an old slot; forwarded, received
    assert found["step"].group_operations == 4 * (3 * 2 + 3 + 1 + 1)


@pytest.mark.parametrize("design", [SHIPPED, NEXT], ids=lambda d: d.name)
def test_equal_seed_gives_an_equal_run(design: Design) -> None:
    assert phases(design, 4, 2, seed=7) == phases(design, 4, 2, seed=7)


def test_another_seed_strikes_another_group() -> None:
    def lost(seed: int) -> set[str]:
        made = job(SHIPPED, 6, 1, seed)
        groups = {n.peer.group for n in made.nodes}
        made.kill()
        return groups - {n.peer.group for n in made.nodes}

    assert len(set.union(*(lost(seed) for seed in range(6)))) > 1


def test_requests_of_one_participant_do_not_grow_with_the_job() -> None:
    small, large = phases(SHIPPED, 4, 4), phases(SHIPPED, 16, 4)
    for name in ("step", "rollback"):
        few, many = (p[name].total() / p[name].participants for p in (small, large))
        assert many <= few, f"{name}: {few} requests for each of 16, {many} for each of 64"
    # All ranks receive a death, and each of them proposes ABORT: more of each, independent of n.
    few, many = (p["kill"].total() / p["kill"].participants for p in (small, large))
    assert many <= few * 1.1


@pytest.mark.long
def test_bytes_per_participant_grow_only_where_lists_are_read() -> None:
    def each(design: Design, name: str, groups: int = 16) -> float:
        small, large = phases(design, 4, 4)[name], phases(design, groups, 4)[name]
        return (large.bytes / large.participants) / (small.bytes / small.participants)

    assert each(SHIPPED, "rollback") < 1.2
    assert each(SHIPPED, "step") < 1.2
    assert each(SHIPPED, "kill", 32) > 1.05  # each reads a compressed list of all
    assert each(NEXT, "kill") < 1.0


def test_preformed_job_equals_one_that_forms_itself() -> None:
    by_itself = job(SHIPPED, 3, formed=False)
    start = by_itself.start()
    assert start.formed is not None and start.formed < start.span
    given = job(SHIPPED, 3)
    for one, other in zip(by_itself.nodes, given.nodes, strict=True):
        assert one.peer == other.peer
        for name in ("state", "token", "step", "lineage", "cursor", "healed", "dead", "joining"):
            assert getattr(one.local, name) == getattr(other.local, name), name
        assert one.local.epoch is not None and other.local.epoch is not None
        assert one.local.epoch.members == other.local.epoch.members
    assert Counter(by_itself.step().operations) == Counter(given.step().operations)


def test_first_txn_of_an_epoch_votes_at_the_store_of_the_job() -> None:
    made = job(SHIPPED, 4, 3)
    assert [made.step().operations["append"] for _ in range(3)] == [12, 4, 4]


def test_a_job_goes_on_from_phase_to_phase() -> None:
    made = job(SHIPPED, 5)
    for name in ("step", "rollback", "rollback", "step", "kill", "kill", "step"):
        getattr(made, name)()
    assert {n.local.step for n in made.nodes} == {3}
    assert {n.local.token.epoch for n in made.nodes} == {5}
    assert len(made.nodes) == 6


def test_the_store_is_one_server_that_is_waited_for() -> None:
    small, large = phases(SHIPPED, 2, 8)["step"], phases(SHIPPED, 20, 8)["step"]
    assert small.latency is not None and large.latency is not None
    assert large.busy > 6 * small.busy
    assert large.latency[1] - small.latency[1] > 0.5 * (large.busy - small.busy)
    assert large.latency[0] < large.latency[1]
    assert large.span >= large.busy


def test_stalled_phase_names_the_states_of_the_participants() -> None:
    made = job(SHIPPED, 2, 1)
    lost = made.nodes[1]
    lost.alive = False  # without a death notice its vote is waited for, and no timer fires here
    with pytest.raises(Stalled, match=r"step of 2 participants ended with some in .*PREPARED"):
        made.step()


def test_a_calibration_that_lacks_a_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="no operation_us"):
        prices_from({})
    with pytest.raises(ValueError, match="hop_us is None"):
        prices_from({"operation_us": {"add": 1.0}, "byte_in_us": 0.1, "byte_out_us": 0.1})

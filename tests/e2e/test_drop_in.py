"""Tests of the plain torchft loop under ``ManagerFFT``: no split commit, no needless transfer.

One job of three groups runs the example unchanged under a fault plan; torchft's DDP wrapper,
LocalSGD and DiLoCo run in threads, without a lighthouse.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_run import fft
from stage import Member, aborts, assert_in_order, fetches, job, parameters, records
from torchft import DistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD, _StreamingDiLoCoFragment
from torchft.optim import OptimizerWrapper

from fft.errors import FftError
from fft.trace.audit import audit_dir
from fft.trace.report import RunReport
from fft.train.api.torchft_diloco import packed, refuse_dropping

LOOP = Path(__file__).parents[2] / "examples" / "torchft_loop.py"
LIMIT_S = 120
PLAN = """
faults:
  - {name: caught, kind: exception, step: 5, group: 1, rank: 0, phase: before_allreduce}
  - {name: midway, kind: exception, step: 8, group: 2, rank: 0, phase: during_allreduce}
  - {name: one-sided, kind: one_sided, step: 11, group: 0}
  - {name: kill, kind: kill, step: 14, group: 2, phase: during_allreduce}
  - {name: leave, kind: drain, step: 20, group: 1, with_groups: 3, settled_steps: 10}
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of the job, which is run once to its successful end."""
    root = tmp_path_factory.mktemp("drop-in")
    (root / "plan.yaml").write_text(PLAN)
    command = ["run", "--groups", "3", "--ranks", "1"]
    command += ["--faults", str(root / "plan.yaml"), "--trace-dir", str(root / "run")]
    command += ["--stop-after-plan", "5", "--timeout", str(LIMIT_S - 20), str(LOOP)]
    command += ["--steps", "1000000", "--width", "4096"]
    done = fft(*command, folder=root, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "run"


def _ends(traces: Path) -> dict[str, tuple[str, int]]:
    """Return log name → (weights, step) printed at the end, for every process that reached its
    end."""
    found = {}
    for log in (traces / "logs").iterdir():
        if output := re.search(r"^weights (\w+) at step (\d+)$", log.read_text(), re.MULTILINE):
            found[log.stem] = (output[1], int(output[2]))
    return found


@pytest.mark.multiprocess
def test_the_plain_loop_never_splits_and_ends_with_equal_weights(traces: Path) -> None:
    report = audit_dir(traces)
    assert report.ok, report.render()
    ends = _ends(traces)
    assert set(ends) == {"g0r0-1", "g1r0-1", "g2r0-2"}  # all but the killed process
    (weights, last), (others, other) = ends["g0r0-1"], ends["g2r0-2"]
    if last == other:
        assert weights == others
    else:  # the request to leave reached one group before a vote, and the other after it
        assert abs(last - other) == 1
    assert ends["g1r0-1"][1] < last
    causes = [record["cause"] for record in aborts(traces)]
    assert_in_order(("caught", "midway", "last all-reduce"), causes)


@pytest.mark.multiprocess
def test_plain_loop_transfers_state_only_to_a_rank_that_lacks_state(traces: Path) -> None:
    """At the start every group but one takes its weights from that one (``init_sync``)."""
    found = fetches(traces)
    assert sorted(fetch[:3] for fetch in found[:2]) in (
        [("1", 0, 1), ("2", 0, 1)],
        [("0", 0, 1), ("2", 0, 1)],
        [("0", 0, 1), ("1", 0, 1)],
    )
    assert [fetch[:3] for fetch in found[2:]] == [("2", 0, 2)]


@pytest.mark.multiprocess
def test_a_drained_group_of_the_plain_loop_ends_well(traces: Path) -> None:
    history = records(traces)
    left = next(i for i, record in enumerate(history) if record["leavers"])
    assert history[left]["leavers"] == ["1"]
    assert [record["kind"] for record in history[left : left + 2]] == ["commit", "epoch"]
    assert "SystemExit" not in (traces / "logs" / "g1r0-1.log").read_text()


@pytest.mark.multiprocess
def test_incidents_report_the_cost_of_faults(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print()
        incidents = RunReport(traces).incidents
        for found in incidents:
            ms = "-" if found.next_commit_ms is None else f"{found.next_commit_ms:.0f} ms"
            print(f"  {found.fault}: next commit after {ms}, {found.bytes_healed} bytes healed")
    transient = incidents[1:4] if len(incidents) > 4 else []
    assert all(found.bytes_healed == 0 for found in transient)


# --- torchft's wrappers, in threads ---------------------------------------------------------------


def _state_functions(model: torch.nn.Module) -> dict[str, Any]:
    return {
        "state_dict": lambda: model.state_dict(),
        "load_state_dict": lambda state: model.load_state_dict(state),
        "register": False,
        "model": model,
    }


def _net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def _run(traces: Path, work: Any, transfers: int = 1, **settings: Any) -> list[Member]:
    """Run two groups that begin with different weights; the second takes the first's."""
    with job(traces, 2) as made:
        nets = {str(g): {**_state_functions(_net(g)), **settings} for g in (0, 1)}
        members = [made.member(g, init_sync=True, **net) for g, net in nets.items()]
        for member in members:
            member.start(work)
        for member in members:
            member.end()
            assert member.error is None, repr(member.error)
        report = made.audit()
        assert report.ok
    assert parameters(members[0].model) == parameters(members[1].model)
    assert len(fetches(traces)) == transfers
    return members


@pytest.mark.parametrize("fails", [False, True])
def test_torchft_ddp_loop_runs_unchanged(tmp_path: Path, fails: bool) -> None:
    failed: list[int] = []

    def work(member: Member) -> None:
        manager = member.manager
        ddp = DistributedDataParallel(manager, member.model)
        optimizer = OptimizerWrapper(manager, member.optimizer)
        draw = torch.Generator().manual_seed(int(member.group))
        while manager.current_step() < 8:
            optimizer.zero_grad()
            try:
                loss = ddp(torch.randn(4, 8, generator=draw)).square().mean()
                if fails and member.group == "1" and manager.current_step() == 3 and not failed:
                    failed.append(3)
                    raise ValueError("before the backward pass, while the peer reduces")
                loss.backward()
            except ValueError as error:
                manager.report_error(error)
            optimizer.step()

    _run(tmp_path / "traces", work)
    lost = aborts(tmp_path / "traces")
    assert len(lost) == len(failed) == int(fails)


@pytest.mark.parametrize("fails", [False, True])
def test_local_sgd_loop_runs_unchanged(tmp_path: Path, fails: bool) -> None:
    failed: list[int] = []

    def work(member: Member) -> None:
        manager, optimizer = member.manager, member.optimizer
        draw = torch.Generator().manual_seed(int(member.group))
        with LocalSGD(manager, member.model, optimizer, sync_every=3):
            while manager.current_step() < 4:
                optimizer.zero_grad()
                member.model(torch.randn(4, 8, generator=draw)).square().mean().backward()
                if fails and member.group == "1" and manager.current_step() == 2 and not failed:
                    failed.append(2)
                    manager.report_error(ValueError("between two synchronisations"))
                optimizer.step()

    # An error that is reported after a commit counts as a failure to apply it, so that rank heals.
    _run(tmp_path / "traces", work, transfers=1 + int(fails))
    lost = aborts(tmp_path / "traces")
    assert len(lost) == len(failed) == int(fails)


@pytest.mark.parametrize(
    ("sizes", "cap", "done"), [([6, 6], 10, 1), ([12, 3], 10, 0), ([5, 5], 10, 2)]
)
def test_packed_matches_torchft_bucketizer(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], cap: int, done: int
) -> None:
    reduced: list[int] = []

    class Work:
        def get_future(self) -> torch.futures.Future[Any]:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result([])
            return future

    class Manager:
        def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Work:
            reduced.append(int(tensor.count_nonzero()))
            return Work()

    fragment = object.__new__(_StreamingDiLoCoFragment)
    fragment._manager, fragment._allreduce_work = Manager(), []
    fragment.should_quantize = False
    fragment._bucketize_and_allreduce([torch.ones(n) for n in sizes], 4 * cap)
    assert sum(reduced) == sum(sizes[:done])
    assert packed(sizes, cap) == done


def test_a_diloco_of_torchft_that_would_drop_tensors_is_refused(tmp_path: Path) -> None:
    with job(tmp_path / "traces", 1) as made:
        net = _state_functions(_net(0))
        member = made.member("0", **net, use_async_quorum=False)
        outer = torch.optim.SGD(member.model.parameters(), lr=0.7)
        settings = {"sync_every": 2, "use_bucketization": True}
        with pytest.raises(FftError, match=r"would never reduce '0\.weight'.*or use fft\.DiLoCo"):
            DiLoCo(member.manager, [member.model], member.optimizer, outer,
                   bucket_cap_mb=1e-4, **settings)  # fmt: skip
        DiLoCo(member.manager, [_net(1)], member.optimizer, outer, bucket_cap_mb=1, **settings)


def test_state_functions_may_close_over_names_bound_later(tmp_path: Path) -> None:
    """In the loop of torchft's README, the manager is created before the model that its functions
    save."""

    def save() -> dict[str, Any]:
        return {"model": model.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])

    with job(tmp_path / "traces", 1) as made:
        own = {"state_dict": save, "load_state_dict": load, "register": False}
        member = made.member("0", model=_net(0), **own)
        model = member.model

        def work(member: Member) -> None:
            ddp = DistributedDataParallel(member.manager, model)
            optimizer = OptimizerWrapper(member.manager, member.optimizer)
            while member.manager.current_step() < 3:
                optimizer.zero_grad()
                ddp(torch.ones(4, 8)).square().mean().backward()
                optimizer.step()

        member.start(work).end()
        assert member.error is None, repr(member.error)
        assert member.manager.batches_committed() == 3


def test_fragment_bound_late_is_checked_before_the_first_step(
    tmp_path: Path,
) -> None:
    """A user's function saves a fragment whose buckets get their size after the registration."""
    with job(tmp_path / "traces", 1) as made:
        member = made.member("0", **_state_functions(_net(0)))
        member.manager.register_state_dict_fn("mine", lambda _: None, lambda: fragment)
        fragment = object.__new__(_StreamingDiLoCoFragment)
        fragment.use_bucketization, fragment.bucket_cap_mb = True, 4 * 100
        fragment.original_parameters = {"a": torch.ones(60), "b": torch.ones(60)}
        with pytest.raises(FftError, match=r"would never reduce 'b' and 0 more"):
            member.manager.start_quorum()
        fragment.bucket_cap_mb = 4 * 120
        member.manager.start_quorum()


def test_a_fragment_without_parameters_drops_nothing() -> None:
    fragment = object.__new__(_StreamingDiLoCoFragment)
    fragment.use_bucketization, fragment.original_parameters = True, {}
    refuse_dropping(lambda: fragment)


def test_an_object_in_a_closure_is_not_asked_for_its_class() -> None:
    """A lazy proxy loads its target when its class is requested."""

    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("it was asked for its class")

    proxy = Proxy()
    refuse_dropping(lambda: proxy)


def test_diloco_loop_runs_unchanged(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        manager, inner = member.manager, member.optimizer
        outer = torch.optim.SGD(member.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        draw = torch.Generator().manual_seed(int(member.group))
        with DiLoCo(manager, [member.model], inner, outer, sync_every=3):
            while manager.current_step() < 4:
                inner.zero_grad()
                member.model(torch.randn(4, 8, generator=draw)).square().mean().backward()
                inner.step()
        assert manager.num_participants() == 2 and manager.batches_committed() == 8
        assert manager.errored() is None

    _run(tmp_path / "traces", work, use_async_quorum=False)
    assert aborts(tmp_path / "traces") == []

"""Tests of torchft that ``ManagerFFT`` does not pass, each with its reason.

The names are those of pytest, without the folder. These tests must fail, and with the error given
here; any other result is a failure of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from fft.errors import FftError, NotEnoughGroups


@dataclass(frozen=True)
class Difference:
    """The reason why a test cannot pass."""

    reason: str
    raises: tuple[type[BaseException], ...] = (AssertionError,)
    is_new: bool = False
    """torchft 0.2 does not have the test."""


_ASKS_NOBODY = Difference(
    "lets a mocked ManagerClient answer for the lighthouse, which ManagerFFT does not ask: it "
    "waits for the other rank of its group to come to the bus, and none does",
    (NotEnoughGroups,),
)
_MORE_STATE = Difference(
    "the state of the manager has lineage and cursor besides torchft's entries"
)
_NO_EMPTY_STEP = Difference(
    "commits a txn in which nothing was reduced, and commits it a second time; here a YES needs a "
    "reduction, and a txn is decided once"
)

_NATIVE = Difference(
    "passes a process group of torch itself, in which FFT could not free a rank that waits",
    (FftError,),
    is_new=True,
)

DIFFERENCES: dict[str, Difference] = {
    **{
        f"manager_test.py::TestManager::{name}": _ASKS_NOBODY
        for name in (
            "test_allreduce_error",
            "test_max_retries",
            "test_pg_errored",
            "test_quorum_fixed_world_size",
            "test_quorum_happy",
            "test_quorum_happy_timeouts",
            "test_quorum_heal_async_not_enough_participants",
            "test_quorum_heal_async_zero_grad",
            "test_quorum_heal_sync",
            "test_quorum_no_healing",
            "test_quorum_skip_init",
        )
    },
    "manager_test.py::TestManager::test_quorum_checkpoint_errors": Difference(
        "as those above, with a mocked checkpoint transport, whose address is no text",
        (FftError,),
    ),
    "manager_test.py::TestManager::test_quorum_configure_errors": Difference(
        "makes configure() of the manager's process group fail, or _reconfigure_pg() of a later "
        "torchft; here FFT configures the group that was given",
        (AttributeError, NotEnoughGroups),
    ),
    **{
        f"manager_integ_test.py::ManagerIntegTest::test_ddp_recovery_{name}": _NATIVE
        for name in ("2_native_async_quorum", "3_native_sync_quorum")
    },
    "manager_test.py::TestManager::test_native_process_group": _NATIVE,
    "manager_test.py::TestManager::test_native_process_group_requires_support": Difference(
        "makes a manager without a rank and a store, which are asked for first",
        (FftError,),
        is_new=True,
    ),
    "manager_test.py::TestManager::test_manager": Difference(
        "counts the ManagerClients that are made; here none is, for no lighthouse is asked"
    ),
    "manager_test.py::TestManager::test_manager_numerics": Difference(
        "puts a mock in the place of torchft's future of a quorum, and counts who asks it; here "
        "who takes part is known when a txn begins"
    ),
    "manager_integ_test.py::ManagerIntegTest::test_quorum_timeout": Difference(
        "wants gRPC's text in the TimeoutError; here it says for whom it waits"
    ),
    "manager_test.py::TestManager::test_state_dict": _MORE_STATE,
    "manager_test.py::TestManager::test_user_state_dict": _MORE_STATE,
    **{
        f"diloco_regression_test.py::DiLoCoMockedUpdateTest::test_diloco_mocked_updates_{n}": (
            _NO_EMPTY_STEP
        )
        for n in range(6)
    },
}

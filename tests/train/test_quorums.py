"""Tests of the meaning of a lighthouse's answer for a txn, and of requests to a real one, without a
job."""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from torchft import Manager
from torchft.coordination import LighthouseServer
from torchft.manager import ManagerClient, ManagerServer

from fft.errors import FftError
from fft.messages.protocol import Peer, Token
from fft.train.session.lighthouse import (
    LighthouseBeacon,
    ListedGroup,
    QuorumClient,
    QuorumRequest,
)

TOKEN, OLD = Token(3, 7), Token(3, 6)
WINDOW = 1.0
SETTINGS: dict[str, Any] = {
    "replica_id": "0:x",
    "hostname": "127.0.0.1",
    "bind": "127.0.0.1:0",
    "store_addr": "127.0.0.1:1",
    "world_size": 1,
    "heartbeat_interval": timedelta(milliseconds=100),
    "connect_timeout": timedelta(seconds=1),
    "quorum_retries": 0,
}


def ask(**members: int) -> QuorumRequest:
    return QuorumRequest(TOKEN, members or {"0": 1, "1": 4}, WINDOW, 0.0)


def test_a_quorum_is_had_when_all_have_asked_in_this_txn() -> None:
    asked = ask()
    assert asked.on_reply({"0": ListedGroup(1, TOKEN), "1": ListedGroup(4, OLD)}, 0.1) == set()
    assert not asked.granted, "the call was left over from another txn"
    assert (
        asked.on_reply(
            {"0": ListedGroup(1, TOKEN), "1": ListedGroup(4, TOKEN), "x": ListedGroup(9, OLD)}, 0.2
        )
        == set()
    )
    assert asked.granted


def test_one_answer_is_judged_equally_by_all() -> None:
    answer = {"0": ListedGroup(1, TOKEN), "1": ListedGroup(4, OLD)}
    ahead, behind = ask(), ask()
    ahead.on_reply(answer, 0.1), behind.on_reply(answer, 0.3)
    assert ahead.granted == behind.granted


def test_group_missing_from_all_answers_is_late_once_per_window() -> None:
    asked = ask()
    alone = {"0": ListedGroup(1, TOKEN)}
    assert asked.on_reply(alone, 10.0) == set(), "it may only have asked later"
    assert asked.on_reply(alone, 10.9) == set()
    assert asked.on_reply(alone, 11.0) == {"1"}
    assert asked.on_reply(alone, 11.5) == set()
    assert asked.on_reply(alone, 12.0) == {"1"}


def test_single_answer_with_the_group_clears_the_group() -> None:
    asked = ask()
    alone = {"0": ListedGroup(1, TOKEN)}
    asked.on_reply(alone, 10.0)
    asked.on_reply({**alone, "1": ListedGroup(4, OLD)}, 10.9)
    assert asked.on_reply(alone, 11.1) == set()


def test_another_process_of_the_name_is_not_the_member() -> None:
    asked = ask()
    asked.on_reply({"0": ListedGroup(1, TOKEN), "1": ListedGroup(5, TOKEN)}, 10.0)
    assert not asked.granted
    assert asked.on_reply({"0": ListedGroup(1, TOKEN), "1": ListedGroup(5, TOKEN)}, 11.0) == {"1"}


def test_a_quorum_once_had_stays_and_the_dead_are_still_missed() -> None:
    asked = ask()
    asked.on_reply({"0": ListedGroup(1, TOKEN), "1": ListedGroup(4, TOKEN)}, 0.1)
    asked.on_reply({"0": ListedGroup(1, TOKEN)}, 5.0)
    assert asked.granted
    assert asked.on_reply({"0": ListedGroup(1, TOKEN)}, 6.0) == {"1"}


def test_torchft_constructor_still_uses_the_replaced_classes() -> None:
    code: Any = Manager.__init__.__code__
    assert {"ManagerServer", "ManagerClient"} <= set(code.co_names)
    assert "lighthouse_addr" in inspect.signature(Manager).parameters


def test_torchft_server_pairs_the_calls_of_ranks_by_their_order(place: Place) -> None:
    """This is why only the first rank asks: a rank that was rolled back before puts all out of
    step."""
    server = ManagerServer(
        lighthouse_addr=f"http://127.0.0.1:{place.port}", **{**SETTINGS, "world_size": 2}
    )
    client = [ManagerClient(server.address(), timedelta(seconds=5)) for _ in range(2)]
    got: queue.SimpleQueue[int] = queue.SimpleQueue()

    def quorum(rank: int, txn: int) -> None:
        with suppress(TimeoutError):
            client[rank]._quorum(
                group_rank=rank,
                step=txn,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=timedelta(seconds=1),
                commit_failures=0,
                init_sync=True,
            )
            got.put(txn)

    def one_after_the_other() -> None:
        for txn in (1, 2):
            quorum(0, txn)

    first = threading.Thread(target=one_after_the_other)
    first.start()
    quorum(1, 2)  # it does not know txn 1
    first.join()
    server.shutdown()
    assert sorted(got.get(timeout=0) for _ in range(got.qsize())) == [1, 2], "txn 2 of rank 0: none"


# --- a real lighthouse ----------------------------------------------------------------------------


class Place:
    """A lighthouse, and groups that ask it."""

    def __init__(self) -> None:
        self._server: Any = LighthouseServer(
            "127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=500
        )
        self.port = urlsplit(self._server.address()).port
        self._ends: list[Callable[[], None]] = []

    def close_lighthouse(self) -> None:
        """End the lighthouse, which loses its state."""
        self._server.shutdown()
        self._server = None  # its connections end with it

    def open_lighthouse(self) -> None:
        """Start a new one at the same address."""
        deadline = time.monotonic() + 10
        while self._server is None:  # the port is released some time after the shutdown
            try:
                self._server = LighthouseServer(
                    f"127.0.0.1:{self.port}", min_replicas=1, heartbeat_timeout_ms=500
                )
            except RuntimeError:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def group(self, name: str, timeout_s: float = 30.0) -> Group:
        """Return a group that asks."""
        made = Group(f"http://127.0.0.1:{self.port}", name, timeout_s)
        self._ends.append(made.close)
        return made

    def close(self) -> None:
        """End all."""
        for end in self._ends:
            end()


class Group:
    """A group's beacon, its requests, and their answers."""

    def __init__(self, address: str, name: str, timeout_s: float) -> None:
        self.beacon = LighthouseBeacon(
            address, serve_at="127.0.0.1", **{**SETTINGS, "replica_id": f"{name}:x"}
        )
        self.name = name
        self.said = threading.Condition()
        self.late: list[set[str]] = []
        self.failures: list[str] = []
        self.quorums = QuorumClient(self.beacon, Peer(name, 0, 1), timeout_s, 0.3, self)
        self.quorums.start()

    def on_missing_groups(self, token: Token, groups: set[str]) -> None:
        with self.said:
            self.late.append(groups)
            self.said.notify_all()

    def on_no_quorum(self, token: Token, why: str) -> None:
        with self.said:
            self.failures.append(why)
            self.said.notify_all()

    def begin(self, txn: int, *members: str) -> None:
        self.quorums.begin(Token(1, txn), txn, dict.fromkeys(members, 1))

    def close(self) -> None:
        self.quorums.close()
        self.beacon.shutdown()


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def test_groups_get_a_quorum_for_each_txn_and_none_is_a_step_behind(place: Place) -> None:
    """This holds also when one was rolled back before it asked, and while a third one stands by."""
    first, second, _other = (place.group(name) for name in "012")
    for txn in range(1, 40):
        first.begin(txn, "0", "1")
        if txn % 3 == 0:  # rolled back: no group got this quorum
            first.quorums.end()
            continue
        second.begin(txn, "0", "1")
        for group in (first, second):
            assert group.quorums.wait(Token(1, txn)) is None
            group.quorums.end()
    assert first.late == second.late == []


def test_restarted_lighthouse_makes_no_group_late(place: Place) -> None:
    groups = [place.group(name) for name in "01"]
    for txn in range(1, 7):
        if txn in (2, 5):
            place.close_lighthouse()
            place.open_lighthouse()
        for group in groups:
            group.begin(txn, "0", "1")
        for group in groups:
            assert group.quorums.wait(Token(1, txn)) is None
            group.quorums.end()
    assert groups[0].late == groups[1].late == []


def test_ended_group_is_late_after_its_heartbeats(place: Place) -> None:
    first, second = place.group("0"), place.group("1")
    for group in (first, second):
        group.begin(1, "0", "1")
    assert first.quorums.wait(Token(1, 1)) is None
    second.close()
    first.begin(2, "0", "1")
    with first.said:
        assert first.said.wait_for(lambda: bool(first.late), 10)
    assert first.late[0] == {"1"}


def test_missing_quorum_is_reported_and_counted(place: Place) -> None:
    group = place.group("0", timeout_s=0.5)
    group.begin(1, "0")
    assert group.quorums.wait(Token(1, 1)) is None
    group.quorums.end()
    place.close_lighthouse()
    for txn in (2, 3):
        group.begin(txn, "0")
        why = group.quorums.wait(Token(1, txn))
        assert why is not None and "no quorum of the lighthouse in 0.5 s" in why
        assert "cannot be reached" in why
        group.quorums.end()
    assert group.quorums.failures == 2
    place.open_lighthouse()
    group.begin(4, "0")
    assert group.quorums.wait(Token(1, 4)) is None
    group.quorums.end()
    assert group.quorums.failures == 0
    assert len(group.failures) == 2


def test_end_of_a_txn_releases_waiters(place: Place) -> None:
    group = place.group("0")
    group.begin(1, "0", "nobody")
    ended = threading.Timer(0.2, group.quorums.end)
    ended.start()
    assert group.quorums.wait(Token(1, 1)) is None
    ended.join()


def test_pause_follows_the_lighthouse_silence_up_to_a_bound(place: Place) -> None:
    group = place.group("0", timeout_s=0.4)
    group.quorums.pause()  # without a failure there is no pause
    place.close_lighthouse()
    group.begin(1, "0")
    assert group.quorums.wait(Token(1, 1)) is not None
    group.quorums.end()
    begun = time.monotonic()
    group.quorums.pause()
    assert 0.3 <= time.monotonic() - begun < 5


def test_there_must_be_one_to_be_asked() -> None:
    nowhere = LighthouseBeacon("none", bind="[::]:0")
    with pytest.raises(FftError, match="membership='lighthouse' needs"):
        QuorumClient(nowhere, Peer("0", 0, 1), 1.0, 1.0, None)  # type: ignore[arg-type]
    nowhere.shutdown()


@pytest.mark.parametrize("address", ["host:29510", "http://host", "http://host:port", "nonsense"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(FftError, match="must be like http://host:29510"):
        LighthouseBeacon(address, bind="[::]:0")

"""Tests of the memory of bad hosts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fft.cli import app
from fft.launch import bad_hosts
from fft.launch.bad_hosts import LIST, MARKS, mark
from fft.messages.protocol import Peer
from fft.trace.writer import TraceWriter


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(1, 5):
        mark(tmp_path, f"node{number}", "here")
    return tmp_path


def test_host_of_one_loss_is_not_bad(root: Path) -> None:
    for number in range(1, 5):
        mark(root, f"node{number}", "lost", "SIGSEGV")
    assert bad_hosts.bad_hosts(root) == {} and (root / LIST).read_text() == ""


def test_host_that_was_excluded_once_is_bad(root: Path) -> None:
    mark(root, "node3", "excluded", "its sums were wrong")
    assert bad_hosts.bad_hosts(root) == {"node3": ["its sums were wrong"]}
    assert (root / LIST).read_text() == "node3\n"


def test_host_is_bad_with_repeated_losses_that_others_do_not_have(root: Path) -> None:
    for _ in range(3):
        mark(root, "node2", "lost", "SIGBUS")
    assert list(bad_hosts.bad_hosts(root)) == ["node2"]
    for number in range(1, 5):
        for _ in range(3):
            mark(root, f"node{number}", "lost", "a mistake of the script")
    assert bad_hosts.bad_hosts(root) == {}


def test_half_of_the_hosts_stay_and_the_worst_go(root: Path) -> None:
    for number in (1, 2, 3):
        for _ in range(number):
            mark(root, f"node{number}", "excluded", "too slow")
    assert list(bad_hosts.bad_hosts(root)) == ["node3", "node2"]


def test_line_of_a_host_that_died_while_writing_is_left_out(root: Path) -> None:
    with (root / MARKS).open("a") as file:
        file.write('{"host": "node1", "kin\n')
    mark(root, "node1", "excluded", "too slow")
    assert list(bad_hosts.bad_hosts(root)) == ["node1"]


def test_own_name_is_that_of_the_scheduler(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node4")
    assert not bad_hosts.is_bad(root)
    mark(root, bad_hosts.own_name(), "excluded", "too slow")
    assert bad_hosts.is_bad(root)


def test_report_lists_bad_hosts_with_their_reasons(root: Path) -> None:
    mark(root, "node3", "excluded", "group 3 was evicted by the supervisor")
    with closing(TraceWriter(root, Peer("0", 0, 1))) as trace:
        trace.note("metrics", {"loss": 1.0})
    shown = CliRunner().invoke(app, ["report", str(root)])
    assert "bad host node3 (1): group 3 was evicted by the supervisor" in shown.output, shown.output

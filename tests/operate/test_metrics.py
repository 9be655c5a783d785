"""Tests of the figures of a run, of the process that serves them, and of a real Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from traced import TracedJob, a_record
from waiting import wait_until

from fft.errors import FftError
from fft.launch.metrics_process import MetricsProcess
from fft.messages.causes import CauseCode
from fft.messages.protocol import Decision, Event, GroupEntry, Prepared, RankEntry, Token
from fft.protocol.roles import Role
from fft.trace.figures import FIGURES, plain
from fft.trace.history import VoteWaits
from fft.trace.inputs import LOOP, TORCHFT
from fft.trace.lines import Transition
from fft.trace.report import RunReport, history_of
from fft.trace.tail import TraceTail
from fft.util.listening import MAX_WAITING, REQUEST_S, Waiting

EXAMPLES = Path(__file__).parents[2] / "examples/observability"
PROMETHEUS = shutil.which("prometheus")
WAIT_S = 60.0


class LiveJob(TracedJob):
    """A job whose traces have the present time."""

    def _now(self) -> float:
        return time.time()

    def note(self, name: str, data: dict[str, Any]) -> None:
        """Write a note into the trace of the first rank."""
        node = self.live()[0]
        self.writers[node.peer].note(name, data, node.local)

    def eventful(self) -> LiveJob:
        """Take steps with a rollback, a lost group that comes back, and a checkpoint."""
        self.loops |= {node.peer for node in self.live()}
        self.note(LOOP, {"runs": TORCHFT, "from": [1, 1], "goal": {"steps": 100, "samples": 8}})
        for _ in range(5):
            self.step()
        self.refuse(self.live()[1], "boom")
        self.settle()
        self.step()
        self.start_anew("1")
        for _ in range(3):
            self.step()
        self.note("checkpoint", {"step": 8, "published": True})
        return self


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LiveJob]:
    job = LiveJob(tmp_path / "traces")
    yield job
    job.close()


def line(rank: int, event: Event, token: tuple[int, int] = (1, 1), *roles: Role) -> Transition:
    place = {"group": "0", "rank": rank, "epoch": token[0], "txn": token[1]}
    found = roles or ("training", "voting")
    return Transition(kind="transition", to="", roles=found, event=event, **place)


def vote(token: tuple[int, int], rank: int, at: float) -> tuple[Transition, float]:
    return line(rank, Prepared(Token(*token), True), token), at


def commit(token: tuple[int, int], rank: int, at: float) -> tuple[Transition, float]:
    return line(rank, Decision(a_record(2, "commit", 1)), token, "voting", "committing"), at


def epoch(ranks: int) -> tuple[Transition, float]:
    entries = tuple(RankEntry(rank, 1, True, "", 1, "") for rank in range(ranks))
    record = replace(a_record(1, "epoch", 0), members=(GroupEntry("0", "store", entries),))
    return line(0, Decision(record)), 0.0


def test_figures_separate_waits_for_the_slowest_rank_from_the_protocol() -> None:
    figures, token = VoteWaits(), (1, 1)
    lines = [epoch(3), vote(token, 0, 1.0), vote(token, 1, 1.5), vote(token, 2, 3.0)]
    lines += [commit(token, rank, 3.25) for rank in range(3)]
    for each, at in lines:
        figures.take(each, at)
    assert figures.waited == {("0", "0"): 2.0, ("0", "1"): 1.5, ("0", "2"): 0.0}
    assert figures.caused == {("0", "2"): (1, 3.5)}
    assert figures.protocol == {("0", str(rank)): 0.25 for rank in range(3)}


def test_figures_leave_the_protocol_out_if_votes_are_in_other_traces() -> None:
    figures, token = VoteWaits(), (1, 1)
    for each, at in [epoch(3), vote(token, 0, 1.0), vote(token, 1, 2.0), commit(token, 0, 5.0)]:
        figures.take(each, at)
    assert not figures.waited
    figures.end()
    assert figures.waited == {("0", "0"): 1.0, ("0", "1"): 0.0} and not figures.protocol


def test_figures_do_not_count_votes_for_a_rolled_back_attempt() -> None:
    figures = VoteWaits()
    for each, at in [epoch(2), vote((1, 1), 0, 1.0), vote((1, 1), 1, 9.0)]:
        figures.take(each, at)
    figures.end()
    assert not figures.waited and not figures.caused


def test_figures_of_a_running_job_equal_those_of_its_report(job: LiveJob) -> None:
    tail = TraceTail(job.directory)
    with closing(tail):
        tail.poll()
        job.eventful()
        tail.poll()
        job.step()
        tail.poll()
        live = plain(tail.view)
    report = RunReport(job.directory).to_json()
    assert live["commits"] == report["steps"] == 10 and sum(live["rollbacks"].values()) == 2
    assert live["checkpoint_step"] == 8 and live["samples"] and live["healed_bytes"]["1"]
    assert live["group_present"] == {"0": 1, "1": 1}
    for name, value in live.items():
        assert value == pytest.approx(report["figures"][name], abs=0.002), name


# --- the process ---


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def process(reports: list[str]) -> Iterator[MetricsProcess]:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    with closing(MetricsProcess("0", reports.append)) as process:
        yield process


def scrape(url: str) -> dict[str, Any]:
    """Return the samples of a scrape in the form of `plain`."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        found = {family.name: family for family in families}
    values = {}
    for figure in FIGURES:
        family = found[f"fft_{figure.name}"]
        assert family.type == figure.kind and family.documentation == figure.text
        each = {"/".join(s.labels[n] for n in figure.labels): s.value for s in family.samples}
        values[figure.name] = each if figure.labels else each.get("")
    return values


def test_served_figures_equal_the_report(process: MetricsProcess, job: LiveJob) -> None:
    with urllib.request.urlopen(process.url, timeout=WAIT_S) as answer:
        assert not answer.read(), "no figures before there is a job"
    job.eventful()
    process.follow(job.directory)
    wait_until(lambda: text_at(process.url) != "", "the figures are served", WAIT_S)
    served, report = scrape(process.url), plain(history_of(job.directory))
    assert served["rollbacks"].keys() == {str(code) for code in CauseCode}
    for name, value in report.items():
        if isinstance(value, dict):
            extra = served[name].keys() - value.keys()
            assert not any(served[name].pop(label) for label in extra)
        assert served[name] == pytest.approx(value, abs=0.002), name
    job.step()
    assert scrape(process.url)["commits"] == served["commits"] + 1


def test_metrics_process_follows_the_next_start(process: MetricsProcess, tmp_path: Path) -> None:
    first, second = LiveJob(tmp_path / "1"), LiveJob(tmp_path / "2")
    first.eventful()
    second.step()
    with closing(first), closing(second):
        for started in (first, second):
            process.follow(started.directory)
            shown = f"fft_step {started.history[-1].step}.0"
            wait_until(partial(is_shown, process.url, shown), shown, WAIT_S)


def is_shown(url: str, text: str) -> bool:
    return text in text_at(url)


def text_at(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def test_slow_and_silent_clients_do_not_delay_a_scrape(process: MetricsProcess) -> None:
    parts = urllib.parse.urlsplit(process.url)
    place = (parts.hostname or "", parts.port or 0)
    with ExitStack() as stack:
        for _ in range(2 * MAX_WAITING):
            stack.enter_context(socket.create_connection(place))
        slow = stack.enter_context(socket.create_connection(place))
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        began = time.monotonic()
        text_at(process.url)
        assert time.monotonic() - began < REQUEST_S
        slow.settimeout(0.05)

        def is_closed() -> bool:
            try:
                slow.sendall(b"a")
                return not slow.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_closed, "single bytes do not extend the deadline", WAIT_S)
    threads = psutil.Process(process._process.pid).num_threads()
    assert threads < 2 * MAX_WAITING, "the threads of displaced connections end"


def test_a_crowded_address_displaces_its_own_oldest_connection() -> None:
    waiting = Waiting(most=3)
    with ExitStack() as stack:
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(5)]
        mine = [pair[0] for pair in pairs]
        for one, address in zip(mine, ("b", "a", "a", "a", "c"), strict=True):
            waiting.enter(one, address)
        assert [one.recv(1) for one in (mine[1], mine[2])] == [b"", b""], "both were shut down"
        assert [waiting.leave(one) for one in mine] == [True, False, False, True, True]


def test_metrics_process_that_dies_is_reported(process: MetricsProcess, reports: list[str]) -> None:
    os.kill(process._process.pid, signal.SIGKILL)
    wait_until(lambda: bool(reports), "its end is reported", WAIT_S)
    assert "has ended with status -9; the job goes on" in reports[0]
    process.follow(Path())


def test_metrics_process_ignores_signals_and_ends_quietly(
    process: MetricsProcess, reports: list[str]
) -> None:
    text_at(process.url)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process._process.pid, number)
    text_at(process.url)
    process.close()
    assert process._process.returncode == 0 and not reports


@pytest.mark.parametrize("address", ["", "x", "70000", "localhost:"])
def test_metrics_refuses_a_malformed_address(address: str) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    with pytest.raises(FftError, match=r"expected PORT or HOST:PORT"):
        MetricsProcess(address, print)


def test_metrics_names_a_port_that_is_taken() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FftError, match=rf"--metrics {port}: cannot listen .*another port"):
            MetricsProcess(str(port), print)


# --- Prometheus ---


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run Prometheus with the shipped configuration and rules in fast motion; yield its URL."""
    assert PROMETHEUS is not None
    config = (EXAMPLES / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:9400", target).replace("interval: 5s", "interval: 500ms")
    rules = (EXAMPLES / "alerts.yml").read_text()
    rules = rules.replace("> 300\n    for: 1m", "> 3\n    for: 1s")
    (folder / "prometheus.yml").write_text(config)
    (folder / "alerts.yml").write_text(rules)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'db'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            yield f"http://127.0.0.1:{port}/api/v1"
        finally:
            server.terminate()


def ask(url: str, path: str, **query: str) -> Any:
    try:
        with urllib.request.urlopen(f"{url}/{path}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # the server is starting
            return None
        raise AssertionError(f"{query}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return None  # it does not listen yet


def results(url: str, query: str) -> Any:
    """Return the result of a query; empty while the server is starting."""
    return (ask(url, "query", query=query) or {}).get("result")


def firing(url: str) -> set[str]:
    alerts = (ask(url, "alerts") or {}).get("alerts", ())
    return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (apt: prometheus)")
def test_every_panel_has_data_and_an_alert_fires_when_commits_stop(
    process: MetricsProcess, job: LiveJob, tmp_path: Path
) -> None:
    process.follow(job.directory)
    target = urllib.parse.urlsplit(process.url).netloc
    panels = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
    queries = {panel["title"]: panel["targets"][0]["expr"] for panel in panels}
    empty = set(queries)
    with prometheus(tmp_path, target) as url:
        wait_until(lambda: bool(results(url, "up")), "the first scrape", WAIT_S)
        job.eventful()

        def all_have_data() -> bool:
            job.step()
            for title in sorted(empty):
                query = re.sub(r"\$__rate_interval", "5s", queries[title])
                query = query.replace("$instance", ".*")
                if results(url, query):
                    empty.remove(title)
            return not empty

        wait_until(all_have_data, "every panel has data", WAIT_S)
        assert "FFTCommitsStopped" not in firing(url)
        wait_until(lambda: "FFTCommitsStopped" in firing(url), "the alert fires", WAIT_S)
        job.step()
        wait_until(lambda: "FFTCommitsStopped" not in firing(url), "it is over", WAIT_S)

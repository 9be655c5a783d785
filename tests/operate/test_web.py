"""Tests of `fft watch --web`: access, contents, and the page of a real job in a browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from browsers import browser, needs_browser
from forked_run import FftRun, running
from typer.testing import CliRunner
from waiting import wait_until

from fft.bus import serve_tcp
from fft.bus.token import JobToken
from fft.cli import app
from fft.errors import ConfigError
from fft.messages.progress import Goal, SpeedReport
from fft.operate.job_view import _POINTS, JobModel, LossCurve
from fft.operate.web import WebView, state_of
from fft.util import listening

TOKEN = JobToken.fresh()
SCRIPT = Path(__file__).parents[1] / "e2e" / "fault_script.py"
LIMIT_S = 120.0


@pytest.fixture
def view() -> Iterator[WebView]:
    with closing(WebView("0", "tcp://bus/job", TOKEN)) as made:
        yield made


Answer = tuple[int, dict[str, str], str]


def ask(url: str, path: str, how: str = "GET", **headers: str) -> Answer:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)) as line:
        line.request(how, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = line.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def key_of(url: str) -> str:
    (key,) = parse_qs(urlsplit(url).query)["key"]
    return key


def bearer(url: str) -> str:
    return f"Bearer {key_of(url)}"


# --- access ---


def test_page_is_served_on_loopback_and_its_key_is_exchanged_for_a_cookie(view: WebView) -> None:
    assert urlsplit(view.url).hostname == "127.0.0.1"
    status, headers, _ = ask(view.url, f"/?key={key_of(view.url)}")
    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    status, headers, text = ask(view.url, "/", Cookie=f"other=1; {cookie.partition(';')[0]}")
    assert status == 200 and text.startswith("<!doctype html>")
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize("path", ["/", "/state.json", "/none", "/../../etc/passwd"])
def test_request_without_the_key_is_refused(view: WebView, path: str) -> None:
    cookie = ask(view.url, f"/?key={key_of(view.url)}")[1]["Set-Cookie"].partition("=")[0]
    wrong = JobToken.fresh().key("web page").hex()
    tries: list[dict[str, str]] = [
        {},
        {"Authorization": f"Bearer {wrong}"},
        {"Authorization": f"Basic {key_of(view.url)}"},
        {"Cookie": f"{cookie}={wrong}"},
        {"Cookie": f"{cookie}="},
        {"Cookie": f"fft-1={key_of(view.url)}"},
        {"Cookie": 'a="\x01; ='},
    ]
    for headers in tries:
        status, found, text = ask(view.url, path, **headers)
        assert status == 403 and "Set-Cookie" not in found
        assert "doctype" not in text and key_of(view.url) not in text
    assert ask(view.url, f"/?key={wrong}")[0] == 403
    assert ask(view.url, "/?key=")[0] == 403


@pytest.mark.parametrize("how", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_page_has_no_method_that_writes(view: WebView, how: str) -> None:
    for path in ("/", "/state.json"):
        assert ask(view.url, path, how, Authorization=bearer(view.url))[0] == 501


def test_key_of_the_page_is_not_the_token_of_the_job(view: WebView) -> None:
    """The address ends up in the history of a browser, and must not let anyone join the job."""
    assert TOKEN.text() not in view.url
    assert key_of(view.url) == TOKEN.key("web page").hex()
    assert key_of(view.url) not in ask(view.url, "/", Authorization=bearer(view.url))[2]


def test_job_without_a_token_has_no_page() -> None:
    with pytest.raises(ConfigError, match="FFT_TOKEN_FILE"):
        WebView("0", "tcp://bus/job", None)


def test_slow_client_does_not_delay_others(view: WebView) -> None:
    parts = urlsplit(view.url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port)) as slow:
        slow.connect()
        slow.sock.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert ask(view.url, "/", Authorization=bearer(view.url))[0] == 200


def test_client_that_sends_single_bytes_is_disconnected(
    view: WebView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "REQUEST_S", 0.5)
    parts = urlsplit(view.url)
    with closing(socket.create_connection((parts.hostname or "", parts.port or 0))) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        slow.settimeout(0.05)

        def is_closed() -> bool:
            try:
                slow.sendall(b"a")
                return not slow.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_closed, "the server closes the connection", 20.0)


def test_silent_connections_do_not_keep_out_clients(view: WebView) -> None:
    parts = urlsplit(view.url)
    place = (parts.hostname or "", parts.port or 0)
    with ExitStack() as stack:
        browser = stack.enter_context(closing(http.client.HTTPConnection(*place)))
        browser.request("GET", "/", headers={"Authorization": bearer(view.url)})
        assert browser.getresponse().read()
        for _ in range(3 * listening.MAX_WAITING):
            stack.enter_context(socket.create_connection(place))
        browser.request("GET", "/state.json", headers={"Authorization": bearer(view.url)})
        assert browser.getresponse().read(), "a connection with the key is never displaced"
        began = time.monotonic()
        assert ask(view.url, "/", Authorization=bearer(view.url))[0] == 200
        assert time.monotonic() - began < listening.REQUEST_S
        threads = [t for t in threading.enumerate() if "process_request_thread" in t.name]
        assert len(threads) < 2 * listening.MAX_WAITING


def test_port_is_free_after_close(view: WebView) -> None:
    port = urlsplit(view.url).port
    view.close()
    with closing(WebView(str(port), "tcp://bus/job", TOKEN)) as again:
        assert urlsplit(again.url).port == port


def test_command_refuses_a_page_with_other_outputs() -> None:
    for option in ("--once", "--json"):
        done = CliRunner().invoke(app, ["watch", "--web", "0", option, "--bus", "tcp://x:1/j"])
        assert done.exit_code == 2 and "--web cannot be combined" in done.output


# --- contents ---


def test_losses_are_kept_by_step_and_thinned_out() -> None:
    job = JobModel()
    for step in range(1, 5000):
        for group in ("0", "1"):
            goal = Goal(steps=10_000)
            job.see(SpeedReport(group, 0, 1, step, 0.1, loss=float(step), goal=goal), step)
    state = state_of(job, "tcp://bus/job", 5000.0)
    assert state["goal"] == 10_000 and set(state["losses"]) == {"0", "1"}
    (points,) = state["losses"]["0"]
    assert points[0] == (1, 1.0) and _POINTS / 4 < len(points) <= _POINTS
    assert all(step == loss for step, loss in points) and points[-1][0] > 4900
    json.dumps(state, allow_nan=False)


def test_loss_of_a_step_that_was_rolled_back_to_is_not_shown_twice() -> None:
    curve = LossCurve()
    for step in (1, 2, 2, 1, 3):
        curve.add(step, 0.5)
    assert curve.points == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_state_before_a_job_has_begun_is_shown() -> None:
    state = state_of(JobModel(), "tcp://bus/job", 1.0)
    assert state["step"] == 0 and state["groups"] == [] and state["share"] is None
    json.dumps(state, allow_nan=False)


# --- a real job ---


class Page:
    """The page of a job, as a client sees it."""

    def __init__(self, process: FftRun) -> None:
        wait_until(lambda: "\n" in process.stdout_text, "its address", LIMIT_S)
        self.process, self.url = process, process.stdout_text.splitlines()[0]
        self._key = bearer(self.url)

    def state(self) -> dict[str, Any]:
        """Return what the page shows now."""
        status, _, text = ask(self.url, "/state.json", Authorization=self._key)
        assert status == 200, text
        found: dict[str, Any] = json.loads(text) or {}
        return found

    def until(self, holds: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """Wait for a state; return it."""
        found: list[dict[str, Any]] = []

        def has() -> bool:
            state = self.state()
            found[:] = [state]
            time.sleep(0.1)
            return bool(state and holds(state))

        wait_until(has, what, LIMIT_S)
        return found[0]

    def kill(self, group: str) -> None:
        """Kill the first rank of a group by the number of its process on the page."""
        (row,) = (each for each in self.state()["groups"] if each["group"] == group)
        os.kill(row["ranks"][0]["pid"], signal.SIGKILL)


@contextmanager
def job_with_a_page(folder: Path) -> Iterator[tuple[FftRun, Page]]:
    traces = folder / "traces"
    run = ("run", "--groups", "2", "--no-progress", "--trace-dir", str(traces))
    checkpoint = ("--checkpoint", str(folder / "checkpoints"), "--every", "200")
    with running(*run, *checkpoint, str(SCRIPT), folder=folder) as job:
        wait_until(lambda: (traces / "job.json").exists(), "the job begins", LIMIT_S)
        with running("watch", str(traces), "--web", "0", folder=folder) as process:
            yield job, Page(process)
            process.signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 0, process.tail()


def is_training(state: dict[str, Any], groups: int = 2) -> bool:
    ranks = [rank for row in state["groups"] for rank in row["ranks"]]
    return len(ranks) == groups and all(rank["is_well"] for rank in ranks)


@pytest.mark.long
def test_page_shows_a_killed_group_its_return_and_the_end(tmp_path: Path) -> None:
    with job_with_a_page(tmp_path) as (job, page):
        page.until(lambda s: is_training(s) and s["steps_per_s"], "it trains")
        page.until(lambda s: s["losses"] and s["checkpoints"], "losses and a checkpoint")
        page.kill("1")
        hurt = page.until(lambda s: s["faults"], "the fault")
        assert hurt["fault_count"] == 1 and hurt["expected"] == 2
        assert all(row["hosts"] == [socket.gethostname()] for row in hurt["groups"])
        assert any(figure.startswith("goodput") for figure in hurt["figures"])
        assert 0 <= hurt["since_commit"] < LIMIT_S and not hurt["is_older"]
        reported = page.until(
            lambda s: s["faults"][0]["cost"] and not s["faults"][0]["is_open"], "cost"
        )
        assert re.search(r"\d+ m?s lost", reported["faults"][0]["cost"])
        page.until(
            lambda s: is_training(s) and any("came back" in c["text"] for c in s["changes"]), "back"
        )
        page.until(lambda s: [len(s["losses"][g]) for g in "01"] == [1, 2], "a curve in two parts")
        job.signal(signal.SIGTERM)
        assert job.wait(LIMIT_S) == 75, job.tail()
        end = page.until(lambda s: "exit status 75" in s["how"], "the verdict")
        assert "has ended: drained before its end, at step" in end["how"]
        assert page.state()["step"] == end["step"] > 0, "the page stays until it is closed"


@pytest.mark.long
@needs_browser
def test_browser_shows_a_job_while_its_groups_are_killed(tmp_path: Path) -> None:
    with job_with_a_page(tmp_path) as (job, page), browser(tmp_path) as driver:

        def text(name: str) -> str:
            found: str = driver.find_element("id", name).text
            return found

        driver.get(page.url)
        assert "key" not in driver.current_url
        wait_until(lambda: "samples/s" in text("line"), "it trains", LIMIT_S)
        wait_until(lambda: driver.find_elements("css selector", "#loss polyline"), "it", LIMIT_S)
        for count, group in enumerate(("1", "0"), 1):
            page.until(is_training, "all train")
            page.kill(group)
            wait_until(lambda n=count: text("count") == f"Faults: {n}", "the fault", LIMIT_S)
            wait_until(lambda: " lost" in text("faults"), "its cost", LIMIT_S)
        wait_until(lambda: "group 0 came back" in text("changes"), "it is back", LIMIT_S)
        wait_until(lambda: text("checkpoints").startswith("steps "), "a checkpoint", LIMIT_S)
        job.signal(signal.SIGTERM)
        assert job.wait(LIMIT_S) == 75, job.tail()
        wait_until(lambda: "drained before its end" in text("alarm"), "the verdict", LIMIT_S)
        assert "groups 0 of 2" in text("line") and "last commit " in text("line")
        assert socket.gethostname() in text("groups") and "goodput" in text("line")
        assert driver.get_log("browser") == []


def test_watch_prints_the_address_of_the_page_and_ends_on_an_interrupt(tmp_path: Path) -> None:
    env = {"FFT_TOKEN": TOKEN.text()}
    with (
        serve_tcp() as server,
        running("watch", "--bus", server.url, "--web", "0", folder=tmp_path, env=env) as process,
    ):
        page = Page(process)
        assert page.url.startswith("http://127.0.0.1:")
        page.until(lambda s: s["step"] == 0, "a state")
        process.signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0, process.tail()

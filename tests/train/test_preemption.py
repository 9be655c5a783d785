"""Tests of notices: real files and servers, and which of several deadlines counts."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fft.errors import ConfigError
from fft.train.step.preemption import (
    Earliest,
    FileNotice,
    HttpNotice,
    Notice,
    Poller,
    read_aws,
    read_azure,
    read_google,
    source_of,
)

LIMIT_S = 30.0


# --- which deadline counts ------------------------------------------------------------------------


def test_a_deadline_moves_forward_and_never_back() -> None:
    earliest = Earliest()
    assert earliest.take(Notice("soon"), 100.0) and earliest.deadline is None
    assert not earliest.take(Notice("soon, again"), 100.0)
    assert earliest.take(Notice("a minute", 60.0), 100.0) and earliest.deadline == 160.0
    assert not earliest.take(Notice("later", 60.0), 101.0)
    assert not earliest.take(Notice("by nobody's clock"), 101.0)
    assert earliest.take(Notice("sooner", 30.0), 101.0) and earliest.deadline == 131.0
    assert earliest.notice == Notice("sooner", 30.0)


@pytest.mark.parametrize("within", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(within: float) -> None:
    with pytest.raises(ConfigError, match="expected a finite number of seconds, 0 or more"):
        Notice("soon", within)


@given(st.lists(st.tuples(st.none() | st.floats(0, 1e4), st.floats(0, 10)), min_size=1))
def test_the_deadline_is_the_earliest_of_all(said: list[tuple[float | None, float]]) -> None:
    earliest, now, all_of_them = Earliest(), 0.0, []
    for within, passed in said:
        now += passed
        earliest.take(Notice("", within), now)
        all_of_them += [] if within is None else [now + within]
    if not all_of_them:
        assert earliest.deadline is None
    else:
        assert earliest.deadline == pytest.approx(min(all_of_them), abs=0.1001)


# --- files ----------------------------------------------------------------------------------------


def polled(path: Path) -> Notice:
    notice = FileNotice(path).poll()
    assert notice is not None
    return notice


def test_no_file_is_no_notice(tmp_path: Path) -> None:
    assert FileNotice(tmp_path / "gone").poll() is None


def test_an_empty_file_is_a_notice(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    path.touch()
    assert polled(path) == Notice(f"{path} exists")


def test_notice_file_gives_deadline_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    path.write_text('{"within": 90, "reason": "maintenance"}')
    notice = polled(path)
    assert notice.reason == "maintenance"
    assert notice.within_s is not None and 30 < notice.within_s <= 90


def test_seconds_count_from_when_the_file_was_written(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    path.write_text('{"within": 1000}')
    os.utime(path, (time.time() - 600, time.time() - 600))
    within = polled(path).within_s
    assert within is not None and 300 < within <= 400
    os.utime(path, (0, 0))
    assert polled(path).within_s == 0.0


@pytest.mark.parametrize("form", ["unix", "utc", "plain", "zone"])
def test_a_time_of_day_in_each_form(tmp_path: Path, form: str) -> None:
    then = datetime.now(UTC) + timedelta(seconds=500)
    away = datetime.now().astimezone().tzinfo
    content: dict[str, str | float] = {
        "unix": then.timestamp(),
        "utc": then.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "plain": then.replace(tzinfo=None).isoformat(),
        "zone": then.astimezone(away).isoformat(),
    }
    path = tmp_path / "gone"
    path.write_text(json.dumps({"deadline": content[form]}))
    within = polled(path).within_s
    assert within is not None and 440 < within <= 500


@pytest.mark.parametrize(
    "text",
    ["soon", "[1]", "{}", '{"within": "3"}', '{"within": true}', '{"deadline": "tomorrow"}',
     '{"within": NaN}', '{"within": 3, "deadline": 4}', '{"with": 3}', '{"within": 3', "\x00"],
)  # fmt: skip
def test_anything_else_is_a_notice_and_a_warning(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gone"
    path.write_text(text)
    source = FileNotice(path)
    assert [source.poll(), source.poll()] == [Notice(f"{path} exists")] * 2
    assert len(caplog.records) == 1
    assert str(path) in caplog.text and '{"within": 30}' in caplog.text


# --- servers --------------------------------------------------------------------------------------


class Metadata(BaseHTTPRequestHandler):
    """A server that behaves as the metadata servers of three clouds, with one path each."""

    answer: ClassVar[tuple[int, bytes]] = (200, b"")
    tokens: ClassVar[list[str]] = []

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token"
        if not known or not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdigit():
            return self.say(400, b"")
        self.tokens.append(f"token-{len(self.tokens)}")
        return self.say(200, self.tokens[-1].encode())

    def do_GET(self) -> None:
        headers = self.headers
        if self.path == "/latest/meta-data/spot/instance-action":
            good = headers.get("X-aws-ec2-metadata-token") in self.tokens
        elif self.path == "/computeMetadata/v1/instance/preempted":
            good = headers.get("Metadata-Flavor") == "Google"
        else:
            good = self.path == "/metadata/scheduledevents?api-version=2020-07-01"
            good = good and headers.get("Metadata") == "true"
        self.say(*(self.answer if good else (403, b"")))

    def say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def metadata_server() -> Iterator[tuple[str, type[Metadata]]]:
    """Yield the address of a server, and its answers."""
    kind = type("Here", (Metadata,), {"tokens": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", kind
    finally:
        server.shutdown()
        server.server_close()
        thread.join(LIMIT_S)


def in_(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def test_a_spot_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # this proxy must not be used
    with metadata_server() as (base, server):
        source = HttpNotice.aws(base)
        server.answer = (404, b"<html>not found</html>")
        assert source.poll() is None
        assert source.poll() is None and len(server.tokens) == 1
        when = in_(120).strftime("%Y-%m-%dT%H:%M:%SZ")
        server.answer = (200, json.dumps({"action": "terminate", "time": when}).encode())
        notice = source.poll()
    assert notice is not None and notice.within_s is not None and 60 < notice.within_s <= 120
    assert notice.reason == f"EC2 will terminate this Spot Instance at {when}"


def test_a_spot_vm() -> None:
    with metadata_server() as (base, server):
        source = HttpNotice.google(base)
        server.answer = (200, b"FALSE")
        assert source.poll() is None
        server.answer = (200, b"TRUE\n")
        assert source.poll() == Notice("Compute Engine preempts this VM", 30.0)


def event(kind: str, *names: str, not_before: str) -> dict[str, object]:
    return {
        "EventId": "f020ba2e-3bc0-4c40-a10b-86575a9eabd5",
        "EventStatus": "Scheduled" if not_before else "Started",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(names),
        "NotBefore": not_before,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


def test_scheduled_events() -> None:
    later, soon = (format_datetime(in_(seconds), usegmt=True) for seconds in (900, 300))
    with metadata_server() as (base, server):
        source = HttpNotice.azure("train_3", base)

        def polled(*events: dict[str, object]) -> Notice | None:
            document = {"DocumentIncarnation": 1, "Events": events}
            server.answer = (200, json.dumps(document).encode())
            return source.poll()

        assert polled() is None
        assert polled(event("Preempt", "train_4", not_before=soon)) is None
        assert polled(event("Freeze", "train_3", not_before=soon)) is None
        both = polled(
            event("Reboot", "train_2", "train_3", not_before=later),
            event("Preempt", "train_3", not_before=soon),
        )
        assert both is not None and both.within_s is not None and 200 < both.within_s <= 300
        assert both.reason == f"Azure: Preempt of train_3, not before {soon}"
        begun = polled(event("Terminate", "train_3", not_before=""))
        assert begun == Notice("Azure: Terminate of train_3, now", 0.0)


@pytest.mark.parametrize(
    ("read", "status", "body"),
    [(read_aws, 401, b""), (read_aws, 200, b"[]"), (read_aws, 200, b"{}"), (read_aws, 200, b"no"),
     (read_google, 200, b"MAYBE"), (read_google, 403, b"TRUE"), (read_google, 200, b"\xff"),
     (lambda s, b: read_azure(s, b, "vm"), 503, b"{}"),
     (lambda s, b: read_azure(s, b, "vm"), 200, b'{"Events": [{}]}')],
)  # fmt: skip
def test_malformed_notice_is_an_error(read, status, body) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((ConfigError, ValueError, KeyError)):
        read(status, body)


def test_a_server_that_does_not_answer_is_an_error() -> None:
    with metadata_server() as (base, _):
        pass
    with pytest.raises(OSError):
        HttpNotice.google(base).poll()


# --- asking ---------------------------------------------------------------------------------------


class Scripted:
    """A source with scripted answers, which repeats the last one."""

    def __init__(self, *answers: Notice | Exception | None) -> None:
        self.answers = list(answers)
        self.polls = 0
        self.through = threading.Event()

    def poll(self) -> Notice | None:
        answer = self.answers[min(self.polls, len(self.answers) - 1)]
        self.polls += 1
        if self.polls > len(self.answers):
            self.through.set()
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_only_news_is_passed_on_and_each_error_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    source = Scripted(
        OSError("away"), OSError("away"), None, Notice("a", 1000.0), Notice("a", 1000.0),
        ValueError("what"), OSError("away"), Notice("b", 500.0), Notice("c", 2000.0), None,
    )  # fmt: skip
    received: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    poller = Poller(source, received.put, 0.001)
    assert source.through.wait(LIMIT_S)
    poller.close()
    polls = source.polls
    assert not any(t.name == "fft-notice-Scripted" for t in threading.enumerate())
    assert [received.get_nowait() for _ in range(received.qsize())] == [
        Notice("a", 1000.0), Notice("b", 500.0),
    ]  # fmt: skip
    assert len(caplog.records) == 2 and polls == source.polls


# --- settings -------------------------------------------------------------------------------------


def test_setting_names_a_notice_source(tmp_path: Path) -> None:
    (tmp_path / "n-7.1").touch()
    setting = f"file:{tmp_path}/n-{{group}}.{{rank}}"
    assert source_of(setting, "7", 1).poll() is not None
    assert source_of(setting, "7", 0).poll() is None
    assert "169.254.169.254/latest/meta-data/spot" in str(source_of("aws", "0", 0))
    assert "metadata.google.internal" in str(source_of("google", "0", 0))
    assert "scheduledevents" in str(source_of("azure:vm", "0", 0))


@pytest.mark.parametrize("setting", ["file:", "azure", "aws:x", "/tmp/x", "gcp", ""])
def test_a_setting_that_names_nothing_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="expected file:PATH, aws, google, or azure:"):
        source_of(setting, "0", 0)

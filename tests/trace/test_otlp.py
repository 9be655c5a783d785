"""Tests of `fft report --otlp`, with a receiver for its contents and with the collector rotel."""

from __future__ import annotations

import gzip
import importlib.util
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from traced import TracedJob
from typer.testing import CliRunner
from waiting import wait_until

from fft.cli import app
from fft.errors import FftError
from fft.trace.figures import FIGURES, plain
from fft.trace.report import figures_of

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry is missing")

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces_pb

from fft.trace import otlp


class Receiver:
    """A receiver of OTLP/HTTP that answers with the given statuses, then with 200."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.statuses: list[int] = []
        self.url = ""

    def take(self, path: str, body: bytes) -> int:
        """Take a request; return the status of the answer."""
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return status
        if path == "/v1/traces":
            for each in traces_pb.ExportTraceServiceRequest.FromString(body).resource_spans:
                self.spans += [span for scope in each.scope_spans for span in scope.spans]
        else:
            for each in metrics_pb.ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for metric in (m for scope in each.scope_metrics for m in scope.metrics):
                    points = (metric.sum if metric.HasField("sum") else metric.gauge).data_points
                    self.metrics[metric.name] = {
                        "/".join(a.value.string_value for a in p.attributes): p.as_double
                        or p.as_int
                        for p in points
                    }
        return 200


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    received = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            self.send_response(received.take(self.path, body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield received
        server.shutdown()
        thread.join()


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two groups: 5 steps, a rollback, a lost group that comes back and fetches, 3 more steps."""
    job = TracedJob(tmp_path / "traces")
    for _ in range(5):
        job.step()
    job.refuse(job.live()[1], "boom")
    job.settle()
    job.start_anew("1")
    for _ in range(3):
        job.step()
    job.close()
    return job.directory


def of(span: Any) -> dict[str, Any]:
    """Return the attributes of a span."""
    values = ((a.key, a.value) for a in span.attributes)
    return {key: value.string_value or value.int_value for key, value in values}


def test_export_sends_attempts_rollbacks_transfers_and_figures(
    traces: Path, receiver: Receiver
) -> None:
    shown = CliRunner().invoke(app, ["report", "--otlp", f"{receiver.url}/", str(traces)])
    assert shown.exit_code == 0 and f"sent {len(receiver.spans)} spans" in shown.stdout
    attempts = {span.span_id: span for span in receiver.spans if span.name == "attempt"}
    parts = [span for span in receiver.spans if span.name != "attempt"]
    assert len(attempts) == len({(of(a)["fft.epoch"], of(a)["fft.txn"]) for a in attempts.values()})
    for part in parts:
        whole = attempts[part.parent_span_id]
        assert part.trace_id == whole.trace_id
        assert whole.start_time_unix_nano <= part.start_time_unix_nano
        assert part.start_time_unix_nano <= part.end_time_unix_nano <= whole.end_time_unix_nano
        assert of(part)["fft.txn"] == of(whole)["fft.txn"]
    steps = [of(span) for span in parts if span.name == "step"]
    commits = Counter(each["fft.step"] for each in steps if each["fft.outcome"] == "committed")
    figures = plain(figures_of(traces))
    assert sorted(commits) == list(range(figures["commits"])) and commits[0] == 2
    assert {each["fft.outcome"] for each in steps} == {"committed", "rolled back", "lost"}
    rollbacks = [of(span) for span in parts if span.name == "rollback"]
    assert len([each for each in rollbacks if "boom" in each["fft.cause"]]) == 2
    (fetched,) = [of(span) for span in parts if span.name == "transfer"]
    assert fetched["fft.bytes"] == figures["healed_bytes"]["1"] and fetched["fft.group"] == "1"
    for name, value in figures.items():
        if value not in (None, {}):
            expected = value if isinstance(value, dict) else {"": value}
            assert receiver.metrics[f"fft.{name}"] == pytest.approx(expected), name


def test_second_export_has_the_same_ids_and_another_run_has_others(
    traces: Path, receiver: Receiver, tmp_path: Path
) -> None:
    def ids() -> set[tuple[bytes, bytes]]:
        receiver.spans.clear()
        sent, _ = otlp.export(traces, receiver.url)
        found = {(span.trace_id, span.span_id) for span in receiver.spans}
        assert len(found) == sent > 20, "each span has an id of its own"
        return found

    first = ids()
    receiver.statuses = [400]
    with pytest.raises(FftError, match="Export the run again"):
        ids()
    assert ids() == first
    traces = traces.rename(tmp_path / "moved")
    assert ids() == first
    job = TracedJob(tmp_path / "other")
    for _ in range(12):
        job.step()
    job.close()
    traces = job.directory
    for path in traces.glob("*.jsonl"):  # simulated jobs begin at the same time
        path.write_text(path.read_text().replace('"wall":0.', '"wall":7.', 1))
    assert not ids() & first


def test_export_repeats_a_batch_that_the_collector_refuses_for_now(
    traces: Path, receiver: Receiver
) -> None:
    receiver.statuses = [503]
    sent, _ = otlp.export(traces, receiver.url)
    assert sent == len(receiver.spans) > 20


def test_export_fails_if_the_collector_refuses_a_batch(
    traces: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "_BATCH", 10)
    receiver.statuses = [200, 400]
    with pytest.raises(FftError, match="has accepted 10 spans, and not the next 10"):
        otlp.export(traces, receiver.url)
    receiver.statuses = [200] * 3 + [400]
    monkeypatch.setattr(otlp, "_BATCH", 15)
    with pytest.raises(FftError, match="not accepted the metrics"):
        otlp.export(traces, receiver.url)


def test_export_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("opentelemetry.exporter")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "fft.trace.otlp")
    with pytest.raises(FftError, match=r"pip install 'fft-torch\[otlp\]'"):
        importlib.import_module("fft.trace.otlp")


# --- a collector ---


def agent() -> Path | None:
    """Return the program of the package rotel, or None if it is not installed."""
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).with_name("rotel-agent")


@contextmanager
def collector(onward: str, log: Path) -> Iterator[str]:
    """Run rotel, which sends what it accepts to the URL ``onward``; yield its own URL."""
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    http, grpc = (f"127.0.0.1:{each.getsockname()[1]}" for each in free)
    for each in free:
        each.close()
    command = [str(agent()), "start", "--exporter", "otlp", "--otlp-exporter-endpoint", onward]
    command += ["--otlp-exporter-protocol", "http"]
    command += ["--otlp-http-endpoint", http, "--otlp-grpc-endpoint", grpc]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            wait_until(lambda: is_open(http) or process.poll() is not None, "rotel listens")
            assert process.poll() is None, log.read_text()
            yield f"http://{http}"
        finally:
            process.terminate()


def is_open(address: str) -> bool:
    host, port = address.split(":")
    with suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


@pytest.mark.skipif(agent() is None, reason="rotel is not installed (pip: rotel)")
def test_collector_passes_on_all_that_was_exported(
    traces: Path, receiver: Receiver, tmp_path: Path
) -> None:
    with collector(receiver.url, tmp_path / "log") as url:
        sent, figures = otlp.export(traces, url)
        assert sent > 20 and figures > 10
        # by id: a request whose answer comes late is sent again
        wait_until(lambda: len({span.span_id for span in receiver.spans}) == sent, "all spans")
        measured = figures_of(traces)
        names = {f"fft.{figure.name}" for figure in FIGURES if figure.values(measured)}
        wait_until(lambda: receiver.metrics.keys() == names, "all figures with values")

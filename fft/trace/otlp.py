"""``fft report --otlp``: send a run to an OTLP collector, from its trace files.

Steps, rollbacks and transfers become spans with the times of the trace; the figures become metrics.
Each batch is sent by this process before the next one is made, so nothing is dropped: a batch that
the collector does not accept ends the export with an error.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fft.errors import FftError
from fft.trace.figures import FIGURES, Figure
from fft.trace.format import scope_folders, scope_of
from fft.trace.happenings import COMMITTED, ROLLED_BACK, Happening, happenings
from fft.trace.history import History
from fft.trace.lines import parsed
from fft.trace.read import trace_files
from fft.trace.report import history_of
from fft.util.version import __version__

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.metrics import Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Status, StatusCode, set_span_in_context
except ImportError as error:
    raise FftError(
        f"fft report --otlp needs OpenTelemetry ({error}): pip install 'fft-torch[otlp]'"
    ) from error

_BATCH = 512
"""Least number of spans in a request."""
_OPEN = 64
"""Attempts of the job that are open at a time; their ranks end them at different times."""
_SENT = ("step", "rollback", "transfer")
"""Kinds of activities that become spans."""


class _Ids(IdGenerator):  # type: ignore[misc]  # opentelemetry has no types here
    """Derives ids from the run, so that each export of a run has the same ones.

    Args:
        directory: The traces. The header that was written first identifies the run, also while it
            goes on and after the directory was moved.
    """

    def __init__(self, directory: Path) -> None:
        heads = [parsed(_first_line(path)) for path in trace_files(directory)]
        starts = ((head.wall, head.h) for head in heads if head is not None)
        self._run = min(starts, default=None)  # None: no process has written a line yet
        self.trace: tuple[object, ...] = ()
        """Scope and token of the attempt whose spans follow."""
        self.span: tuple[object, ...] = ()
        """Kind, rank and line of the span that follows; empty for that of the attempt."""

    def generate_trace_id(self) -> int:
        return self._derived(16, self.trace)

    def generate_span_id(self) -> int:
        return self._derived(8, self.trace + self.span)

    def _derived(self, size: int, place: tuple[object, ...]) -> int:
        text = repr((self._run, place)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "big") or 1


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


class _Spans:
    """The spans of one scope: one for each attempt of the job, with those of its ranks in it."""

    def __init__(self, tracer: Any, ids: _Ids, send: Callable[[Any], None], scope: str) -> None:
        self._tracer, self._ids, self._send = tracer, ids, send
        self._scope = {"fft.scope": scope} if scope else {}
        self._attempts: OrderedDict[tuple[int, int], list[Happening]] = OrderedDict()

    def add(self, found: Happening) -> None:
        """Take what happened in an attempt, and send the oldest attempt if many are open."""
        if found.kind not in _SENT:
            return
        self._attempts.setdefault(found.token, []).append(found)
        if len(self._attempts) > _OPEN:
            self._end(*self._attempts.popitem(last=False))

    def end(self) -> None:
        """Send the attempts that are left."""
        while self._attempts:
            self._end(*self._attempts.popitem(last=False))

    def _end(self, token: tuple[int, int], parts: list[Happening]) -> None:
        names = {"fft.epoch": token[0], "fft.txn": token[1], **self._scope}
        start, end = min(part.start for part in parts), max(part.end for part in parts)
        self._ids.trace, self._ids.span = (self._scope.get("fft.scope", ""), *token), ()
        whole = self._tracer.start_span("attempt", start_time=_ns(start), attributes=names)
        context = set_span_in_context(whole)
        for part in parts:
            self._send(self._part(part, context, names))
            if part.kind == "step":
                whole.set_attributes(_attributes(part))
            if part.outcome in (COMMITTED, ROLLED_BACK):  # not of a rank that was lost
                whole.set_attribute("fft.outcome", part.outcome)
        whole.end(_ns(end))
        self._send(whole)

    def _part(self, part: Happening, context: Any, names: dict[str, Any]) -> Any:
        """Return the span of a rank."""
        group, _, rank = part.rank.rpartition("/")
        names = {**names, "fft.group": group, "fft.rank": int(rank), **_attributes(part)}
        if part.outcome:
            names["fft.outcome"] = part.outcome
        start = _ns(part.start)
        self._ids.span = part.kind, part.rank, part.line
        span = self._tracer.start_span(part.kind, context, start_time=start, attributes=names)
        if part.parts[1:]:
            span.add_event("vote", timestamp=_ns(part.parts[1][1]))
        if part.outcome not in ("", COMMITTED):
            span.set_status(Status(StatusCode.ERROR, part.outcome))
        span.end(_ns(part.end))
        return span


def _attributes(part: Happening) -> dict[str, str | int]:
    return {f"fft.{name}": value for name, value in part.facts.items()}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class _Sender:
    """Sends spans in batches, and counts those that the collector has accepted."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._exporter = OTLPSpanExporter(endpoint=f"{url}/v1/traces")
        self._waiting: list[Any] = []
        self.sent = 0

    def add(self, span: Any) -> None:
        self._waiting.append(span)
        if len(self._waiting) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Send the spans that wait. Raises FftError if the collector does not accept them."""
        if not self._waiting:
            return
        if self._exporter.export(self._waiting) is not SpanExportResult.SUCCESS:
            raise FftError(
                f"{self._url}: the collector has accepted {self.sent} spans, and not the next "
                f"{len(self._waiting)}; the log above has the reason. Export the run again"
            )
        self.sent += len(self._waiting)
        self._waiting = []


def _send_metrics(url: str, resource: Any, figures: History) -> int:
    """Send the figures; return their number. Raises FftError if they are not accepted."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], resource=resource)
    meter = provider.get_meter("fft", __version__)
    for figure in FIGURES:
        is_counter = figure.kind == "counter"
        make = meter.create_observable_counter if is_counter else meter.create_observable_gauge
        make(f"fft.{figure.name}", [_observer(figure, figures)], description=figure.text)
    data = reader.get_metrics_data()
    sent = OTLPMetricExporter(endpoint=f"{url}/v1/metrics").export(data)
    provider.shutdown()
    if sent is not MetricExportResult.SUCCESS:
        raise FftError(
            f"{url}: the collector has not accepted the metrics; the log above has the reason"
        )
    return len(FIGURES)


def _observer(figure: Figure, figures: History) -> Callable[[Any], list[Any]]:
    def observe(_: Any) -> list[Any]:
        values = figure.values(figures)
        return [
            Observation(value, dict(zip(figure.labels, of, strict=True))) for of, value in values
        ]

    return observe


def export(directory: Path, url: str) -> tuple[int, int]:
    """Send the run in ``directory`` to the collector at ``url``; return the spans and figures sent.

    Args:
        directory: The traces of one start of a job.
        url: Base URL of the collector's OTLP/HTTP receiver, such as ``http://127.0.0.1:4318``.
            The variables ``OTEL_EXPORTER_OTLP_…`` set headers, certificates and timeouts.

    Raises:
        FftError: There is no trace, or the collector does not accept everything.
    """
    url = url.rstrip("/")
    names = {"service.name": "fft", "service.instance.id": str(directory.resolve())}
    resource = Resource.create(names)
    sender = _Sender(url)
    ids = _Ids(directory)
    tracer = TracerProvider(resource=resource, id_generator=ids).get_tracer("fft", __version__)
    for folder in scope_folders(directory):
        spans = _Spans(tracer, ids, sender.add, scope_of(directory, folder))
        for found in happenings(folder):
            spans.add(found)
        spans.end()
    sender.flush()
    return sender.sent, _send_metrics(url, resource, history_of(directory))

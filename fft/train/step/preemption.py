"""Notices of a preemption, and the clock that says when a drain must begin."""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

from fft.errors import ConfigError
from fft.messages.protocol import Peer
from fft.protocol.state import Config, Local, coordinator, member_peers, waited_for

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Seconds between two polls. Google gives 30 s from its notice to the end, Azure at least as
much."""
_HTTP_TIMEOUT_S = 2.0
_LONGEST_BODY = 1 << 20
_JOIN_S = 2 * _HTTP_TIMEOUT_S + 1.0
_SAME_S = 0.1
"""Deadlines that differ by less are considered equal, since a time of day is converted to seconds
at each poll."""
_FORM = (
    'leave it empty, or write JSON such as {"within": 30} or {"deadline": "2030-01-31T12:00:00Z"} '
    '(or Unix seconds), optionally with a "reason"'
)


@dataclass(frozen=True)
class Notice:
    """This process must end ``within_s`` seconds from now, or soon if that is None.

    Raises ``ConfigError`` for an invalid time.
    """

    reason: str
    within_s: float | None = None

    def __post_init__(self) -> None:
        if self.within_s is not None and not 0 <= self.within_s < math.inf:
            raise ConfigError(
                f"within {self.within_s} s: expected a finite number of seconds, 0 or more, or None"
            )


class NoticeSource(Protocol):
    """A source of preemption notices."""

    def poll(self) -> Notice | None:
        """Return the current notice, or None if there is none.

        Called on a thread of FFT. If it raises, each different error is logged once and the poll is
        repeated. A poll that blocks delays a shutdown.
        """


class Earliest:
    """The earliest deadline of several notices; it only ever becomes earlier. Pure."""

    def __init__(self) -> None:
        self.notice: Notice | None = None
        """The notice with the earliest deadline; before there is a deadline, the first notice."""
        self.deadline: float | None = None
        """In seconds, on the clock of ``now``; None if no notice had a deadline."""

    def take(self, notice: Notice, now: float) -> bool:
        """Take a notice in; return whether it is the first, the first with a deadline, or an
        earlier one."""
        deadline = None if notice.within_s is None else now + notice.within_s
        if self.notice is not None:
            if deadline is None:
                return False
            if self.deadline is not None and deadline > self.deadline - _SAME_S:
                return False
        self.notice, self.deadline = notice, deadline
        return True


class Poller:
    """Polls a source every ``interval_s`` seconds, on a thread that lives until ``close``."""

    def __init__(
        self,
        source: NoticeSource,
        on_news: Callable[[Notice], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Start the thread, which calls ``on_news`` with each new notice."""
        self._source = source
        self._on_news = on_news
        self._interval_s = interval_s
        self._closed = threading.Event()
        self._earliest = Earliest()
        self._errors: set[str] = set()
        name = f"fft-notice-{type(source).__name__}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                notice = self._source.poll()
            except Exception as error:  # noqa: BLE001 - the user's code: whatever it is, go on
                self._tell(f"{type(error).__name__}: {error}"[:500])
            else:
                if notice is not None and self._earliest.take(notice, time.monotonic()):
                    self._on_news(notice)
            self._closed.wait(self._interval_s)

    def _tell(self, error: str) -> None:
        if error not in self._errors and len(self._errors) < 100:
            self._errors.add(error)
            logger.warning("polling %s failed, and is repeated: %s", self._source, error)

    def close(self) -> None:
        """End the thread after the poll in progress. Idempotent."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)


# --- a file -------------------------------------------------------------------------------------


class FileNotice:
    """A notice given by the existence of a file, whose content may give deadline and reason.

    The file is empty or JSON with ``within`` (seconds from when the file was written) or
    ``deadline`` (a time in ISO form, UTC by default, or in Unix seconds), and optionally
    ``reason``. Any other content counts as a notice without a deadline, and a warning is logged.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._warned = ""

    def __str__(self) -> str:
        return f"the notice file {self._path}"

    def poll(self) -> Notice | None:
        """Read the file. Raises OSError if it exists but cannot be read."""
        try:
            with self._path.open("rb") as file:
                text = file.read(_LONGEST_BODY).decode("utf-8", "replace").strip()
                age = max(0.0, time.time() - self._path.stat().st_mtime)
        except FileNotFoundError:
            return None
        reason = f"{self._path} exists"
        if not text:
            return Notice(reason)
        try:
            return _file_content(text, reason, age)
        except (ValueError, TypeError) as error:
            if text != self._warned:  # it may be half written; then it is read again
                self._warned = text
                logger.warning(
                    "%s: invalid content (%s), so the notice has no deadline; %s",
                    self,
                    error,
                    _FORM,
                )
            return Notice(reason)


def _file_content(text: str, reason: str, age: float) -> Notice:
    content = json.loads(text)
    if (
        not isinstance(content, dict)
        or not content
        or not content.keys() <= {"within", "deadline", "reason"}
    ):
        raise ValueError("unknown content")
    if "within" in content and "deadline" in content:
        raise ValueError("give either within or deadline, not both")
    reason = str(content.get("reason", reason))[:500]
    if "within" in content:
        return Notice(reason, max(0.0, _number(content["within"]) - age))
    if "deadline" in content:
        return Notice(reason, _until(content["deadline"]))
    return Notice(reason)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)


def _until(when: Any) -> float:
    """Return the seconds until a time in ISO form or Unix seconds; 0 if it has passed."""
    if isinstance(when, str):
        moment = datetime.fromisoformat(when)
        at = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    else:
        at = _number(when)
    return max(0.0, at - time.time())


# --- metadata servers ---------------------------------------------------------------------------

Read = Callable[[int, bytes], Notice | None]
"""Converts (status, body) into a notice, or None. Raises for an unknown answer."""


class HttpNotice:
    """A notice given by a server's answer to a GET request, converted by ``read``.

    The request never goes through a proxy. The class methods ``aws``, ``google`` and ``azure``
    create the sources of these clouds.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        *,
        read: Read,
        timeout_s: float = _HTTP_TIMEOUT_S,
    ) -> None:
        """Set up the request.

        Args:
            headers: A mapping, or a function that is called before each poll and may raise.
            read: Converts status and body into a notice.
            timeout_s: Limit for one request in seconds.
        """
        self._url = url
        self._headers = headers if callable(headers) else lambda fixed=headers or {}: fixed
        self._read = read
        self._timeout_s = timeout_s

    def __str__(self) -> str:
        return f"the notice server {self._url}"

    def poll(self) -> Notice | None:
        """Send the request.

        Raises OSError without a reply, and passes on exceptions of ``read``.
        """
        status, body = _http("GET", self._url, self._headers(), self._timeout_s)
        return self._read(status, body)

    @classmethod
    def aws(cls, base: str = "http://169.254.169.254") -> HttpNotice:
        """Interruption of an EC2 Spot Instance, announced two minutes before; IMDSv2."""
        url = f"{base}/latest/meta-data/spot/instance-action"
        return cls(url, _AwsToken(f"{base}/latest/api/token"), read=read_aws)

    @classmethod
    def google(cls, base: str = "http://metadata.google.internal") -> HttpNotice:
        """Preemption of a Compute Engine Spot VM, announced 30 s before."""
        url = f"{base}/computeMetadata/v1/instance/preempted"
        return cls(url, {"Metadata-Flavor": "Google"}, read=read_google)

    @classmethod
    def azure(cls, vm: str, base: str = "http://169.254.169.254") -> HttpNotice:
        """Scheduled Events that end or restart ``vm``, the name of this machine in Azure.

        All machines of a scale set receive the events of every machine in it.
        """
        url = f"{base}/metadata/scheduledevents?api-version=2020-07-01"
        return cls(
            url, {"Metadata": "true"}, read=lambda status, body: read_azure(status, body, vm)
        )


def _http(method: str, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read(_LONGEST_BODY)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(_LONGEST_BODY)


class _AwsToken:
    """The header of an IMDSv2 session, renewed before it expires."""

    _LIFE_S = 600

    def __init__(self, url: str) -> None:
        self._url = url
        self._token = ""
        self._until = -math.inf

    def __call__(self) -> Mapping[str, str]:
        if time.monotonic() >= self._until:
            life = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._LIFE_S)}
            status, body = _http("PUT", self._url, life, _HTTP_TIMEOUT_S)
            if status != 200:
                raise ConfigError(f"{self._url} answers {status} to the request for a token")
            # A machine that was moved or resumed may have lost the session: renew it often.
            self._token, self._until = body.decode("ascii"), time.monotonic() + self._LIFE_S / 10
        return {"X-aws-ec2-metadata-token": self._token}


def read_aws(status: int, body: bytes) -> Notice | None:
    """Read ``spot/instance-action``: 404 without an interruption, else its action and time."""
    if status == 404:
        return None
    content = _json(status, body, "instance-action")
    action, when = str(content["action"]), str(content["time"])
    return Notice(f"EC2 will {action} this Spot Instance at {when}", _until(when))


GOOGLE_S = 30.0
"""Seconds from the notice to the end of a Google Spot VM; a best-effort figure of Google's."""


def read_google(status: int, body: bytes) -> Notice | None:
    """Read ``instance/preempted``: FALSE, then TRUE."""
    word = body.decode("ascii", "replace").strip()
    if status != 200 or word not in ("TRUE", "FALSE"):
        raise ConfigError(f"instance/preempted: status {status}, {word[:80]!r}; not TRUE or FALSE")
    return Notice("Compute Engine preempts this VM", GOOGLE_S) if word == "TRUE" else None


_AZURE_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Events that end all processes of the machine. ``Freeze`` is a pause of seconds."""


def read_azure(status: int, body: bytes, vm: str) -> Notice | None:
    """Read ``scheduledevents``: the first event that ends ``vm``. ``NotBefore`` is empty once it
    has begun."""
    events = _json(status, body, "scheduledevents")["Events"]
    found = []
    for event in events:
        if event["EventType"] in _AZURE_ENDS and vm in event["Resources"]:
            when = event.get("NotBefore") or ""
            left = parsedate_to_datetime(when).timestamp() - time.time() if when else 0.0
            reason = (
                f"Azure: {event['EventType']} of {vm}, {f'not before {when}' if when else 'now'}"
            )
            found.append(Notice(reason, max(0.0, left)))
    return min(found, key=lambda notice: notice.within_s or 0.0, default=None)


def _json(status: int, body: bytes, what: str) -> dict[str, Any]:
    if status != 200:
        raise ConfigError(f"{what}: status {status}")
    content = json.loads(body)
    if not isinstance(content, dict):
        raise ConfigError(f"{what}: no JSON object")
    return content


# --- settings -----------------------------------------------------------------------------------


def source_of(setting: str, group: str, rank: int) -> NoticeSource:
    """Return the source that ``FFT_NOTICE`` names.

    ``{group}`` and ``{rank}`` in a path are replaced by those of this process. Raises
    ``ConfigError`` if the setting is unknown.
    """
    kind, _, what = setting.partition(":")
    if kind == "file" and what:
        return FileNotice(what.replace("{group}", group).replace("{rank}", str(rank)))
    if kind == "azure" and what:
        return HttpNotice.azure(what)
    if setting == "aws":
        return HttpNotice.aws()
    if setting == "google":
        return HttpNotice.google()
    raise ConfigError(
        f"FFT_NOTICE={setting!r}: expected file:PATH, aws, google, or azure:NAME-OF-THE-VM"
    )


_LONGEST_WAIT_S = 3600.0
"""Limit for one wait on the queue; deadlines have no limit."""
_SHOWN = 8
"""Maximum number of participants that a message names."""


class Leaver(Protocol):
    """Callbacks of the timer into its process, on the timer's thread."""

    def describe_wait(self) -> str | None:
        """Describe what this participant waits for, or return None if it has left."""

    def leave(self, cause: str, limit_s: float) -> bool:
        """Leave now with a message to the others, or at least stop, within ``limit_s`` seconds.

        Returns whether the others received the message.
        """

    def note(self, name: str, data: dict[str, Any]) -> None:
        """Write a note to the trace, if there is one yet."""


@dataclass(frozen=True)
class _NoticeReceived:
    notice: Notice
    at: float


@dataclass(frozen=True)
class _Exited:
    at: float
    error: str | None


class DrainTimer:
    """The timer of one manager, until ``close``."""

    def __init__(self, leaver: Leaver, margin_s: float) -> None:
        self._leaver = leaver
        self._margin_s = margin_s
        self._events: queue.SimpleQueue[_NoticeReceived | _Exited | None] = queue.SimpleQueue()
        self._earliest = Earliest()
        self._due: float | None = None
        """When to leave without a commit, on the monotonic clock; None for never, or if done."""
        self._over = False
        self._thread = threading.Thread(target=self._run, name="fft-drain", daemon=True)
        self._thread.start()

    # --- any thread, signal handlers too ---

    def on_notice(self, notice: Notice) -> None:
        """Receive a notice, which asks this participant to leave."""
        self._events.put(_NoticeReceived(notice, time.monotonic()))

    def left(self, error: str | None = None) -> None:
        """Record that this participant has left. ``error`` is the class of the error that ended it,
        in which case it has not drained."""
        self._events.put(_Exited(time.monotonic(), error))

    def close(self, limit_s: float = 5.0) -> None:
        """End the thread after the notices received so far. Idempotent."""
        self._events.put(None)
        self._thread.join(limit_s)

    # --- its own thread ---

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._wait())
            except queue.Empty:
                if self._wait() == 0:
                    self._on_deadline()
                continue
            match event:
                case None:
                    return
                case _NoticeReceived():
                    self._take(event.notice, event.at)
                case _Exited():
                    self._on_exit(event.at, event.error)

    def _wait(self) -> float | None:
        if self._due is None:
            return None
        return min(max(0.0, self._due - time.monotonic()), _LONGEST_WAIT_S)

    def _take(self, notice: Notice, at: float) -> None:
        if self._over or not self._earliest.take(notice, at):
            return
        within = notice.within_s
        level = logging.INFO if within is None else logging.WARNING
        by = "" if within is None else f", and must be out within {within:.1f} s"
        logger.log(
            level, "this participant leaves the job with the next commit: %s%s", notice.reason, by
        )
        self._leaver.note("notice", {"reason": notice.reason, "within": within})
        if within is not None:
            self._due = at + time_for_a_commit(within, self._margin_s)

    def _on_deadline(self) -> None:
        self._due = None
        why = self._leaver.describe_wait()
        if why is None:
            return  # it has left, and its main thread is about to report it
        notice, deadline = self._earliest.notice, self._earliest.deadline
        assert notice is not None and deadline is not None, "only a deadline can run out"
        self._over = True
        left = max(0.0, deadline - time.monotonic())
        cause = f"{notice.reason}; not out {left:.1f} s before the deadline: {why}"
        logger.warning("this participant leaves now, without waiting for a commit: %s", cause)
        self._leaver.note("drain_late", {"reason": notice.reason, "left": left, "why": why})
        if not self._leaver.leave(cause, left):
            logger.error(
                "this participant stops before its deadline, and could not notify the other ranks"
            )
            self._leaver.note("drain_untold", {"reason": notice.reason})

    def _on_exit(self, at: float, error: str | None) -> None:
        deadline, notice = self._earliest.deadline, self._earliest.notice
        self._due = None
        if self._over or notice is None:
            return
        self._over = True
        left = None if deadline is None else deadline - at
        if error is not None:
            logger.warning("this participant has not drained: it stopped with %s", error)
            told = {"reason": notice.reason, "left": left, "error": error}
            self._leaver.note("drain_failed", told)
            return
        if left is not None:
            when = "before" if left >= 0 else "after"
            logger.warning("this participant has left, %.1f s %s its deadline", abs(left), when)
        self._leaver.note("drained", {"reason": notice.reason, "left": left})


def time_for_a_commit(within_s: float, margin_s: float) -> float:
    """Return the seconds of ``within_s`` in which to wait for a commit; the rest is for leaving
    without one."""
    return within_s - min(margin_s, within_s / 2)


# --- descriptions -------------------------------------------------------------------------------


def waiting_for(s: Local, c: Config, now: float) -> str:
    """Describe what a participant that is to leave waits for. ``now`` is in monotonic seconds."""
    what = (
        f"{_describe_state(s, c)}; {s.state} for {now - s.since:.1f} s, step {s.step}, epoch "
        f"{s.token.epoch}"
    )
    return f"{what}; the bus is out of reach" if s.bus_down else what


def _describe_state(s: Local, c: Config) -> str:
    match s.role:
        case "training":
            return "its txn is open, and its main thread has not voted"
        case "voting":
            others = _names(set(member_peers(s)) - {c.me})
            return (
                f"in doubt: it has voted YES, and waits for the decision or for a vote of {others}"
            )
        case "committing" | "last_commit":
            return "the commit is decided, and its main thread still runs the optimizer step"
        case "aborting":
            return "it has asked for a rollback, which is not decided"
        case "rolling_back":
            return "its main thread has not finished the rollback"
        case "healing" if s.head is not None and s.head.kind != "epoch":
            return f"there is no next epoch: {_no_epoch(s, c)}"
        case "healing" if not s.healed:
            return "its main thread builds process groups, or fetches state"
        case "healing":
            return f"in the barrier of its epoch: {_no_begin(s, c)}"
        case "leaving":
            return "it has left with a commit, and waits until the remaining ranks have moved on"
        case "apart":
            return "it is in its local phase, and no other group has its latest state yet"
        case "joining":
            return f"it is in no epoch: {_no_start(s, c)}"
    return "it has not left"


def _no_start(s: Local, c: Config) -> str:
    """Describe which ranks of this group, or how many groups, are missing before the first
    epoch."""
    ranks = [str(r) for r in range(c.world) if r != c.me.rank and (c.me.group, r) not in s.hellos]
    groups = {group for group, _ in s.hellos} | {c.me.group}
    if ranks:
        return f"no message from rank {', '.join(ranks[:_SHOWN])} of this group"
    if s.epoch is None and len(groups) < max(c.min_groups, c.expected_groups):
        return f"only groups {', '.join(sorted(groups)[:_SHOWN])} of {c.expected_groups} are known"
    return "no epoch has admitted it"


def _no_epoch(s: Local, c: Config) -> str:
    if (gathers := coordinator(s)) not in (None, c.me):
        return f"{gathers} collects the acknowledgements and has the missing ones"
    silent = {peer for peer in waited_for(s) if s.stopped.get(peer, (0, 0)) < s.token} - {c.me}
    return f"no acknowledgement from {_names(silent)}" if silent else "too few groups, or no state"


def _no_begin(s: Local, c: Config) -> str:
    if (gathers := coordinator(s)) not in (None, c.me):
        return f"the coordinator {gathers} knows which ranks are missing"
    missing = {peer for peer in member_peers(s) if s.ready.get(peer) != s.token.epoch}
    return (
        f"waiting for {_names(missing - {c.me})}"
        if missing - {c.me}
        else "the coordinator has not ended the barrier"
    )


def _names(peers: set[Peer]) -> str:
    shown = ", ".join(map(str, sorted(peers)[:_SHOWN]))
    return f"{shown} and {len(peers) - _SHOWN} more" if len(peers) > _SHOWN else shown

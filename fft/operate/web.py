"""``fft watch --web``: serve a live page of a job, from the messages that `Watch` receives.

One thread accepts connections, and each connection has a thread. They serve two fixed resources,
the page and the newest state, and change nothing. A request needs a key that is derived from the
job's token. The key gives access to the page, but not to the bus.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fft.bus.addresses import without_password
from fft.bus.token import JobToken
from fft.errors import ConfigError
from fft.operate.job_view import IN_EPOCH, GroupRow, JobModel
from fft.operate.watch import snapshot
from fft.trace.course import TimeLost
from fft.trace.display import cost, figures
from fft.util.listening import HttpHandler, HttpServer, listening_at, url_of

_PAGE = Path(__file__).with_name("web.html")
_SHOWN = 100
"""Maximum number of faults, changes and checkpoints on the page; it shows the newest."""
_POLL_S = 0.1
"""Longest time until the server notices that it is closed, in seconds."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'",
}


def state_of(job: JobModel, url: str, now: float) -> dict[str, Any]:
    """Return all data of the page. ``ago`` is in seconds before ``now``."""
    course, shot = job.course, snapshot(job, now)
    rows = {row.group: row for row in shot.rows}
    rates, lost = course.rates(now), TimeLost(course)
    faults = [
        {
            "n": fault.n,
            "step": fault.step,
            "ago": now - fault.at,
            "cause": fault.cause or "rolled back",
            "cost": cost(fault, course, lost),
            "is_open": fault.cost_s is None,
        }
        for fault in course.faults[-_SHOWN:]
    ]
    changes = [
        {"n": change.n, "step": change.step, "ago": now - change.at, "text": change.text}
        for change in course.changes[-_SHOWN:]
    ]
    return {
        "url": url,
        "lost": job.lost,
        "how": job.how,
        "elapsed": shot.elapsed,
        "since_commit": now - (course.last or job.attached),
        "is_older": job.is_older,
        "present": sum(row.is_present for row in job.rows()),
        "expected": len(shot.rows),
        "step": max((course.step, *(row.step for row in shot.rows))),
        "goal": course.goal.steps,
        "share": course.share_done,
        "left_s": course.left_s(now),
        "steps_per_s": rates and rates[0],
        "samples_per_s": rates and course.samples(rates[1]),
        "figures": figures(shot),
        "fault_count": len(course.faults),
        "faults": faults[::-1],
        "changes": changes[::-1],
        "groups": [{**_group(job, row), "trouble": rows[row.group].trouble} for row in job.rows()],
        "checkpoints": sorted(job.checkpoints.taken)[: -_SHOWN - 1 : -1],
        "notes": [*job.held(), *job.fetches(), *job.troubles()],
        "losses": job.losses_by_presence(),
    }


def _group(job: JobModel, row: GroupRow) -> dict[str, Any]:
    ranks = [
        {
            "rank": number,
            "state": rank.state,
            "is_well": rank.state == IN_EPOCH
            and f"{row.group}/{number}" not in job.stragglers.slow,
            "inc": rank.inc,
            "pid": rank.pid,
            "host": rank.host,
            "why": rank.why,
        }
        for number, rank in sorted(row.ranks.items())
    ]
    return {
        "group": row.group,
        "state": row.state(),
        "is_draining": row.draining,
        "loss": job.losses.get(row.group),
        "ranks": ranks,
        "hosts": sorted({rank.host for rank in row.ranks.values()})
        or ([row.supervisor.host] if row.supervisor else []),
    }


class _Server(HttpServer):
    def __init__(self, listening: socket.socket, key: str) -> None:
        super().__init__(listening, _Handler)
        self.key, self.state = key, b"null"
        self.page = _PAGE.read_bytes()
        self.cookie = f"fft-{listening.getsockname()[1]}"
        """Name of the cookie, with the port, because a browser sends cookies to all ports."""


class _Handler(HttpHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Serve the page or the state, or exchange the key in the address for a cookie."""
        parts = urlsplit(self.path)
        given = parse_qs(parts.query).get("key", [""])[0]
        if parts.path == "/" and self._fits(given):
            cookie = f"{self.server.cookie}={self.server.key}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(303, b"", "text/plain", {"Location": "/", "Set-Cookie": cookie})
        elif not self._has_key():
            text = b"Open the address that `fft watch --web` has printed: it contains the key.\n"
            self._answer(403, text, "text/plain")
        else:
            self.server.waiting.leave(self.request)
            self._serve(parts.path)

    def _serve(self, path: str) -> None:
        """Answer a request that has the key."""
        if path == "/":
            self._answer(200, self.server.page, "text/html; charset=utf-8")
        elif path == "/state.json":
            self._answer(200, self.server.state, "application/json")
        else:
            self._answer(404, b"Not found: expected / or /state.json.\n", "text/plain")

    def _has_key(self) -> bool:
        scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._fits(bearer.strip()):
            return True
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return False
        held = cookies.get(self.server.cookie)
        return held is not None and self._fits(held.value)

    def _fits(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self.server.key.encode())

    def _answer(
        self, status: int, body: bytes, kind: str, more: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        length = {"Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in {**_HEADERS, **length, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class WebView:
    """A page as the output of `Watch`. `close` ends the server."""

    stays = True

    def __init__(self, address: str, bus_url: str, token: JobToken | None) -> None:
        """Start the server.

        Args:
            address: ``[HOST:]PORT``; port 0 takes a free one.
            bus_url: URL of the job's bus, which the page shows.
            token: The job's token.

        Raises:
            ConfigError: There is no token.
            FftError: The address cannot be used.
        """
        if token is None:
            raise ConfigError(
                "--web needs the job's token, because the key of the page is derived from it: set "
                "FFT_TOKEN_FILE"
            )
        self._bus_url = without_password(bus_url)
        key = token.key("web page").hex()
        self._server = _Server(listening_at(address, "--web"), key)
        self.url = f"{url_of(self._server.socket)}/?key={key}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="fft-web"
        )
        self._thread.start()

    def word(self, line: dict[str, object]) -> None:
        """Ignore the event, because the page shows only the state."""

    def state(self, watch: JobModel, now: float) -> None:
        """Replace the state that is served."""
        self._server.state = json.dumps(state_of(watch, self._bus_url, now)).encode()

    def close(self) -> None:
        """Close the socket and end the thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

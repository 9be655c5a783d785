"""The exchange of copies in memory between the hosts of a job, authenticated by its token.

`fft run` serves the folder of its host by HTTP. A request has a nonce and a keyed hash of itself; a
text has a keyed hash of the answer, and a file is compared with the SHA-256 that the client
expects. A request to store a file uses a nonce of the server, which is valid once. Without the
job's token there is no server. The content is not encrypted, as in the transfer of state to
joiners.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from fft.bus import ErrorBus
from fft.bus.token import JobToken, derive
from fft.checkpoints.copies import (
    PART,
    SOURCES,
    Checked,
    HeldCopies,
    Listing,
    keep_newest,
    step_of,
)
from fft.checkpoints.files import Manifest, file_stem
from fft.checkpoints.stores import LocalStore
from fft.util.listening import REQUEST_S, HttpHandler, HttpServer, listening_on, url_of

_FILE = re.compile(
    r"step-[0-9]{1,18}\.partial-[0-9a-z-]{1,64}/g[A-Za-z0-9_.-]{1,200}r[0-9]{1,6}\.(json|safetensors|part)"
)
_CHUNK = 1024 * 1024
_MOST_TEXT = 64 * _CHUNK
"""Maximum size of a text, in bytes."""
_NONCES = 1024
"""Number of nonces that the server remembers."""
_ANSWER_S = 300.0
"""Time limit for an answer, in seconds: the server may have to read its files for it."""
_CONNECT_S = 3.0
_AGAIN_S = 60.0
"""Time for which a host is left alone that has not taken a copy, in seconds."""
_POLL_S = 0.1
"""Longest time until the server notices that it is closed, in seconds."""

logger = logging.getLogger(__name__)


HOSTS = "memory/hosts"
"""Register of a start of a job that lists its hosts."""


class HostEntry(NamedTuple):
    """A host of the job whose `fft run` serves copies."""

    url: str
    parts: int
    """Number of parts of groups that it runs, without spares."""
    place: str
    """Its host name and its folder, which identify it."""


def hosts_of(bus: ErrorBus, held: bytes | None = None) -> list[HostEntry]:
    """Return the hosts of a start, by the value of its register if that is given.

    Raises BusError.
    """
    held = bus.read(HOSTS) if held is None else held
    return [] if held is None else [HostEntry(*each) for each in json.loads(held)]


def place_of(root: Path) -> str:
    """Return the `HostEntry.place` of a folder on this host."""
    return f"{socket.gethostname()}:{root}"


def key_of(token: JobToken) -> bytes:
    """Return the key of the exchange."""
    return token.key("fft1", "copies in memory")


class CopiesServer(HttpServer):
    """Serves the folder of this host. Owns a thread, and one for each connection.

    Attributes:
        texts: Further texts by name.
    """

    def __init__(self, address: str, copies: HeldCopies, key: bytes, limit: int) -> None:
        """Start the server at a free port of ``address``.

        Args:
            limit: Maximum size of the folder with files of other hosts, in bytes.

        Raises:
            BusError: The address cannot be listened on.
        """
        super().__init__(listening_on(address), _Handler)
        self.copies, self.key = copies, key
        self.texts: dict[str, bytes] = {}
        self._limit, self._coming = limit, 0
        self._lock = threading.Lock()
        self._nonces = deque[str](maxlen=_NONCES)
        self.url = url_of(self.socket)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name="fft-copies", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the server."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def text(self, name: str) -> bytes | None:
        """Return a text, or None if there is none with this name."""
        if name == "nonce":
            with self._lock:
                self._nonces.append(secrets.token_hex(16))
                return self._nonces[-1].encode()
        if name == "listing":
            return self.copies.listing().model_dump_json().encode()
        if name.startswith("checked/"):
            return self.copies.checked(name.removeprefix("checked/")).model_dump_json().encode()
        return self.texts.get(name)

    def takes(self, nonce: str) -> bool:
        """Return whether this is an unused nonce of this server."""
        with self._lock, suppress(ValueError):
            self._nonces.remove(nonce)
            return True
        return False

    @contextmanager
    def room(self, size: int) -> Iterator[bool]:
        """Reserve so many bytes while the block runs; yield whether there is room for them."""
        with self._lock:
            files = self.copies.root.glob("step-*/*")
            used = self._coming + sum(map(_size_of, files))
            fits = used + size <= self._limit
            self._coming += size if fits else 0
        try:
            yield fits
        finally:
            with self._lock:
                self._coming -= size if fits else 0


class _Handler(HttpHandler):
    server: CopiesServer

    def do_GET(self) -> None:
        """Serve a text or a file."""
        name = self.path.lstrip("/")
        nonce = self.headers.get("Fft-Nonce", "")
        if not self._is_authentic(nonce):
            return
        try:
            if _FILE.fullmatch(name):
                with (self.server.copies.root / name).open("rb") as file:
                    self._begin(200, os.fstat(file.fileno()).st_size)
                    self.connection.sendfile(file)
            elif (text := self.server.text(name)) is not None:
                self._begin(200, len(text), _answer_tag(self.server.key, nonce, text))
                self.wfile.write(text)
            else:
                self._begin(404)
        except FileNotFoundError:
            self._begin(404)

    def do_PUT(self) -> None:
        """Store a file of a rank of another host."""
        name, nonce = self.path.lstrip("/"), self.headers.get("Fft-Nonce", "")
        if not self._is_authentic(nonce):
            return
        size = self.headers.get("Content-Length", "")
        if not (_FILE.fullmatch(name) and size.isdecimal() and self.server.takes(nonce)):
            self._begin(400)
            return
        with self.server.room(int(size)) as fits:
            if not fits:
                self._begin(507)
                return
            target = self.server.copies.root / name
            target.parent.mkdir(mode=0o700, exist_ok=True)
            if not any(target.parent.glob(f"{target.stem}.*")):
                root, step = self.server.copies.root, step_of(target.parent.name)
                keep_newest(root, target.stem, step)
            taken = _taken(self._chunks(int(size)), target, self.headers.get("Fft-Sha256", ""))
        self._begin(200 if taken else 409, 0, _answer_tag(self.server.key, nonce, b""))

    def _chunks(self, left: int) -> Iterator[bytes]:
        while left and (chunk := self.rfile.read(min(left, _CHUNK))):
            self._incoming.begin()
            left -= len(chunk)
            yield chunk

    def _is_authentic(self, nonce: str) -> bool:
        """Check the request; answer it if it is refused."""
        sha256, tag = self.headers.get("Fft-Sha256", ""), self.headers.get("Fft-Tag", "")
        expected = _request_tag(self.server.key, self.command, self.path, nonce, sha256)
        if not hmac.compare_digest(expected.encode(), tag.encode()):
            self._begin(403)
            return False
        self.server.waiting.leave(self.connection)
        return True

    def _begin(self, status: int, size: int = 0, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.send_header("Fft-Tag", tag)
        self.end_headers()


class PeerCopies:
    """The copies on another host. Methods raise OSError."""

    def __init__(self, url: str, key: bytes) -> None:
        self._url, self._key = url, key

    def listing(self) -> Listing:
        """See `CopiesOfHost.listing`; a host that does not answer has nothing."""
        try:
            return Listing.model_validate_json(self.text("listing"))
        except (OSError, ValueError) as error:
            return Listing(parts={}, problems=(f"{self._url} cannot be asked: {error}",))

    def checked(self, name: str) -> Checked:
        """See `CopiesOfHost.checked`; a host that does not answer has nothing."""
        try:
            return Checked.model_validate_json(self.text(f"checked/{name}"))
        except (OSError, ValueError) as error:
            return Checked(stems=(), problems=(f"{self._url} cannot be asked: {error}",))

    def text(self, name: str) -> bytes:
        """Return a text of the host. Raises OSError if it has none, or it is not authentic."""
        with self._requested("GET", name) as (answer, nonce):
            return self._verified(name, answer, nonce)

    def fetch(self, path: str, target: Path, sha256: str) -> None:
        """Write a file of the host to ``target``.

        Raises OSError if the host has no file there with this SHA-256.
        """
        with self._requested("GET", path) as (answer, _):
            if not _taken(iter(partial(answer.read, _CHUNK), b""), target, sha256):
                raise OSError(f"{self._url}/{path}: its SHA-256 is not that of its copy")

    def store(self, path: str, source: Path, sha256: str) -> None:
        """Store a file with this SHA-256 on the host. Raises OSError if that fails."""
        nonce = self.text("nonce").decode()
        with (
            source.open("rb") as file,
            self._requested("PUT", path, nonce, sha256, file) as (answer, _),
        ):
            self._verified(path, answer, nonce)

    def _verified(self, path: str, answer: HTTPResponse, nonce: str) -> bytes:
        """Return the body of the answer. Raises OSError if it is not authentic."""
        text = answer.read(_MOST_TEXT)
        tag = _answer_tag(self._key, nonce, text).encode()
        if not hmac.compare_digest(tag, (answer.getheader("Fft-Tag") or "").encode()):
            raise OSError(f"{self._url}/{path}: the answer is not from this job")
        return text

    @contextmanager
    def _requested(
        self,
        method: str,
        path: str,
        nonce: str = "",
        sha256: str = "",
        file: BinaryIO | None = None,
    ) -> Iterator[tuple[HTTPResponse, str]]:
        at, nonce = urlsplit(self._url), nonce or secrets.token_hex(16)
        connection = HTTPConnection(at.hostname or "", at.port, _CONNECT_S, blocksize=_CHUNK)
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_S if file is None else REQUEST_S)
            tag = _request_tag(self._key, method, f"/{path}", nonce, sha256)
            headers = {"Fft-Nonce": nonce, "Fft-Tag": tag, "Fft-Sha256": sha256}
            if file is not None:
                headers["Content-Length"] = str(os.fstat(file.fileno()).st_size)
            connection.request(method, f"/{path}", file, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"{self._url}/{path}: {_WHY.get(answer.status, answer.reason)}")
            yield answer, nonce
        except HTTPException as error:
            raise OSError(f"{self._url}/{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()


_WHY = {
    403: "it has another token: use one FFT_TOKEN_FILE on all hosts of the job",
    404: "it is not there any more",
    409: "its SHA-256 is not that of its copy",
    507: "its memory for copies is full",
}


class Deputy:
    """Stores the copies of a rank on another host as well.

    It keeps to one host as long as that takes them, and begins with the next one of the job's list
    after its own, so that hosts have alike much.
    """

    def __init__(self, bus: ErrorBus, root: Path, key: bytes) -> None:
        self._bus, self._root, self._key = bus, root, key
        self._url = ""
        self._failed: dict[str, float] = {}
        """The time of the last failure of a host."""

    def store(self, directory: str, part: Manifest, rank: int) -> str | None:
        """Store the files of a complete copy on another host.

        Returns:
            The address of the host, or None if there is no other one.

        Raises:
            BusError: The list of the hosts cannot be read.
            OSError: No other host takes the copy.
        """
        problem: OSError | None = None
        for url in [self._url] if self._url else self._others():
            try:
                peer = PeerCopies(url, self._key)
                for file in part.files:
                    path = f"{directory}/{file.name}"
                    peer.store(path, self._root / path, file.sha256)
                path = f"{directory}/{file_stem(part.writer, rank)}{PART}"
                sha256 = hashlib.sha256((self._root / path).read_bytes()).hexdigest()
                peer.store(path, self._root / path, sha256)
            except OSError as error:
                self._failed[url], self._url = time.monotonic(), ""
                problem = error
            else:
                self._url = url
                return url
        if problem is not None:
            raise problem
        return None

    def _others(self) -> list[str]:
        """Return the other hosts that have not failed just now, the next one first."""
        hosts, now = hosts_of(self._bus), time.monotonic()
        me = place_of(self._root)
        after = next((n for n, host in enumerate(hosts, 1) if host.place == me), 0)
        turned = hosts[after:] + hosts[:after]
        name = me.partition(":")[0]
        others = [host.url for host in turned if host.place.partition(":")[0] != name]
        return [url for url in others if now > self._failed.get(url, -_AGAIN_S) + _AGAIN_S]


class CopyStore(LocalStore):
    """A folder of copies of which some files may be on other hosts, as `HeldCopies.adopt` noted.

    Args:
        root: The folder.
        key: The key of the exchange, or None if there are no other hosts.

    Attributes:
        fetched: The address of each file that was fetched.
        used: The SHA-256 of each file that was asked for, by its name.
    """

    def __init__(self, root: Path, key: bytes | None) -> None:
        super().__init__(root)
        self._key = key
        self.fetched: dict[str, str] = {}
        self.used: dict[str, str] = {}

    def files(self, directory: str) -> dict[str, int]:
        """Return the size of each file here or on another host."""
        away = {name: size for name, (size, *_) in self._away(directory).items()}
        return away | super().files(directory)

    def digest(self, path: str) -> str:
        """Return the SHA-256 of a file, which is fetched if it is not here."""
        directory, _, name = path.partition("/")
        if name not in super().files(directory) and (found := self._away(directory).get(name)):
            self.used[name] = self._fetch(path, *found)
        else:
            self.used[name] = super().digest(path)
        return self.used[name]

    def _away(self, directory: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(super().read(f"{directory}/{SOURCES}"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return found

    def _fetch(self, path: str, _size: int, sha256: str, places: list[str]) -> str:
        problems = list[str]()
        for url in places:
            at = urlsplit(url)
            assert self._key is not None  # a job without a token has no sources
            try:
                peer = PeerCopies(f"{at.scheme}://{at.netloc}", self._key)
                peer.fetch(at.path.lstrip("/"), self._root / path, sha256)
            except OSError as error:
                logger.warning("a file of a copy in memory cannot be fetched: %s", error)
                problems.append(str(error))
                continue
            self.fetched[path] = url
            return sha256
        raise OSError(f"no host gives {path}: {'; '.join(problems)}")


def copy_store(place: str | Path, token: JobToken | None) -> CopyStore:
    """Return the store of the copies in a folder."""
    return CopyStore(Path(place), None if token is None else key_of(token))


def _taken(chunks: Iterator[bytes], target: Path, sha256: str) -> bool:
    """Write a file; return False, and leave nothing, if it has another SHA-256."""
    new = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}")
    hasher = hashlib.sha256()
    try:
        with new.open("wb") as out:
            for chunk in chunks:
                hasher.update(chunk)
                out.write(chunk)
        if hasher.hexdigest() != sha256:
            return False
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)
    return True


def _size_of(file: Path) -> int:
    with suppress(FileNotFoundError):  # a rank has removed it
        return file.stat().st_size
    return 0


def _request_tag(key: bytes, method: str, path: str, nonce: str, sha256: str) -> str:
    return derive(key, "request", method, path, nonce, sha256).hex()


def _answer_tag(key: bytes, nonce: str, text: bytes) -> str:
    return derive(key, "answer", nonce, hashlib.sha256(text).hexdigest()).hex()

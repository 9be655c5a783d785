"""The job token: the one secret of a job, and the keys that are derived from it.

Only messages from processes with the token are obeyed. The token comes from ``FFT_TOKEN`` or from a
file that only its owner may read (``FFT_TOKEN_FILE``). Its only readable form is ``text()``, which
is for the environment of a child process and for such a file.

Each use has its own key, derived from the token by a labelled HMAC (like HKDF-Expand, RFC 5869), so
a tag that is valid for one use is invalid for every other. HMAC-SHA256 was chosen because every
language has it in its standard library and processors have instructions for it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fft.errors import ConfigError

TOKEN_BYTES = 32
"""Length of a token that ``JobToken.fresh`` makes."""
MIN_BYTES = 16
"""Minimum length of a token; a shorter one could be guessed."""
_MAX_FILE = 4096
_LEAST_DIGITS = 6
"""Minimum number of different digits in a token. 32 random digits have fewer with a probability of
about 1e-12."""

_MEND = "make one with `openssl rand -hex 32`"


class TokenError(ConfigError):
    """A job token cannot be used; the message names its source and never contains the token."""


class JobToken:
    """A job's secret."""

    __slots__ = ("_secret",)

    def __init__(self, text: str, source: str = "the job token") -> None:
        """Parse and check a token.

        Args:
            text: The token as hexadecimal digits.
            source: Where the token comes from, for error messages.

        Raises:
            TokenError: The text is not hexadecimal, is shorter than ``MIN_BYTES``, or has too few
                different digits.
        """
        text = text.strip().lower()
        if len(text) % 2 or not set(text) <= set("0123456789abcdef"):
            raise TokenError(f"{source} is not hexadecimal (two digits for a byte); {_MEND}")
        if len(text) < 2 * MIN_BYTES or len(set(text)) < _LEAST_DIGITS:
            raise TokenError(
                f"{source} can be guessed: it must be at least {MIN_BYTES} random bytes; {_MEND}"
            )
        self._secret = bytes.fromhex(text)

    @classmethod
    def fresh(cls) -> JobToken:
        """Return a new random token."""
        return cls(secrets.token_hex(TOKEN_BYTES))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> JobToken | None:
        """Return the token from ``FFT_TOKEN`` or ``FFT_TOKEN_FILE``, or None if neither is set.

        Raises:
            TokenError: Both are set, or the one that is set does not give a valid token.
        """
        text, path = environ.get("FFT_TOKEN"), environ.get("FFT_TOKEN_FILE")
        if text and path:
            raise TokenError("FFT_TOKEN and FFT_TOKEN_FILE are both set; unset one of them")
        if path:
            try:
                return cls.from_file(Path(path))
            except TokenError as error:
                raise TokenError(
                    f"FFT_TOKEN_FILE: {error}. It goes with its job: unset it to start another one "
                    "by `fft run`, which makes a token of its own"
                ) from None
        return cls(text, "FFT_TOKEN") if text else None

    @classmethod
    def from_file(cls, path: Path) -> JobToken:
        """Return the token in a file that only its owner can read.

        Raises:
            TokenError: The file cannot be read, belongs to another user than root, is accessible
                to others, or does not hold a valid token.
        """
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                data = file.read(_MAX_FILE)
        except OSError as error:
            raise TokenError(
                f"the token file {path} cannot be read: {error.strerror or error}"
            ) from None
        if found.st_uid not in (os.geteuid(), 0):
            raise TokenError(
                f"the token file {path} belongs to the user with id {found.st_uid}, who knows the "
                f"token: use a file of your own, or run `chown {os.geteuid()} {path}`"
            )
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TokenError(f"others may read the token file {path}; run `chmod 600 {path}`")
        return cls(data.decode("ascii", "replace"), f"the token in {path}")

    def save(self, path: Path) -> None:
        """Write a file that `from_file` accepts; an existing file is replaced.

        Raises:
            TokenError: The file cannot be written.
        """
        try:
            # Overwriting would keep the old file's mode, and processes that have it open.
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(self.text() + "\n")
        except OSError as error:
            raise TokenError(f"the token file {path} cannot be written: {error}") from error

    def save_new(self, path: Path) -> None:
        """Write such a file unless it exists; of several processes that write, one succeeds.

        Raises:
            TokenError: The file cannot be written.
        """
        if not path.exists():
            new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
            self.save(new)
            with contextlib.suppress(FileExistsError):
                os.link(new, path)
            new.unlink()

    def text(self) -> str:
        """Return the secret, for the environment of a child process of the job; never print it."""
        return self._secret.hex()

    def key(self, *label: str) -> bytes:
        """Return the 32-byte key for ``label``; it reveals neither the token nor other keys."""
        return derive(self._secret, *label)

    def __repr__(self) -> str:
        return "<a job token>"

    def __reduce__(self) -> str:
        raise TokenError("a job token must not be pickled or copied")


TOKEN_USER: Final = "job-token"
"""The user of NATS servers that FFT starts; a URL names no password."""


def password_of(token: JobToken) -> str:
    """Return the password of `TOKEN_USER`; it reveals neither the token nor other keys."""
    return token.key("nats login").hex()


def derive(secret: bytes, *label: str) -> bytes:
    """Return the HMAC-SHA256 of the label's parts, each as a netstring, so all labels differ."""
    parts = (part.encode() for part in label)
    return mac(secret, b"".join(b"%d:%s," % (len(part), part) for part in parts))


def mac(key: bytes, data: bytes) -> bytes:
    """Return the HMAC-SHA256 of ``data``, 32 bytes."""
    return hmac.digest(key, data, "sha256")

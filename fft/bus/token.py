"""The job token: the one secret of a job, and the keys that are derived from it.

Processes with the token are obeyed, others are not. It comes from ``FFT_TOKEN`` or from a file that
only its owner may read (``FFT_TOKEN_FILE``), and goes nowhere else: its only readable form is
``text()``, which is for the environment of a child and for such a file.

Every use has a key of its own, derived from the token by a labelled HMAC (as HKDF's second half,
RFC 5869), so that what is valid in one place is invalid in another. HMAC-SHA256 because every
language has it in its standard library, and processors have instructions for it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from fft.util.errors import FftError

TOKEN_BYTES = 32
"""Of a token made here."""
MIN_BYTES = 16
"""A token with less could be guessed."""
_MAX_FILE = 4096
_LEAST_DIGITS = 6
"""Different digits in a token. 32 random ones have fewer once in a million million times."""

_MEND = "make one with `openssl rand -hex 32`"


class TokenError(FftError):
    """A job token cannot be used; the message says where it is from, and never what it is."""


class JobToken:
    """A job's secret."""

    __slots__ = ("_secret",)

    def __init__(self, text: str, source: str = "the job token") -> None:
        """``text``: hexadecimal digits; ``source`` names where they are from.

        Raises:
            TokenError: not hexadecimal, shorter than ``MIN_BYTES``, or of few different digits.
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
        """A new random token."""
        return cls(secrets.token_hex(TOKEN_BYTES))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> JobToken | None:
        """What ``FFT_TOKEN`` or ``FFT_TOKEN_FILE`` say; None: neither is set.

        Raises:
            TokenError: both are set, or what they name is no usable token.
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
        """The token in a file that only its owner can read.

        Raises:
            TokenError: no such file, others may read it, or it holds no usable token.
        """
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read(_MAX_FILE)
        except OSError as error:
            raise TokenError(
                f"the token file {path} cannot be read: {error.strerror or error}"
            ) from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TokenError(f"others may read the token file {path}; run `chmod 600 {path}`")
        return cls(data.decode("ascii", "replace"), f"the token in {path}")

    def save(self, path: Path) -> None:
        """Write a file that `from_file` takes; whatever was there is replaced.

        Raises:
            TokenError: it cannot be written.
        """
        try:
            path.unlink(missing_ok=True)  # else an old file's mode, and who has it open, would stay
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(self.text() + "\n")
        except OSError as error:
            raise TokenError(f"the token file {path} cannot be written: {error}") from error

    def text(self) -> str:
        """The secret itself, for the environment of a child of the job. Print it nowhere."""
        return self._secret.hex()

    def key(self, *label: str) -> bytes:
        """The 32-byte key for what ``label`` names; it tells nothing about token or other keys."""
        return derive(self._secret, *label)

    def __repr__(self) -> str:
        return "<a job token>"

    def __reduce__(self) -> str:
        raise TokenError("a job token must not be pickled or copied")


def derive(secret: bytes, *label: str) -> bytes:
    """HMAC-SHA256 of the label's parts, each as a netstring, so that no two labels are alike."""
    parts = (part.encode() for part in label)
    return mac(secret, b"".join(b"%d:%s," % (len(part), part) for part in parts))


def mac(key: bytes, data: bytes) -> bytes:
    """HMAC-SHA256, 32 bytes."""
    return hmac.digest(key, data, "sha256")

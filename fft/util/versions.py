"""The releases of Python, torch and torchft that FFT was tried with (docs/versions.md)."""

from __future__ import annotations

import os
import platform
import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, requires, version

from fft.util.version import __version__

_TRIED = {
    "Python": ("3.11", "3.11 to 3.13"),
    "torch": ("2.11", "2.11 to 2.15"),
    "torchft": ("0.2", "0.2"),
}
"""The oldest release that can work, and the range that was tried; its end is the newest one."""
_PACKAGES = {"torch": ("torch",), "torchft": ("torchft", "torchft-nightly")}


def found(name: str) -> str | None:
    """Return the installed version of Python, torch or torchft; None without it."""
    if name == "Python":
        return platform.python_version()
    for package in _PACKAGES[name]:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def trouble(name: str, number: str | None) -> tuple[bool, str] | None:
    """Judge version ``number`` of ``name``, where None stands for a package that is missing.

    A nightly or vendor build, such as 2.12.0a0+nv26.04, counts as not tried, because its source may
    differ from that of the release.

    Returns:
        Whether FFT cannot work with it, and the reason; None if it was tried.
    """
    least, tried = _TRIED[name]
    if number is None:
        fix = f"pip install '{name}>={least}'"
        if name == "torchft" and sys.version_info >= (3, 14):  # as of its nightly of 2026-10-26
            fix = "it has no wheel for Python 3.14, so use 3.13, or build its source, with Rust"
        return True, f"{name} is not installed: {fix}"
    first, last = _release(least), _release(tried.split()[-1])
    if _release(number) < first:
        return True, f"{name} {number} is too old, FFT needs {least} or newer"
    if _release(number) > last or re.search(r"\d(a|b|rc)\d|dev|\+.*(nv|git)", number):
        return False, f"{name} {number} was not tried with this FFT, only the releases {tried}"
    return None


def check() -> None:
    """Raise ImportError if FFT cannot work with what is installed; warn of what was not tried."""
    for name in _TRIED:
        if (judgement := trouble(name, found(name))) is not None:
            is_fatal, reason = judgement
            if is_fatal:
                raise ImportError(f"fft: {reason} (`fft doctor` shows all versions)")
            warnings.warn(f"fft: {reason} (`fft doctor`)", stacklevel=2)


def explain(error: ImportError) -> None:
    """Raise an ImportError with the fix if torch or torchft lacks a name that FFT imports.

    Return if the cause is another one. `check` has the fix for a package that is missing.
    """
    package = (error.name or "").split(".")[0]
    if package in _PACKAGES and error.msg != f"No module named {package!r}":
        raise ImportError(
            f"fft: {error.msg}, which {package} {found(package)} lacks: install {package} "
            f"{_TRIED[package][1]} (`fft doctor` shows all versions)"
        ) from error


def doctor() -> tuple[list[str], bool]:
    """Return lines about the installed versions and what this machine lacks, for `fft doctor`.

    The second value is whether FFT can work here.
    """
    lines, works = [f"FFT      {__version__}"], True
    for name in _TRIED:
        number = found(name)
        why = trouble(name, number)
        works = works and not (why and why[0])
        lines.append(f"{name:8} {number or 'none':12} {'tried' if why is None else why[1]}")
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        lines.append("lacks    Linux with pidfd_open (5.3), which FFT needs")
        works = False
    if not os.path.isdir("/proc/self/fd"):
        lines.append("lacks    /proc: gloo groups cannot be aborted; a rollback waits for timeouts")
    if not os.path.exists("/proc/driver/nvidia/version"):
        lines.append("lacks    an NVIDIA GPU: process groups use gloo")
    for extra, packages in _missing_extras().items():
        lines.append(f"lacks    {', '.join(packages)}: pip install 'fft-torch[{extra}]'")
    return lines, works


def _missing_extras() -> dict[str, list[str]]:
    """Return the missing packages by extra, without the extras for developers."""
    lacking: dict[str, list[str]] = {}
    for requirement in requires("fft-torch") or ():
        match = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", requirement)
        if match and match[1] != "fft-torch" and match[2] not in ("dev", "test", "docs", "bench"):
            try:
                version(match[1])
            except PackageNotFoundError:
                lacking.setdefault(match[2], []).append(match[1])
    return lacking


def _release(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", number)[:2])

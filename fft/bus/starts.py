"""Starts of a job: one name on a bus serves one job after another, each with its own keys.

The first start of job ``j`` has the name ``j``, the second ``j.start2``, and so on. A register of
``j`` holds the number of the newest start. The entries of one start are invisible to the others.
"""

from __future__ import annotations

from fft.bus import ErrorBus, open_job_bus
from fft.bus.token import JobToken
from fft.errors import BusError

STARTS = "starts"
"""Register of the job that holds the number of its newest start; without a value, that is 1."""


def newest(bus: ErrorBus) -> int:
    """Return the number of the newest start of the job that ``bus`` belongs to.

    Raises:
        BusError: The register cannot be read, or not without the job's token.
    """
    held = bus.read(STARTS)
    if held is None:
        return 1
    try:
        return int(held)
    except ValueError:
        raise BusError(
            f"register {STARTS} on {bus.url} cannot be read without the job's token: set "
            "FFT_TOKEN_FILE; `fft serve` prints it"
        ) from None


def begin(bus: ErrorBus, number: int) -> None:
    """Make start ``number`` the newest, unless another process has already done so."""
    before = None if number == 2 else b"%d" % (number - 1)
    bus.compare_set(STARTS, before, b"%d" % number)


def url_of(url: str, number: int) -> str:
    """Return the bus URL of one start of the job at ``url``."""
    return url if number == 1 else f"{url}.start{number}"


def open_newest(url: str, token: JobToken | None, timeout: float) -> ErrorBus:
    """Open the newest start of the job at ``url``, as ``open_job_bus`` does."""
    bus = open_job_bus(url, token, timeout)
    try:
        number = newest(bus)
        if number == 1:
            return bus
    except BaseException:
        bus.close()
        raise
    bus.close()
    return open_job_bus(url_of(url, number), token, timeout)

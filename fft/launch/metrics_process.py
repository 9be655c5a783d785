"""The process beside ``fft run`` that serves the job's figures to Prometheus: its start and end.

The process is `fft.operate.metrics`. It belongs to no rank, and the supervisor does not wait for
it. One thread waits for its end, to report it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fft.errors import FftError
from fft.util.listening import listening_at, url_of

_END_S = 5.0
"""Time for the process to end by itself, in seconds."""


class MetricsProcess:
    """A running process that serves figures; `close` ends it."""

    def __init__(self, address: str, say: Callable[[str], object]) -> None:
        """Start the process, which follows no job yet.

        Args:
            address: ``[HOST:]PORT``; port 0 takes a free one.
            say: Shows a line to the operator.

        Raises:
            FftError: prometheus_client is not installed, or the address cannot be used.
        """
        if importlib.util.find_spec("prometheus_client") is None:
            raise FftError(
                "--metrics needs the package prometheus_client: pip install 'fft-torch[metrics]'"
            )
        self._say, self._closed = say, False
        with listening_at(address, "--metrics") as listening:
            self.url = f"{url_of(listening)}/metrics"
            command = [sys.executable, "-P", "-m", "fft.operate.metrics", str(listening.fileno())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno(),
                pass_fds=(listening.fileno(),),
                start_new_session=True,  # Ctrl-C drains the job, which is watched until its end
            )
        self._watch = threading.Thread(target=self._wait, name="fft-metrics", daemon=True)
        self._watch.start()

    def follow(self, folder: Path) -> None:
        """Serve the figures of the start whose traces are in ``folder``."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the thread that waits for its end reports it
            self._process.stdin.write(os.fsencode(folder.resolve()) + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        self._closed = True
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._watch.join()

    def _wait(self) -> None:
        status = self._process.wait()
        if not self._closed:
            self._say(
                f"the process that serves metrics at {self.url} has ended with status {status}; "
                "the job goes on, but Prometheus gets no figures of it"
            )

"""NATS servers for tests, which stop them and ask who leads."""

from __future__ import annotations

import os
import shutil
import signal
from datetime import datetime
from typing import Any

from fft.bus import natsserver


class NatsServers(natsserver.NatsServers):
    """Servers on this machine that can be stopped, examined, and robbed of their stores."""

    def stop(self, number: int, stopped: bool = True) -> None:
        """Pause server `number` with SIGSTOP and wait until it has stopped, or resume it."""
        process = self._processes[number]
        if process is not None:
            process.send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)
        if process is not None and stopped:  # on a busy machine its threads run on after the signal
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def leaders(self) -> dict[str, int]:
        """Return the number of the leading server by stream, as the running servers report it."""
        return {
            stream["name"]: number
            for number in self._running()
            for stream in self._streams(number)
            if stream["cluster"].get("leader") == f"s{number}"
        }

    def whole(self) -> bool:
        """Whether all servers run, and every replica of every stream is current."""
        leading = self.leaders()
        return self._running() == list(range(len(self.ports))) and all(
            stream["name"] in leading
            and (
                leading[stream["name"]] != number
                or all(one["current"] for one in stream["cluster"].get("replicas", ()))
            )
            for number in self._running()
            for stream in self._streams(number)
        )

    def _running(self) -> list[int]:
        return [number for number, process in enumerate(self._processes) if process is not None]

    def _streams(self, number: int) -> list[dict[str, Any]]:
        found = self._ask(number, "jsz?accounts=true&streams=true")
        return [
            stream
            for account in found.get("account_details", ())
            for stream in account.get("stream_detail", ())
        ]

    def elections(self, since: float) -> list[float]:
        """Return the wall-clock times after `since` at which the running servers became leaders.

        The times come from the servers' logs, one for each stream that a server began to lead.
        """
        found = []
        for number in self._running():
            for line in (self._directory / str(number) / "log").read_text().splitlines():
                if "cluster new stream leader" in line:
                    stamp = " ".join(line.split()[1:3])
                    found.append(datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").timestamp())
        return [one for one in found if one > since]

    def forget(self, number: int) -> None:
        """Remove the store of a server that is not running."""
        shutil.rmtree(self._directory / str(number) / "store", ignore_errors=True)

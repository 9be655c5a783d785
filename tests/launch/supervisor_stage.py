"""Children for the supervisor's tests: light scripts that carry out the test's orders.

Each child connects to the test's socket, sends its identity, and obeys. Its end shows as the end of
the connection, which the kernel closes whatever ended the process, so the tests need no polling.
"""

from __future__ import annotations

import json
import queue
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

from fft.bus import open_bus
from fft.errors import BusError
from fft.launch.services import start_services
from fft.launch.supervisor import JobOutcome, RunConfig, Supervisor
from fft.messages.causes import LeaveReason
from fft.messages.exits import Exit, encode_exit, exit_register
from fft.messages.fault_plans import FaultPlan

WAIT_S = 30.0

ACTOR = """
import json, os, pathlib, signal, socket, subprocess, sys

def leave():
    # as `shutdown()` does: the trace that the test writes for this rank ends
    name = f"g{os.environ['REPLICA_GROUP_ID']}r{os.environ['RANK']}i*.jsonl"
    traces = pathlib.Path(os.environ["FFT_TRACE_DIR"]).glob(name)
    if newest := max(traces, key=lambda path: int(path.stem.rpartition("i")[2]), default=None):
        end = {"kind": "transition", "to": "EXIT", "roles": ["leaving", "terminal"]}
        with newest.open("a") as file:
            file.write(json.dumps(end) + "\\n")


stage = socket.socket(socket.AF_UNIX)
stage.connect(os.environ["STAGE"])
say = lambda **what: stage.sendall(json.dumps(what).encode() + b"\\n")
if os.environ.get("STUBBORN"):
    signal.signal(signal.SIGTERM, lambda *_: None)
else:
    signal.signal(signal.SIGTERM, lambda *_: say(heard="sigterm"))
say(pid=os.getpid(), env=dict(os.environ), argv=sys.argv)
for line in stage.makefile():
    order, _, rest = line.strip().partition(" ")
    if order == "exit":
        if rest == "0":
            leave()
        sys.exit(int(rest))
    elif order == "die":  # by a signal, as an interpreter does that has restored its handlers
        number = getattr(signal, rest)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif order == "vanish":  # in the middle of the job
        os._exit(0)
    elif order == "print":
        print(rest)
        say(printed=rest)
    elif order == "tell":
        os.write(int(os.environ["FFT_SUPERVISOR_FD"]), rest.encode())
    elif order == "raise":
        from fft.errors import JobEnded, NoState, NotEnoughGroups
        kinds = {"cut": ConnectionError, "bug": RuntimeError, "other": KeyError, "lost": NoState}
        kinds |= {"late": JobEnded, "few": NotEnoughGroups}
        raise kinds[rest](rest)
    elif order == "spawn":  # a helper that holds a connection of its own, and outlives us
        code = "import json, os, socket, sys; s = socket.socket(socket.AF_UNIX);"
        code += "s.connect(sys.argv[1]); word = json.dumps({'pid': os.getpid()}).encode();"
        code += "s.sendall(word + bytes([10])); s.recv(1)"
        subprocess.Popen([sys.executable, "-c", code, os.environ["STAGE"]])
"""


class Actor:
    """The test's end of one child."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(WAIT_S)
        self._connection = connection
        self._file = connection.makefile("r")
        hello = json.loads(self._file.readline())
        self.pid: int = hello.get("pid", 0)
        self.env: dict[str, str] = hello.get("env", {})
        self.argv: list[str] = hello.get("argv", [])
        self._has_left = False
        self.place = (self.env.get("REPLICA_GROUP_ID", ""), self.env.get("RANK", ""))

    def leaves(self, reason: str, step: int = 5) -> None:
        """Write the register of its exit, as a participant does when it has left the job."""
        group, rank = self.place
        host, why = socket.gethostname(), LeaveReason(reason)
        found = Exit(group, int(rank), self.pid, host, step, why)
        with open_bus(self.env["FFT_BUS"]) as bus:
            bus.write(exit_register(group, int(rank)), encode_exit(found))
        self._has_left = True

    def order(self, text: str) -> None:
        if text == "exit 0" and not self._has_left:
            with suppress(BusError):  # it may be gone
                self.leaves("shut_down")
        self._connection.sendall(text.encode() + b"\n")

    def says(self) -> dict[str, Any]:
        return json.loads(self._file.readline())

    def gone(self) -> None:
        """Return when the process has ended; fail if it sends a message or takes too long."""
        try:
            rest = self._file.readline()
        except ConnectionResetError:
            rest = ""
        assert rest == "", rest

    def close(self) -> None:
        self._file.close()
        self._connection.close()


class Stage:
    """The server at which the children of one test appear."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "stage"
        self.script = directory / "actor.py"
        self.script.write_text(ACTOR)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._actors: list[Actor] = []

    def enter(self, count: int, within: float = WAIT_S) -> dict[tuple[str, str], Actor]:
        """Return the next ``count`` children, by (group, rank)."""
        self._listener.settimeout(within)
        new = [Actor(self._listener.accept()[0]) for _ in range(count)]
        self._actors += new
        return {actor.place: actor for actor in new}

    def nobody(self) -> bool:
        """Whether no child is waiting to be accepted."""
        self._listener.settimeout(0)
        try:
            self._actors.append(Actor(self._listener.accept()[0]))
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        for actor in self._actors:
            actor.close()
        self._listener.close()


class Job:
    """A supervisor that runs in a thread, and the messages on its bus."""

    def __init__(self, supervisor: Supervisor, bus_url: str, config: RunConfig) -> None:
        self.supervisor = supervisor
        self.trace_dir = config.trace_dir
        self.bus_url = bus_url
        self.heard: queue.Queue[tuple[float, dict[str, Any]]] = queue.Queue()
        self._bus = open_bus(bus_url)
        self._bus.subscribe(
            lambda payload: self.heard.put((time.monotonic(), json.loads(payload))),
            lambda error: None,
        )
        self._verdicts: queue.Queue[JobOutcome] = queue.Queue()
        self._thread = Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._verdicts.put(self.supervisor.run())

    def message(self) -> dict[str, Any]:
        """Return the next message on the bus."""
        return self.heard.get(timeout=WAIT_S)[1]

    def verdict(self) -> JobOutcome:
        return self._verdicts.get(timeout=WAIT_S)

    def close(self) -> None:
        self.supervisor.interrupt()
        self.supervisor.interrupt()
        self._thread.join(WAIT_S)
        self._bus.close()
        assert not self._thread.is_alive()


@contextmanager
def running(stage: Stage, trace_dir: Path, plan: FaultPlan, **settings: Any) -> Iterator[Job]:
    """Run a job of actors under supervision; it ends at the latest when the block is left."""
    script = [str(stage.script), *settings.pop("arguments", [])]
    config = RunConfig(script=script, trace_dir=trace_dir, **settings)
    services = start_services(with_lighthouse=True)
    try:
        job = Job(Supervisor(config, plan, services), services.bus_url, config)
        try:
            yield job
        finally:
            job.close()
    finally:
        services.close()

"""Run a training script as ``python SCRIPT ARG…`` would, and record the error that ended it.

Run as a file: ``script_runner.py SCRIPT ARG…``. If the script ends with an error, the runner writes
the place of that error to the descriptor that ``FFT_ERROR_FD`` names, where the process that
started it (`fft.launch.supervisor`) reads it. Output, exit code and ``__main__`` are those of the
script alone. Until the script fails, this module imports FFT only in a spare or in the fork server.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

ERROR_REPORT = "fft-error-report"
"""Name of the memfd behind the descriptor."""

LOADED_TORCH = b"loaded torch"
"""Written to the memfd when a script that has loaded torch ends without an error."""

FORK_SERVER = "FFT_FORK_SERVER_FD"
"""Environment variable of the fork server: the descriptor of its socket to the supervisor."""

READY = "ready"
"""Message of the fork server after its imports; if it cannot fork, it sends the reason instead."""

_RANK_INDEPENDENT = frozenset({"fft", "numpy", "torch", "torchft"})
"""Packages whose import does not depend on the rank's environment variables."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if __name__ == "__main__" and not sys.flags.safe_path:
    # Must precede all other imports, so that no module of FFT shadows one of Python.
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[1]))


def main() -> None:
    """Run the script to its end."""
    from importlib.machinery import SourceFileLoader
    from types import ModuleType

    _survive_a_full_disk()
    had_torch = "torch" in sys.modules
    del sys.argv[0]
    path = os.path.abspath(sys.argv[0])
    if number := os.environ.pop(FORK_SERVER, ""):
        _serve_forks(int(number), path)
    if role := os.environ.pop("FFT_ROLE_FD", ""):
        _await_role(int(role), path)
    _copy_to_supervisor(os.environ.pop("FFT_TEE", ""))
    error_fd, owner = _error_fd(), os.getpid()
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    module.__dict__.update(
        __file__=path, __cached__=None, __loader__=loader, __builtins__=__builtins__
    )
    sys.modules["__main__"] = module
    is_good = False
    try:
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        is_good = True
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = trace
        is_good = isinstance(error, SystemExit) and error.code in (None, 0)
        if error_fd is not None and os.getpid() == owner and not is_good:
            _write(error_fd, error)
        if isinstance(error, SystemExit):
            raise
        sys.excepthook(type(error), error, trace)
        sys.exit(1)
    finally:
        loaded_torch = "torch" in sys.modules and not had_torch
        if is_good and loaded_torch and error_fd is not None and os.getpid() == owner:
            with suppress(OSError):  # the script has closed it
                os.write(error_fd, LOADED_TORCH)


def _await_role(number: int, path: str) -> None:
    """Load, as a spare, what the script imports, and wait for a role.

    The supervisor sends the role over the socket as one line of JSON. If it closes the socket
    instead, the process exits.
    """
    import json
    import socket

    with socket.socket(fileno=number) as supervisor:
        supervisor.set_inheritable(False)
        _load_imports_of(path)
        try:
            supervisor.sendall(b"r")
            with supervisor.makefile("rb") as words:
                line = words.readline()
        except OSError:  # the supervisor has ended
            line = b""
    if not line.endswith(b"\n"):
        sys.exit(0)
    role = json.loads(line)
    os.environ.update(role["env"])
    log = os.open(role["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)


def _serve_forks(number: int, path: str) -> None:
    """Fork a rank for each request of the supervisor. This function returns only in the forked
    ranks.

    Exits when the supervisor closes the socket.
    """
    import socket

    supervisor = socket.socket(fileno=number)
    supervisor.set_inheritable(False)
    _load_imports_of(path, is_for_all=True)
    obstacle = _obstacle_to_forks()
    try:
        supervisor.send((obstacle or READY).encode())
        while not obstacle:
            word, fds, _, _ = socket.recv_fds(supervisor, 1, 64)
            if not word:
                break
            pid = _fork_rank(fds)
            if pid is None:
                supervisor.close()
                return
            supervisor.send(str(pid).encode())
    except OSError as error:  # the supervisor has ended, or no process can be forked
        sys.stderr.write(f"fork server: {error}\n")
    sys.exit(0)


def _obstacle_to_forks() -> str | None:
    """Return why forking this process is unsafe, or None if it is safe."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the imports of the script have started {threads - 1} threads"
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing
            continue
        if target.startswith(("/dev/nvidia", "/dev/kfd")):
            return f"the imports of the script have opened {target}"
    return None


def _fork_rank(fds: list[int]) -> int | None:
    """Fork a rank; return its process ID, or None in the rank.

    An intermediate process forks the rank and exits, so the rank becomes a child of the supervisor,
    the subreaper.

    Args:
        fds: Descriptors of the request (JSON) and of the log, and those that the rank inherits.
    """
    pid_read, pid_write = os.pipe()
    start_read, start_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    intermediate = os.fork()
    if intermediate == 0:
        if os.fork() != 0:
            os._exit(0)
        os.setsid()
        os.write(pid_write, str(os.getpid()).encode())
        for fd in (pid_read, pid_write, start_write):
            os.close(fd)
        if os.read(start_read, 1) != b"g":
            os._exit(1)
        os.close(start_read)
        _become_rank(fds)
        return None
    os.waitpid(intermediate, 0)  # from here on the rank is a child of the supervisor
    pid = int(os.read(pid_read, 32))
    os.write(start_write, b"g")
    for fd in (pid_read, pid_write, start_read, start_write, *fds):
        os.close(fd)
    return pid


def _become_rank(fds: list[int]) -> None:
    """Apply the environment, log and descriptors of the request, and die together with the
    supervisor."""
    import ctypes
    import json
    import signal

    request_fd, log, *inherited = fds
    request = json.loads(os.pread(request_fd, os.fstat(request_fd).st_size, 0))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != request["parent"]:
        os._exit(1)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.close(request_fd)
    os.environ.clear()
    os.environ.update(request["env"])
    for fd in inherited:
        os.set_inheritable(fd, True)
    for name, at in request["fds"].items():
        os.environ[name] = str(inherited[at])
    _seed_anew()


def _seed_anew() -> None:
    """Reseed the generators of numpy and torch, as separate imports in each rank would have seeded
    them.

    Python does this for `random`.
    """
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _load_imports_of(path: str, is_for_all: bool = False) -> None:
    """Import, in advance, the packages that the script imports before any other statement.

    This only saves time: the script imports them again and raises the error of a failed import
    itself. Only installed packages are imported. A user's module may depend on the rank's role,
    which is still unknown, or on a search path that the script sets.

    Args:
        path: The script.
        is_for_all: Whether every rank will use these imports. Then stop at the first package that
            may depend on the rank or affect a later import.
    """
    from importlib import import_module

    names = _imports_of(path)
    if is_for_all:
        is_other = (
            n.partition(".")[0] not in _RANK_INDEPENDENT | sys.stdlib_module_names for n in names
        )
        names = names[: next((at for at, other in enumerate(is_other) if other), len(names))]
        names = [name for name in names if name.partition(".")[0] in _RANK_INDEPENDENT]
    if "fft" in names:  # `import fft` loads its parts lazily
        names.append("fft.train.api.manager")
    if "torch" in {name.partition(".")[0] for name in names}:
        names.append("torch._dynamo")  # otherwise loaded when the first optimizer is constructed
    for name in filter(_is_installed, names):
        try:
            import_module(name)
        except BaseException as error:  # noqa: BLE001
            sys.stderr.write(f"{name} is not loaded in advance: {error!r}\n")


def _imports_of(path: str) -> list[str]:
    """Return the modules that the script imports before any other statement, in order."""
    import ast

    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module] if node.module and not node.level else []
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            break  # the statement may matter to later imports, such as a change of os.environ
    return names


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec
    from sysconfig import get_paths

    top = name.partition(".")[0]
    try:
        found = find_spec(top)
    except (ImportError, ValueError):
        return False
    origin = os.path.realpath((found.origin if found is not None else None) or "")
    places = {os.path.realpath(place) for place in get_paths().values()}
    return top == "fft" or any(origin.startswith(f"{place}{os.sep}") for place in places)


def _survive_a_full_disk() -> None:
    """Make ``sys.stdout`` and ``sys.stderr`` drop output when the disk of the log is full.

    Otherwise a ``print`` would end the script.
    """
    import stat

    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        is_own = type(old) is io.TextIOWrapper and old is getattr(sys, f"__{name}__")
        if not is_own or old.fileno() != number or not stat.S_ISREG(os.fstat(number).st_mode):
            continue  # the stream was replaced or is not a regular file
        log = _Log(number, "wb", closefd=False)
        is_raw = isinstance(old.buffer, io.RawIOBase)  # python -u
        new = io.TextIOWrapper(
            log if is_raw else io.BufferedWriter(log),
            old.encoding,
            old.errors,
            "\n",
            old.line_buffering,
            old.write_through,
        )
        log.name = old.name
        new.mode = old.mode  # type: ignore[misc]  # as Python sets it
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _copy_to_supervisor(path: str) -> None:
    """Send a copy of the output to the supervisor, if it has named its pipe."""
    if not path:
        return
    log = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
    if isinstance(log, _Log):
        with suppress(OSError):  # the supervisor has ended
            log.copy = _Copy(path, f"{os.environ['FFT_GROUP']}.{os.environ['RANK']}")


class _Copy:
    """Writes whole lines to a pipe with the name of the rank; drops them if the pipe is full."""

    _LONGEST = 3500  # a longer write to a pipe is not atomic

    def __init__(self, path: str, name: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._name = name.encode() + b"\t"
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Send the lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with suppress(OSError):  # full, or the supervisor has ended
                os.write(self._fd, self._name + line[: self._LONGEST] + b"\n")


class _Log(io.FileIO):
    """A file that drops output while its disk is full and later writes how many bytes it lost."""

    _lost = 0
    copy: _Copy | None = None
    """Receives all that is written, too."""

    def write(self, data: Any) -> int:
        if self.copy is not None:
            self.copy.write(bytes(data))
        return self._write(data)

    def _write(self, data: Any) -> int:
        size = len(memoryview(data).cast("B"))
        try:
            if self._lost:
                super().write(
                    b"\n[fft: %d bytes of output were lost here because the disk was full]\n"
                    % self._lost
                )
                self._lost = 0
            written = super().write(data)
            self._lost += size - written
            return size
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._lost += size
            return size


def _error_fd() -> int | None:
    """Return the descriptor for the error; processes that the script starts do not inherit it."""
    number = os.environ.pop("FFT_ERROR_FD", "")
    try:
        if os.readlink(f"/proc/self/fd/{number}").startswith(f"/memfd:{ERROR_REPORT}"):
            os.set_inheritable(int(number), False)
            return int(number)
    except (OSError, ValueError):  # a process between us and the supervisor has closed it
        pass
    return None


def _write(error_fd: int, error: BaseException) -> None:
    sys.path.insert(0, os.path.dirname(_OUR_FOLDER))
    try:
        from fft.util.error_places import place_of

        os.write(error_fd, place_of(error).to_json().encode())
    except Exception as trouble:  # noqa: BLE001 - the script's own error is what counts
        sys.stderr.write(f"fft: the error could not be passed on to the supervisor: {trouble!r}\n")
    finally:
        del sys.path[0]


if __name__ == "__main__":
    main()

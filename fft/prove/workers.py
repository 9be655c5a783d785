"""Tasks in processes of their own: what `fft check`, `fft mutants` and `fft simulate` run in.

A process that ends before its task is an error that names the task. Whichever way the caller goes
on, no process is left: each ends with the caller, or at its next word if that was killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

from fft.util.errors import FftError

Task = TypeVar("Task")
Done = TypeVar("Done")
Tell = Callable[[Any], None]
Work = Callable[[Task, Tell], Done]
"""What a process does for a task; it may tell how far it is."""
_END_S = 5.0
"""How long a process may take to end when it is told to."""
_SHORT = "memory may have run out: give fewer --jobs, or have more memory free"
_SPAWN = multiprocessing.get_context("spawn")  # the caller may have threads


class WorkerError(FftError):
    """A process ended before its task did, or a number of them cannot be used."""


@dataclass
class _Worker(Generic[Task]):
    process: BaseProcess
    link: Connection
    at: int | None = None
    """The number of its task."""


def processes(jobs: int | None, each_mib: int) -> int:
    """How many are asked for; by default one per core, as far as the memory that is free goes."""
    if jobs is not None and jobs < 1:
        raise WorkerError(f"--jobs {jobs}: give the number of processes, 1 or more")
    return jobs or max(1, min(len(os.sched_getaffinity(0)), _free_mib() // each_mib))


def _free_mib() -> int:
    """Of the machine, or of the control group that this process is in, if that has less."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) >> 10
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # there is none, or it says "max"
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        free = min(free, (limit - used) >> 20)
    return free


def spread(
    work: Work[Task, Done],
    tasks: Sequence[tuple[str, Task]],
    jobs: int,
    told: Callable[[int, Any], None] = lambda *_: None,
    *,
    fresh: bool = False,
) -> Generator[tuple[int, Done], None, None]:
    """(number of a task, what came of it), as they end. Tasks begin in the order given.

    Args:
        work: a function that a new process can import; or a partial of one.
        tasks: each with a name for errors.
        jobs: processes at once. They are ended when the iterator is closed.
        told: gets what a task tells, with its number.
        fresh: a new process for each task, so that none keeps the memory of another.

    Raises:
        WorkerError: a process ended before its task, as when memory runs out.
    """
    left = iter(range(len(tasks)))
    workers: list[_Worker[Task]] = []
    try:
        for begun in islice(left, jobs):
            workers.append(_start(work, begun, tasks))
        while workers:
            ready = wait([worker.link for worker in workers])
            for worker in [w for w in workers if w.link in ready]:
                assert worker.at is not None
                try:
                    what, value = worker.link.recv()
                except (EOFError, OSError):
                    raise _died(worker, tasks[worker.at][0]) from None
                if what == "told":
                    told(worker.at, value)
                    continue
                if isinstance(value, MemoryError):
                    raise WorkerError(f"{tasks[worker.at][0]}: MemoryError; {_SHORT}")
                if what == "raised":
                    raise value
                ended, number = worker.at, next(left, None)
                if number is None or fresh:
                    workers.remove(worker)
                    _end(worker)
                    workers += [] if number is None else [_start(work, number, tasks)]
                else:
                    _give(worker, number, tasks)
                yield ended, value
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            _end(worker)


def in_order(found: Generator[tuple[int, Done], None, None]) -> Iterator[tuple[int, Done]]:
    """What came of tasks in the order of their numbers; each waits for those before it."""
    waiting: dict[int, Done] = {}
    following = 0
    with closing(found):
        for number, done in found:
            waiting[number] = done
            while following in waiting:
                yield following, waiting.pop(following)
                following += 1


def _start(work: Work[Task, Done], number: int, tasks: Sequence[tuple[str, Task]]) -> _Worker[Task]:
    near, far = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(far, work), daemon=True)
    # Ctrl-C is for the caller, which ends this process: it never hears it, not even as it starts.
    resource_tracker.ensure_running()  # its start, within that of the first process, unblocks it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        far.close()  # so that its end is seen
    worker: _Worker[Task] = _Worker(process, near)
    _give(worker, number, tasks)
    return worker


def _give(worker: _Worker[Task], number: int, tasks: Sequence[tuple[str, Task]]) -> None:
    worker.at = number
    with suppress(OSError):  # it has ended, which is seen when it is listened to
        worker.link.send(tasks[number][1])


def _end(worker: _Worker[Task]) -> None:
    worker.link.close()
    worker.process.join(_END_S)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _died(worker: _Worker[Task], name: str) -> WorkerError:
    worker.process.join(_END_S)
    code = worker.process.exitcode
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    hint = f"; {_SHORT}" if how == "SIGKILL" else ""
    return WorkerError(f"{name}: its process ended with {how} before it was done{hint}")


def _serve(link: Connection, work: Work[Any, Any]) -> None:
    """The process: one task after another, until the caller closes the link or is gone."""

    def say(what: str, value: Any) -> None:
        try:
            link.send((what, value))
        except OSError:  # nobody is left to tell
            os._exit(1)  # to take a large search apart would take long

    while True:
        try:
            task = link.recv()
        except (EOFError, OSError):
            return
        try:
            said = "done", work(task, partial(say, "told"))
        except Exception as error:  # noqa: BLE001  (the caller raises it)
            said = "raised", error
        gc.collect()
        say(*said)

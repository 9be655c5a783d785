"""Run tasks in separate processes: used by ``fft dev check``, ``mutants`` and ``simulate``.

A process that ends before its task raises an error that names the task. However the caller
continues, no process is left behind: each ends with the caller, or at its next message if the
caller was killed.
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
from typing import Any, Generic, TypeVar

from fft.errors import FftError
from fft.util.memory import available_memory

Task = TypeVar("Task")
Done = TypeVar("Done")
Tell = Callable[[Any], None]
Work = Callable[[Task, Tell], Done]
"""Work of a process on a task; it may report its progress."""
_END_S = 5.0
"""Time that a process may take to end on request."""
_SHORT = "memory may have run out: give fewer --jobs, or have more memory free"
_SPAWN = multiprocessing.get_context("spawn")  # the caller may have threads


@dataclass
class _Worker(Generic[Task]):
    process: BaseProcess
    link: Connection
    at: int | None = None
    """The number of its task."""


def processes(jobs: int | None, each_mib: int) -> int:
    """Return the number of processes; by default one per core, as far as free memory allows."""
    if jobs is not None and jobs < 1:
        raise FftError(f"--jobs {jobs}: give the number of processes, 1 or more")
    return jobs or max(1, min(len(os.sched_getaffinity(0)), _free_mib() // each_mib))


def _free_mib() -> int:
    """Return the memory that is available to this process."""
    return available_memory() >> 20


def spread(
    work: Work[Task, Done],
    tasks: Sequence[tuple[str, Task]],
    jobs: int,
    told: Callable[[int, Any], None] = lambda *_: None,
    *,
    fresh: bool = False,
) -> Generator[tuple[int, Done], None, None]:
    """Yield (number of a task, its result) as the tasks end. Tasks begin in the given order.

    Args:
        work: A function that a new process can import, or a partial of one.
        tasks: The tasks, each with a name for errors.
        jobs: Number of simultaneous processes. They are ended when the iterator is closed.
        told: Called with a task's number and each of its progress reports.
        fresh: Start a new process for each task, so that none keeps the memory of another.

    Raises:
        FftError: A process ended before its task, for example because memory ran out.
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
                    raise FftError(f"{tasks[worker.at][0]}: MemoryError; {_SHORT}")
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
    """Yield the results of tasks in the order of their numbers; each waits for those before it."""
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
    # Ctrl-C is for the caller, which ends this process, so it is blocked here even during the
    # start.
    # starting it inside the first process's start would unblock SIGINT
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        far.close()  # so that the other side sees its end
    worker: _Worker[Task] = _Worker(process, near)
    _give(worker, number, tasks)
    return worker


def _give(worker: _Worker[Task], number: int, tasks: Sequence[tuple[str, Task]]) -> None:
    worker.at = number
    with suppress(OSError):  # it has ended, which the next receive detects
        worker.link.send(tasks[number][1])


def _end(worker: _Worker[Task]) -> None:
    worker.link.close()
    worker.process.join(_END_S)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _died(worker: _Worker[Task], name: str) -> FftError:
    worker.process.join(_END_S)
    code = worker.process.exitcode
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    hint = f"; {_SHORT}" if how == "SIGKILL" else ""
    return FftError(f"{name}: its process ended with {how} before it was done{hint}")


def _serve(link: Connection, work: Work[Any, Any]) -> None:
    """Run one task after another in the process, until the caller closes the link or is gone."""

    def say(what: str, value: Any) -> None:
        try:
            link.send((what, value))
        except OSError:  # the caller is gone
            os._exit(1)  # deallocating a large search would take long

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

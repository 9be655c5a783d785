"""One rank of a crew, which runs the recipes that it gets over a connection, one after the other.

`crew` forks it. Every task is its own job on the bus.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import traceback
from multiprocessing.connection import Connection

import numpy
from recipe_job import run


def work(connection: Connection, group: int, rank: int) -> None:
    """Run tasks until the other end sends None."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs, into the log
    while (task := connection.recv()) is not None:
        print(f"--- {task['traces']}", flush=True)
        random.seed(group)
        numpy.random.seed(group)
        try:
            connection.send(("ended", run(task, group, rank)))
        except BaseException:  # noqa: BLE001 - the crew shows it
            connection.send(("failed", traceback.format_exc()))
    os._exit(0)  # the remains of a failed case must not delay the end

"""One rank of a crew: runs the recipes that it is told over a connection, one after the other.

Forked by `crew`. Every task is a job of its own on the bus.
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
    """Until the other end says None."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs, into the log
    while (task := connection.recv()) is not None:
        print(f"--- {task['traces']}", flush=True)
        random.seed(group)
        numpy.random.seed(group)
        try:
            connection.send(("ended", run(task, group, rank)))
        except BaseException:  # noqa: BLE001 - the crew shows it
            connection.send(("failed", traceback.format_exc()))
    os._exit(0)  # whatever a failed case left must not hold it up

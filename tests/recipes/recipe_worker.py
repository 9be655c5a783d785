"""One rank of a crew: runs the recipes that it is told over a connection, one after the other.

Started by `crew` as ``recipe_worker.py FD group rank``. Every task is a job of its own on the bus.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import numpy
import torch
from recipe_job import run


def main() -> None:
    """Until the other end says None."""
    connection = Connection(int(sys.argv[1]))
    group, rank = int(sys.argv[2]), int(sys.argv[3])
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs, into the log
    torch.set_num_threads(1)
    while (task := connection.recv()) is not None:
        print(f"--- {task['traces']}", flush=True)
        random.seed(group)
        numpy.random.seed(group)
        try:
            connection.send(("ended", run(task, group, rank)))
        except BaseException:  # noqa: BLE001 - the crew shows it
            connection.send(("failed", traceback.format_exc()))
    os._exit(0)  # whatever a failed case left must not hold it up


if __name__ == "__main__":
    main()

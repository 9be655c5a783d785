"""The job of kill_script.py, in which who comes for a lost rank hangs before it has a manager."""

from __future__ import annotations

import os
import threading

from ranks import sharded_rank

if __name__ == "__main__":
    if os.environ.get("FFT_SUCCESSOR"):
        threading.Event().wait()
    sharded_rank(1, {}).train()

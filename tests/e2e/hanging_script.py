"""The job of kill_script.py, in which the replacement of a lost rank never creates a manager.

``hanging_script.py``: it hangs; ``hanging_script.py dies``: it is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from ranks import sharded_rank

if __name__ == "__main__":
    if os.environ.get("FFT_SUCCESSOR"):
        if sys.argv[1:] == ["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
    sharded_rank(1, {}).train()

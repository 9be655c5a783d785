"""A small FSDP2 job for test_kill.py; `fft run` starts it. Trains until the job is drained.

Every commit is traced with a digest of the weights. An argument is the membership.
"""

from __future__ import annotations

import sys

from ranks import sharded_rank

if __name__ == "__main__":
    sharded_rank(1, {}, membership=(sys.argv[1:] or ["register"])[0]).train()

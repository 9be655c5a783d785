"""What holds for all tests."""

from __future__ import annotations

import os

# torch asks the name service about every TCPStore connection. Where that loses a packet, each costs
# five seconds and more; which is not what is tested. Read by the C library at the first question.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

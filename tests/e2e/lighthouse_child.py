"""torchft's lighthouse as a process that a test can kill: ``lighthouse_child.py PORT OPTIONS``.

It prints its port, and serves until it or its stdin is ended.
"""

from __future__ import annotations

import json
import sys
from urllib.parse import urlsplit

from torchft.coordination import LighthouseServer


def main() -> None:
    """Serve; ``OPTIONS`` are keyword arguments of LighthouseServer, as JSON."""
    server = LighthouseServer(f"127.0.0.1:{sys.argv[1]}", **json.loads(sys.argv[2]))
    sys.stdout.write(f"{urlsplit(server.address()).port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()

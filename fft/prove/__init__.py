"""Check the protocol: every reachable state of small jobs, and random runs of large ones. Pure."""

"""A NATS cluster whose leaders are killed, again and again, under writers: nothing may be lost.

`python benchmarks/nats_failover.py [ROUNDS [FILE]]`: each round kills, by SIGKILL, the server that
leads one of the job's streams, while four clients extend a chain of heads, broadcast and draw
numbers, and three listen. Prints how long each round was without service, then judges the whole:
one chain, nobody told wrong, every message heard once and in one order, no number twice. JSON to
FILE. Exits with an error at the first violation.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bus"))

from nats_trial import Trial

from fft.bus.natsserver import NatsServers


def main(rounds: int = 50, file: str | None = None) -> None:
    times = []
    with NatsServers(cluster=3) as servers:
        trial = Trial(servers)
        try:
            for number in range(rounds):
                times.append(trial.kill_leader(number))
                print(f"round {number}: service again after {times[-1]:.2f} s", flush=True)
            verdict = trial.judge()
        finally:
            trial.close()
    print(
        f"{rounds} rounds: {verdict}; without service {min(times):.2f} to {max(times):.2f} s, "
        f"median {statistics.median(times):.2f} s"
    )
    if file is not None:
        Path(file).write_text(json.dumps({"seconds": times, "verdict": verdict}) + "\n")


if __name__ == "__main__":
    main(*(int(one) if at == 0 else one for at, one in enumerate(sys.argv[1:3])))  # type: ignore[arg-type]

"""Settings of a manager, from its arguments and the environment, read and checked once.

Opens nothing, except for the services of a script without a launcher (`fft.train.standalone`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import BoundArguments, signature
from pathlib import Path
from typing import Literal

from torchft.manager import Manager

from fft.bus.token import JobToken
from fft.durable.plan import Checkpointing, checkpointing_of
from fft.errors import FftError
from fft.health.detectors.trainer import MonitorConfig
from fft.protocol.load import load_spec
from fft.protocol.spec import FsmSpec
from fft.protocol.timeouts import (
    ARGUMENTS,
    TORCHFT_DEFAULT_S,
    Given,
    Timeout,
    from_env,
    resolve,
)
from fft.train.lighthouse import Membership, membership_of
from fft.train.progress_reporter import interval_from
from fft.train.standalone import Alone, is_alone
from fft.train.state.equality_checks import refuse_interval
from fft.util.names import unknown

Digest = Literal["never", "commit"]
Learners = Literal["auto", "always", "never"]
OnDivergence = Literal["stop", "heal"]

_NO_NAMES = {"self", "args", "kwargs"}
"""Parameters of a constructor that cannot be passed by name."""


@dataclass(frozen=True)
class Settings:
    """The arguments of ``ManagerFFT`` that are not torchft's, with their defaults filled in."""

    spec: FsmSpec
    bus_url: str
    token: JobToken | None
    alone: Alone | None
    """Services of a job of one process, or None if they were started outside."""
    trace_dir: Path | None
    expected_groups: int
    timeouts: Mapping[str, float]
    """Given timeouts by name; `timeout_table` adds the rest."""
    digest: Digest
    check_replicas: int | None
    on_divergence: OnDivergence
    learners: Learners
    max_body_failures: int | None
    monitor: bool
    progress_interval: float
    membership: Membership
    is_successor: bool
    """The process replaces a lost rank whose group lives; it meets no peer before its first
    epoch."""
    checkpoint: Checkpointing | None
    """Durable checkpoints, or None if none are taken."""

    def timeout_table(self, manager: Manager) -> Mapping[str, Timeout]:
        """Return all timeouts; torchft's constructor has applied its environment variables already.

        Raises ConfigError if they contradict each other.
        """
        chosen = {name: Given(float(s), "timeouts=") for name, s in self.timeouts.items()}
        if window := os.environ.get("FFT_REFORM_WINDOW"):
            chosen.setdefault("reform_window", Given(float(window), "--reform-window"))
        for name in ARGUMENTS:
            seconds = getattr(manager, f"_{name}").total_seconds()
            if seconds != TORCHFT_DEFAULT_S:
                chosen[name] = Given(seconds, f"{name}=")
        return resolve(self.spec, {**chosen, **from_env(os.environ)}, self.bus_url)


def read_settings(
    called: BoundArguments,
    *,
    bus: str | None,
    spec: str | None,
    trace_dir: str | Path | None,
    expected_groups: int | None,
    timeouts: Mapping[str, float] | None,
    digest: Digest,
    check_replicas: int | None,
    on_divergence: OnDivergence | None,
    learners: Learners,
    max_body_failures: int | None,
    monitor: bool | None,
    progress_interval: float | None,
    membership: Membership | None,
    checkpoint: Checkpointing | str | Path | None,
) -> Settings:
    """Check and complete the arguments of ``ManagerFFT``; ``called`` has those of torchft.

    Services (``alone``) are started last. Raises ConfigError, TokenError, FftError.
    """
    refuse_interval(check_replicas)
    loaded = load_spec(spec or os.environ.get("FFT_SPEC") or "hsdp")
    url = bus or os.environ.get("FFT_BUS")
    _refuse_another_bus(bus)
    if url:
        _refuse_unlaunched(called)
    elif not is_alone(called):
        raise FftError("no bus: pass bus=, or set FFT_BUS to what `fft serve` prints")
    token = JobToken.from_env()
    durable = checkpointing_of(checkpoint)
    chosen = membership_of(membership or os.environ.get("FFT_MEMBERSHIP"))
    interval = interval_from(progress_interval)
    wanted = called.arguments["min_replica_size"]
    directory = trace_dir or os.environ.get("FFT_TRACE_DIR")
    if not called.arguments.get("replica_id") and (group := os.environ.get("REPLICA_GROUP_ID")):
        called.arguments["replica_id"] = group
    alone: Alone | None = None
    if not url:
        alone = Alone(called)
        url, expected_groups = alone.bus_url, 1
        # the monitor would take a breakpoint for a hang
        monitor = os.environ.get("FFT_MONITOR") == "1" if monitor is None else monitor
    return Settings(
        spec=loaded,
        bus_url=url,
        token=token,
        alone=alone,
        trace_dir=Path(directory) if directory else None,
        expected_groups=expected_groups or int(os.environ.get("NUM_REPLICA_GROUPS", str(wanted))),
        timeouts=timeouts or {},
        digest=digest,
        check_replicas=check_replicas,
        on_divergence=on_divergence or loaded.policies.on_divergence,
        learners=learners,
        max_body_failures=max_body_failures,
        monitor=os.environ.get("FFT_MONITOR") != "0" if monitor is None else monitor,
        progress_interval=interval,
        membership=chosen,
        is_successor=os.environ.pop("FFT_SUCCESSOR", "") == "1",
        checkpoint=durable,
    )


def refuse_unknown(constructor: Callable[..., None], given: Iterable[str]) -> None:
    """Raise TypeError for a name that is an argument of neither ``constructor`` nor torchft's
    Manager. The message suggests the nearest one."""
    known = {*signature(constructor).parameters, *signature(Manager).parameters} - _NO_NAMES
    for name in given:
        if name not in known:
            raise TypeError(f"ManagerFFT(): {unknown('argument', name, known)}")


def _refuse_another_bus(bus: str | None) -> None:
    """Raise FftError if the script names another bus than that of its supervisor."""
    served = os.environ.get("FFT_BUS")
    if bus and served and bus != served and "FFT_SUPERVISOR_FD" in os.environ:
        raise FftError(
            f"the script passes bus={bus!r}, but `fft run` has this job on {served!r}, where it "
            "sees who joins and who dies: leave bus= out; for a bus that is served elsewhere set "
            "FFT_BUS and start the script by `fft run --join`"
        )


def refuse_ranks(spec: FsmSpec, ranks: int) -> None:
    """Raise FftError if replica groups of so many ranks cannot hold the model as the spec
    requires."""
    if spec.ranks == "one" and ranks > 1:
        raise FftError(
            f"spec {spec.name!r} has replica groups of one rank, and this one has {ranks}: start "
            "it with --ranks 1, or use spec='hsdp', whose ranks hold shards, or spec='pipeline', "
            "whose ranks hold stages, or spec='hsdp_diloco', whose groups step alone"
        )


def _refuse_unlaunched(called: BoundArguments) -> None:
    """Raise FftError if neither a launcher nor the script defines which rank of a group this is."""
    places = {"rank": "RANK", "world_size": "WORLD_SIZE"}
    places |= {"store_addr": "MASTER_ADDR", "store_port": "MASTER_PORT"}
    lacking = {
        name: variable
        for name, variable in places.items()
        if called.arguments.get(name) is None and not os.environ.get(variable)
    }
    if lacking:
        raise FftError(
            f"there is a bus, but neither {', '.join(lacking.values())} in the environment nor "
            f"{'=, '.join(lacking)}= says where this rank's group meets: start it by `fft run` or "
            "torchrun, or pass them; to run alone, as a job of one process, unset FFT_BUS"
        )


def monitor_config(table: Mapping[str, Timeout]) -> MonitorConfig:
    """Return the limits for a hanging main thread and a lost host, from the table of timeouts."""
    limit, grace = table["hang_limit"].seconds, table["hang_grace"].seconds
    host_s = table["host_limit"].seconds
    return MonitorConfig(limit, grace, min_s=min(1.0, limit), host_s=host_s)


def drain_within() -> float | None:
    """Return the seconds that the drain signal leaves, from the environment, or None."""
    text = os.environ.get("FFT_DRAIN_WITHIN")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise FftError(f"FFT_DRAIN_WITHIN={text!r}: give a number of seconds, such as 30")
    return seconds

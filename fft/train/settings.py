"""Settings of a manager, from its arguments and the environment, read and checked once.

Opens nothing, except for the services of a script without a launcher (`fft.train.standalone`).
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import BoundArguments, signature
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from torchft.manager import Manager

from fft.bus.token import JobToken
from fft.durable.plan import Checkpointing, checkpointing_of
from fft.errors import FftError
from fft.health.detectors.trainer import MonitorConfig
from fft.protocol.load import load_spec
from fft.protocol.spec import FsmSpec
from fft.protocol.timeouts import ARGUMENTS, TORCHFT_DEFAULT_S, Given, Timeout, from_env, resolve
from fft.train.lighthouse import Membership, membership_of
from fft.train.progress_reporter import interval_from
from fft.train.standalone import Alone, is_alone
from fft.train.state.equality_checks import refuse_interval
from fft.util.names import unknown

Digest = Literal["never", "commit"]
Learners = Literal["auto", "always", "never"]
OnDivergence = Literal["stop", "heal"]


class ManagerConfig(BaseModel):
    """Settings of ``ManagerFFT`` that most scripts leave alone; ``config=`` takes them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: Digest = "never"
    """``commit`` traces a digest of this rank's parameters and optimizer state after every commit,
    so that the audit can compare replicas bit by bit. It hashes all of them in every step: for
    audits, not for long runs. Buffers, which may differ, are left out."""
    check_replicas: int | None = None
    """Interval in steps at which replicas compare a fingerprint of parameters and optimizer state
    in their votes; a power of 2. None chooses an interval that costs 1 % of the time; 0 disables
    the comparison. It needs ``register``."""
    on_divergence: OnDivergence | None = None
    """Reaction to replicas that differ. ``stop`` ends the job with ``Diverged``. With ``heal``,
    ranks that differ from the majority fetch its state; without a majority the job stops. None
    takes the value of the spec (``policies``), which is ``stop`` as shipped."""
    learners: Learners = "auto"
    """Whether a group that joins computes its first step while it still fetches the state, so that
    its weights are not the job's. ``auto``: not if step functions change reduced gradients, for
    example by clipping, because the change might depend on the weights. ``always``: the change
    depends on the gradients alone. ``never``: the group always waits for the state."""
    max_body_failures: int | None = None
    """Number of failures of this rank's step function in a row at one step after which the error is
    raised. None: 2 with the same error (class, text and every call), 5 in all."""
    monitor: bool | None = None
    """Whether a process beside this one watches it: it starts a rollback when the main thread
    hangs, ends the process if that does not help, and reports its death. None: unless
    ``FFT_MONITOR=0`` (a debugger stops main threads, too), if the main thread trains."""
    progress_interval: float = Field(default_factory=interval_from)
    """Seconds between two progress reports, which show slow ranks; 0 disables them
    (``FFT_PROGRESS_INTERVAL``, else 1)."""
    membership: Membership = Field(default_factory=membership_of)
    """``register``: the job's register alone decides who is a member, and a lighthouse, if there is
    one (``lighthouse_addr``, ``TORCHFT_LIGHTHOUSE``), only gets heartbeats. ``lighthouse``: no txn
    commits without a quorum of the lighthouse that names every group. All groups must have the same
    value (``FFT_MEMBERSHIP``, else ``register``)."""

    @field_validator("check_replicas")
    @classmethod
    def _check_interval(cls, every: int | None) -> int | None:
        refuse_interval(every)
        return every

    @field_validator("progress_interval", mode="before")
    @classmethod
    def _check_seconds(cls, given: Any) -> float:
        return interval_from(given)

    @field_validator("membership", mode="before")
    @classmethod
    def _check_membership(cls, given: Any) -> Membership:
        return membership_of(given)

    @classmethod
    def taken(cls, given: dict[str, Any], config: ManagerConfig | None) -> ManagerConfig:
        """Remove the settings from the keyword arguments of a constructor, and return them.

        They were arguments of ``ManagerFFT`` before; this warns of them.

        Args:
            given: Keyword arguments; the names of settings are removed.
            config: The argument ``config``.

        Raises:
            TypeError: There are both a config and arguments that it replaces.
        """
        old = {name: given.pop(name) for name in cls.model_fields if name in given}
        if not old:
            return cls() if config is None else config
        names = ", ".join(f"{name}=" for name in old)
        if config is not None:
            raise TypeError(f"ManagerFFT(): config= and {names}: put these into config")
        text = f"ManagerFFT({names}…): pass config=fft.ManagerConfig({names}…)"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        return cls(**{name: value for name, value in old.items() if value is not None})


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
    config: ManagerConfig
    on_divergence: OnDivergence
    monitor: bool
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
    checkpoint: Checkpointing | str | Path | None,
    config: ManagerConfig,
) -> Settings:
    """Check and complete the arguments of ``ManagerFFT``; ``called`` has those of torchft.

    Services (``alone``) are started last. Raises ConfigError, TokenError, FftError.
    """
    loaded = load_spec(spec or os.environ.get("FFT_SPEC") or "hsdp")
    url = bus or os.environ.get("FFT_BUS")
    _refuse_another_bus(bus)
    if url:
        _refuse_unlaunched(called)
    elif not is_alone(called):
        raise FftError("no bus: pass bus=, or set FFT_BUS to what `fft serve` prints")
    token = JobToken.from_env()
    durable = checkpointing_of(checkpoint)
    wanted = called.arguments["min_replica_size"]
    directory = trace_dir or os.environ.get("FFT_TRACE_DIR")
    if not called.arguments.get("replica_id") and (group := os.environ.get("REPLICA_GROUP_ID")):
        called.arguments["replica_id"] = group
    alone, monitor = None, config.monitor
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
        config=config,
        on_divergence=config.on_divergence or loaded.policies.on_divergence,
        monitor=os.environ.get("FFT_MONITOR") != "0" if monitor is None else monitor,
        is_successor=os.environ.pop("FFT_SUCCESSOR", "") == "1",
        checkpoint=durable,
    )


def refuse_unknown(constructor: Callable[..., None], given: Iterable[str]) -> None:
    """Raise TypeError for a name that is an argument of neither ``constructor`` nor torchft's
    Manager. The message suggests the nearest one."""
    known = {*signature(constructor).parameters, *signature(Manager).parameters} - _NO_NAMES
    known |= ManagerConfig.model_fields.keys()
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

"""Settings of a manager, from its arguments and the environment, read and checked once.

Opens nothing, except for the services of a script without a launcher (`SingleProcessServices`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import BoundArguments, signature
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from torchft.manager import Manager

from fft.bus import ErrorBus
from fft.bus.tcpserver import host_store
from fft.bus.token import JobToken
from fft.checkpoints.plan import Checkpointing, checkpointing_of
from fft.errors import FftError, OtherSettings
from fft.health.detectors.trainer import MonitorConfig
from fft.protocol.active import Rule
from fft.protocol.load import load_spec
from fft.protocol.spec import FsmSpec
from fft.protocol.timeouts import ARGUMENTS, TORCHFT_DEFAULT_S, Given, Timeout, from_env, resolve
from fft.train.session.lighthouse import Membership
from fft.train.state.equality_checks import refuse_interval
from fft.util.names import unknown
from fft.util.version import __version__

logger = logging.getLogger(__name__)

Digest = Literal["never", "commit"]
Learners = Literal["auto", "always", "never"]
OnDivergence = Literal["stop", "heal"]
OnNonfinite = Literal["replay", "stop", "skip", "commit"]


class ManagerConfig(BaseModel):
    """Settings of ``ManagerFFT`` that most scripts need not change; pass them as ``config=``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: Digest = "never"
    """``commit`` traces a digest of this rank's parameters and optimizer state after every commit,
    so that the audit can compare replicas bit by bit. It hashes all of them in every step, which is
    meant for audits, not for long runs. Buffers are excluded, because they may differ."""
    check_replicas: int | None = None
    """Interval in steps at which replicas compare fingerprints in their votes: of parameters and
    optimizer state, and of the reduced gradients; a power of 2. None chooses an interval that costs
    1 % of the time; 0 disables the comparison. It needs ``register``."""
    check_buffers: bool = False
    """Whether the fingerprints of ``check_replicas`` include the buffers of the models, except the
    statistics of normalization layers. These buffers must then be equal on all groups. All groups
    must have the same value."""
    on_divergence: OnDivergence | None = None
    """Reaction to replicas that differ. ``stop`` ends the job with ``Diverged``. With ``heal``,
    ranks that differ from the majority fetch its state; without a majority the job stops. None
    takes the value of the spec (``policies``), which is ``stop`` as shipped."""
    on_nonfinite: OnNonfinite = "replay"
    """Reaction of FFT's own loop to gradients that contain NaN or inf when the step function ends.
    All groups must have the same value. ``replay`` repeats the step, and ends the job if they are
    there again. ``stop`` ends the job at once. ``skip`` consumes the batch without a step on all
    ranks. ``commit`` does not look. With a registered scaler, the scaler skips such steps instead.
    """
    recompute_every: int = Field(0, ge=0)
    """Interval in steps at which FFT's own loop computes a step twice and compares the gradients
    before their reduction; 0 disables it. A rank that computes different gradients votes NO and is
    accused. It costs about a step in each interval, and needs deterministic kernels. All groups
    must have the same value."""
    learners: Learners = "auto"
    """Whether a joining group runs its first step function while it still fetches the state.

    ``auto``: only where step functions do not compute on that state, as with ``fft.LocalSGD`` and
    ``fft.DiLoCo``. ``always``: step functions change gradients at most, by nothing but gradients,
    and no part of the state (with ``digest="commit"`` the group waits all the same). ``never``: the
    group waits for the state first, and rehearses no step before it joins.
    """
    max_body_failures: int | None = None
    """Number of consecutive failures of this rank's step function at one step after which the error
    is raised. None means 2 with the same error (type, message and stack), 5 in all."""
    monitor: bool | None = None
    """Whether a monitor process watches this one: it starts a rollback when the main thread hangs,
    ends the process if that does not help, and reports its death. None starts it if the main thread
    trains, unless ``FFT_MONITOR=0`` (for debuggers: a breakpoint looks like a hang)."""
    progress_interval: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Seconds between two progress reports, which show slow ranks; 0 disables them."""
    membership: Membership = "register"
    """``register``: the job's register alone decides the membership; a configured lighthouse
    (``lighthouse_addr``, ``TORCHFT_LIGHTHOUSE``) only receives heartbeats. ``lighthouse``: no txn
    commits without a quorum of the lighthouse that names every group. All groups must have the same
    value."""

    active: tuple[Rule, ...] = ()
    """Rules of ``fft.active`` that choose the groups whose gradients count, applied in this order.
    The other groups are spares. Only for specs whose groups run in lockstep. All groups must have
    the same value. ``min_replica_size`` is the minimum number of chosen groups."""
    place: str = Field(default_factory=socket.gethostname)
    """Name of the node or rack of this group, for ``fft.active.whole``. Default: the host name."""

    @field_validator("active")
    @classmethod
    def _check_rules(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        for rule in rules:
            if rule.number < 1:
                raise ValueError(f"{rule}: expected a number of at least 1")
        return rules

    @field_validator("check_replicas")
    @classmethod
    def _check_interval(cls, every: int | None) -> int | None:
        refuse_interval(every)
        return every


_NO_NAMES = {"self", "args", "kwargs"}
"""Parameters of a constructor that cannot be passed by name."""


_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables that are set if more than one process was started or is planned."""
_PLACES = ("rank", "world_size", "store_addr", "store_port")
"""Arguments of torchft's Manager with which a script sets its rank and its store itself."""


def is_single_process(called: BoundArguments, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the whole job: neither a launcher nor the script defines others."""
    is_launched = any(environ.get(name) for name in _LAUNCHERS)
    return not is_launched and all(called.arguments.get(name) is None for name in _PLACES)


class SingleProcessServices:
    """The services of a job of one process, from construction until ``close``."""

    def __init__(self, called: BoundArguments) -> None:
        """Start the store, and set rank, world size and store in torchft's arguments."""
        self.bus_url = f"memory://alone-{secrets.token_hex(4)}"
        self._store: Any
        self._store, port = host_store()
        wanted = called.arguments["min_replica_size"]
        here = {"store_addr": "127.0.0.1", "store_port": port, "rank": 0, "world_size": 1}
        called.arguments.update(here, min_replica_size=1)
        lowered = f" (min_replica_size is 1, not {wanted})" if wanted != 1 else ""
        logger.warning(
            "no launcher and no FFT_BUS found: running as a job of one process (one group of one "
            "rank)%s without hang detection; use `fft run` for more",
            lowered,
        )

    def close(self) -> None:
        """End the store. Idempotent."""
        self._store = None


@dataclass(frozen=True)
class Settings:
    """The arguments of ``ManagerFFT`` that are not torchft's, completed by their defaults."""

    spec: FsmSpec
    bus_url: str
    token: JobToken | None
    alone: SingleProcessServices | None
    """Services of a job of one process, or None if they were started outside."""
    trace_dir: Path | None
    expected_groups: int
    timeouts: Mapping[str, float]
    """Given timeouts in seconds by name; `timeout_table` adds the defaults."""
    config: ManagerConfig
    on_divergence: OnDivergence
    monitor: bool
    is_replacement: bool
    """The process replaces a lost rank of a living group.

    It connects to no peer before its first epoch.
    """
    checkpoint: Checkpointing | None
    """Durable checkpoints, or None if none are taken."""

    def timeout_table(self, manager: Manager) -> Mapping[str, Timeout]:
        """Return all timeouts, after torchft's constructor has applied its environment variables.

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

    The services of a job of one process (``alone``) are started last. Raises ConfigError,
    TokenError, FftError.
    """
    loaded = load_spec(spec or os.environ.get("FFT_SPEC") or "hsdp")
    url = bus or os.environ.get("FFT_BUS")
    _refuse_another_bus(bus)
    if url:
        _refuse_unlaunched(called)
    elif not is_single_process(called):
        raise FftError("no bus: pass bus=, or set FFT_BUS to what `fft serve` prints")
    token = JobToken.from_env()
    durable = checkpointing_of(checkpoint)
    wanted = called.arguments["min_replica_size"]
    directory = trace_dir or os.environ.get("FFT_TRACE_DIR")
    if not called.arguments.get("replica_id") and (group := os.environ.get("REPLICA_GROUP_ID")):
        called.arguments["replica_id"] = group
    alone, monitor = None, config.monitor
    if not url:
        alone = SingleProcessServices(called)
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
        is_replacement=os.environ.pop("FFT_SUCCESSOR", "") == "1",
        checkpoint=durable,
    )


def refuse_unknown(constructor: Callable[..., None], given: Mapping[str, object]) -> None:
    """Check the names of the arguments of ``constructor``.

    Raises:
        TypeError: A name is a setting, or an argument of neither ``constructor`` nor torchft's
            Manager. The message shows its place, or suggests the nearest name.
    """
    known = {*signature(constructor).parameters, *signature(Manager).parameters} - _NO_NAMES
    for name in given:
        if name in ManagerConfig.model_fields:
            raise TypeError(
                f"ManagerFFT(): {name}= is a setting: pass config=fft.ManagerConfig({name}=…)"
            )
        if name not in known:
            raise TypeError(f"ManagerFFT(): {unknown('argument', name, known)}")


def _refuse_another_bus(bus: str | None) -> None:
    """Raise FftError if the script names another bus than that of its supervisor."""
    served = os.environ.get("FFT_BUS")
    if bus and served and bus != served and "FFT_SUPERVISOR_FD" in os.environ:
        raise FftError(
            f"the script passes bus={bus!r}, but `fft run` supervises this job on {served!r}: "
            "remove bus=; for a bus that is served elsewhere set FFT_BUS and start the script by "
            "`fft run --join`"
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
            "a bus is configured, but the rank or the store of this process is not: set "
            f"{', '.join(lacking.values())} or pass {'=, '.join(lacking)}=, or start the script "
            "by `fft run` or torchrun; for a job of one process, unset FFT_BUS"
        )


def monitor_config(table: Mapping[str, Timeout]) -> MonitorConfig:
    """Return the limits for a hanging main thread and a lost host, from the table of timeouts."""
    limit, grace = table["hang_limit"].seconds, table["hang_grace"].seconds
    host_s = table["host_limit"].seconds
    return MonitorConfig(limit, grace, min_s=min(1.0, limit), host_s=host_s)


def drain_within() -> float | None:
    """Return the drain deadline in seconds after the signal (``FFT_DRAIN_WITHIN``), or None."""
    text = os.environ.get("FFT_DRAIN_WITHIN")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise FftError(
            f"FFT_DRAIN_WITHIN={text!r}: expected a positive number of seconds, such as 30"
        )
    return seconds


_KEY = "settings"
"""Register of the job's bus."""
_TEXT = {"doc", "why", "elsewhere"}
"""Fields of a spec that are text for its reader."""
_RULES = {"states", "common", "sequences"}
"""Fields of a spec that are too long for the error message; their digests are compared."""
_SHOWN = 3


def common_settings(spec: FsmSpec, **others: Any) -> dict[str, Any]:
    """Return the settings that all processes must share, by the path that the error names.

    Such paths are ``spec``, ``policies.bound`` and ``states.NORMAL``.
    """
    found: dict[str, Any] = {}
    for section, value in _without_text(spec.model_dump(mode="json")).items():
        if section in _RULES:
            found.update({f"{section}.{name}": _digest(rule) for name, rule in value.items()})
        elif section not in ("timers", "name", "version"):
            found.update(_flat(section, value))
    return {"FFT": __version__, "spec": spec.name, **others, **found}


def refuse_other_settings(bus: ErrorBus, mine: Mapping[str, Any]) -> None:
    """Raise OtherSettings if the job runs with settings other than ``mine``. Raises BusError."""
    text = json.dumps(mine, sort_keys=True).encode()
    held = bus.compare_set(_KEY, None, text)
    if held is None or held == text:
        return
    theirs = json.loads(held)
    if (there := theirs.get("FFT")) != mine["FFT"]:
        raise OtherSettings(
            f"this process has FFT {mine['FFT']}, and the job that it would join has FFT "
            f"{there or '0.1.0 or older'}: install one version for all processes of a job; to "
            "change it, end the job and start it again, and it resumes from its checkpoint"
        )
    both = [*mine, *(place for place in theirs if place not in mine)]
    places = [place for place in both if mine.get(place) != theirs.get(place)]
    differences = [
        f"{p}: {_value(mine, p)} here, {_value(theirs, p)} there" for p in places[:_SHOWN]
    ]
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    raise OtherSettings(
        "the settings of this process differ from those of the job that it would join: "
        f"{'; '.join(differences)}{more}. Start all processes with the same script, arguments and "
        "spec; to change them, end the job and start it again"
    )


def _without_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_text(each) for key, each in value.items() if key not in _TEXT}
    return [_without_text(each) for each in value] if isinstance(value, list) else value


def _flat(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield place, value
        return
    for key, each in value.items():
        yield from _flat(f"{place}.{key}", each)


def _digest(rule: Any) -> str:
    return hashlib.blake2b(json.dumps(rule, sort_keys=True).encode(), digest_size=6).hexdigest()


def _value(settings: Mapping[str, Any], place: str) -> str:
    return json.dumps(settings[place]) if place in settings else "absent"

"""Settings that must be equal on all ranks of a job; the first rank that joins stores them.

Ranks that decide by different rules could not agree on a step, or would agree on different results.
Timeouts may differ, since each rank waits on its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fft.bus import ErrorBus
from fft.errors import OtherSettings
from fft.protocol.spec import FsmSpec

_KEY = "settings"
"""Register of the job's bus."""
_TEXT = {"doc", "why", "elsewhere"}
"""Fields of a spec that are text for its reader."""
_RULES = {"states", "common", "sequences"}
"""Fields of a spec that are too long for the error message; their digests are compared."""
_SHOWN = 3


def common_settings(spec: FsmSpec, **others: Any) -> dict[str, Any]:
    """Return the settings by the place that the error names: ``spec``, ``policies.bound``,
    ``states.NORMAL``, …"""
    found: dict[str, Any] = {}
    for section, value in _without_text(spec.model_dump(mode="json")).items():
        if section in _RULES:
            found.update({f"{section}.{name}": _digest(rule) for name, rule in value.items()})
        elif section not in ("timers", "name", "version"):
            found.update(_flat(section, value))
    return {"spec": spec.name, **others, **found}


def refuse_other_settings(bus: ErrorBus, mine: Mapping[str, Any]) -> None:
    """Raise OtherSettings if the job runs with settings other than ``mine``. Raises BusError."""
    text = json.dumps(mine, sort_keys=True).encode()
    held = bus.compare_set(_KEY, None, text)
    if held is None or held == text:
        return
    theirs = json.loads(held)
    both = [*mine, *(place for place in theirs if place not in mine)]
    places = [place for place in both if mine.get(place) != theirs.get(place)]
    told = [f"{p}: {_value(mine, p)} here, {_value(theirs, p)} there" for p in places[:_SHOWN]]
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    raise OtherSettings(
        f"this process is not set up as the job that it would join: {'; '.join(told)}{more}. "
        "Start all processes with the same script, arguments and spec; to change them, end the "
        "job and start it again"
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

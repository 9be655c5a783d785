"""The place of FFT's exceptions before `fft.errors`. Its names work until the next release."""

from __future__ import annotations

import warnings
from typing import Any

import fft.errors

_NEW = {
    "SpecError": "ConfigError",
    "UnlikeGroups": "GradientLayoutMismatch",
    "CannotMeet": "GroupNotReformable",
    "FlowStalled": "UpstreamTimeout",
    "NoQuorum": "NoLighthouseQuorum",
    "BodyKeepsFailing": "StepRetriesExceeded",
}
"""Old name to new name, where they differ."""


def __getattr__(name: str) -> Any:
    new = _NEW.get(name, name)
    if name.startswith("_") or not hasattr(fft.errors, new):
        raise AttributeError(f"module 'fft.util.errors' has no attribute {name!r}")
    text = f"fft.util.errors.{name} is fft.errors.{new} now; the old name ends with this release"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return getattr(fft.errors, new)

"""The shipped spec as one text, in which tests plant mistakes."""

from __future__ import annotations

import yaml

from fft.protocol.include import read_whole
from fft.protocol.load import find_spec


def whole_text(name: str) -> str:
    """Return a spec with everything that it includes; a row of its file stays on one line."""
    path = find_spec(name)
    return str(yaml.serialize(read_whole(path.read_text("utf-8"), str(path)), width=1000))

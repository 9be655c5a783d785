"""The shipped spec as one text, to plant mistakes in."""

from __future__ import annotations

import yaml

from fft.protocol.include import read_whole
from fft.protocol.load import find_spec


def whole_text(name: str) -> str:
    """A spec with all that it includes, a row on a line where its file has it so."""
    path = find_spec(name)
    return str(yaml.serialize(read_whole(path.read_text("utf-8"), str(path)), width=1000))

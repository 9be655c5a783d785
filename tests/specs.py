"""Tables of specs, and a shipped spec as one text in which tests plant mistakes."""

from __future__ import annotations

import yaml

from fft.protocol.load import find_spec, read_whole
from fft.protocol.spec import FsmSpec
from fft.protocol.table import Table

_tables: dict[int, Table] = {}


def table_of(spec: FsmSpec) -> Table:
    """Return the spec's table, built once, because building one takes as long as a small test."""
    if id(spec) not in _tables:
        _tables[id(spec)] = Table(spec)  # keeps the spec, so that no other one gets its id
    return _tables[id(spec)]


def whole_text(name: str) -> str:
    """Return a spec with everything that it includes; a row of its file stays on one line."""
    path = find_spec(name)
    return str(yaml.serialize(read_whole(path.read_text("utf-8"), str(path)), width=1000))

"""Where the parts of a job run: groups, spares and the bus on the nodes of a scheduler. Pure.

A part is one `fft run --join`. Each scheduler starts the parts in its own way; the parts and their
commands are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fft.errors import ConfigError

BUS_NODE = 0
"""The node that serves the bus, if the job has no bus of its own elsewhere."""


@dataclass(frozen=True)
class Part:
    """One `fft run --join` on one node."""

    name: str
    """Name of the part, and of its output file."""
    node: int
    """Number of its node."""
    first_group: int
    groups: int
    """Number of its groups: 1, or 0 for a node with spares only."""
    spares: int
    """Number of processes that wait to take over groups of lost nodes."""


@dataclass(frozen=True)
class Placement:
    """The parts of a job on ``nodes + spare_nodes`` nodes.

    Each group has a part of its own. Node n has the groups from ``n * groups_per_node`` on. Each
    spare node has as many spares as the groups of one node have ranks.
    """

    groups: int
    ranks: int
    nodes: int
    spare_nodes: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError if the groups cannot be placed."""
        if self.groups < 1 or self.ranks < 1:
            raise ConfigError(
                f"{self.groups} groups of {self.ranks} ranks: expected at least 1 of each"
            )
        if self.nodes < 1 or self.groups % self.nodes:
            raise ConfigError(
                f"--nodes {self.nodes}: expected a divisor of --groups {self.groups}, so that all "
                "nodes have the same number of groups, and one spare node can replace any of them"
            )

    @property
    def groups_per_node(self) -> int:
        """Number of groups on each node that is not a spare."""
        return self.groups // self.nodes

    def parts(self) -> Iterator[Part]:
        """Yield the parts of all nodes, those of the groups first."""
        for group in range(self.groups):
            yield Part(f"group-{group}", group // self.groups_per_node, group, 1, 0)
        for number in range(self.spare_nodes):
            spares = self.groups_per_node * self.ranks
            yield Part(f"spare-{number}", self.nodes + number, 0, 0, spares)

    def options(self, part: Part) -> list[str]:
        """Return the options of `fft run` that make it the given part."""
        return [
            *("--first-group", str(part.first_group), "--groups", str(part.groups)),
            *(("--spares", str(part.spares)) if part.spares else ()),
        ]

    def common_options(self) -> Sequence[str]:
        """Return the options of `fft run` that all parts share."""
        return ("--join", "--ranks", str(self.ranks), "--all-groups", str(self.groups))

"""Where the parts of a job run: groups, spares and the bus on the nodes of a scheduler. Pure.

A part is all ranks of a group, or those on one host, or spares. Each is one `fft run --join`. Each
scheduler starts the parts in its own way; the parts and their commands are the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fft.errors import ConfigError


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


class SplitGroup:
    """A replica group of ``ranks`` ranks, of which each host has ``ranks_per_host``, or all."""

    ranks: int
    ranks_per_host: int | None

    @property
    def local_ranks(self) -> int:
        """Number of ranks of a group on one host."""
        return self.ranks_per_host or self.ranks

    @property
    def parts_of_group(self) -> int:
        """Number of parts of each group, which is that of its hosts."""
        return self.ranks // self.local_ranks

    def wrong_split(self) -> str | None:
        """Return why the group cannot be split in this way, or None."""
        given = self.ranks_per_host
        if given is None or (given >= 1 and self.ranks % given == 0):
            return None
        return (
            f"--ranks-per-host {given}: expected a divisor of --ranks {self.ranks}, so that all "
            "hosts of a group have the same number of its ranks"
        )


@dataclass(frozen=True)
class Placement(SplitGroup):
    """The parts of a job on ``nodes + spare_nodes`` nodes.

    Each group has a part of its own, or one for every ``ranks_per_host`` of its ranks. Node n has
    the groups from ``n * groups_per_node`` on, or the n-th part. Each spare node has as many spares
    as one node has ranks.
    """

    groups: int
    ranks: int
    nodes: int
    spare_nodes: int = 0
    ranks_per_host: int | None = None

    @classmethod
    def of(
        cls, groups: int, ranks: int, nodes: int | None, spares: int, per_host: int | None
    ) -> Placement:
        """Return a placement on ``nodes`` nodes, by default one for each part."""
        parts = ranks // per_host if per_host else 1
        return cls(groups, ranks, nodes or groups * parts, spares, per_host)

    def __post_init__(self) -> None:
        """Raise ConfigError if the groups cannot be placed."""
        if self.groups < 1 or self.ranks < 1:
            raise ConfigError(
                f"{self.groups} groups of {self.ranks} ranks: expected at least 1 of each"
            )
        if (wrong := self.wrong_split()) is not None:
            raise ConfigError(wrong)
        if self.parts_of_group > 1 and self.nodes != self.groups * self.parts_of_group:
            raise ConfigError(
                f"--nodes {self.nodes}: expected {self.groups * self.parts_of_group}, one for each "
                f"{self.local_ranks} ranks of a group; leave --nodes out"
            )
        if self.parts_of_group == 1 and (self.nodes < 1 or self.groups % self.nodes):
            raise ConfigError(
                f"--nodes {self.nodes}: expected a divisor of --groups {self.groups}, so that all "
                "nodes have the same number of groups, and one spare node can replace any of them"
            )

    @property
    def groups_per_node(self) -> int:
        """Number of groups of which each node that is not a spare has a part."""
        return max(1, self.groups // self.nodes)

    def parts(self) -> Iterator[Part]:
        """Yield the parts of all nodes, those of the groups first."""
        for number in range(self.groups * self.parts_of_group):
            group, part = divmod(number, self.parts_of_group)
            name = f"group-{group}" + (f"-part-{part}" if self.parts_of_group > 1 else "")
            yield Part(name, number // self.groups_per_node, group, 1, 0)
        for number in range(self.spare_nodes):
            spares = self.groups_per_node * self.local_ranks
            yield Part(f"spare-{number}", self.nodes + number, 0, 0, spares)

    def options(self, part: Part) -> list[str]:
        """Return the options of `fft run` that make it the given part."""
        return [
            *("--first-group", str(part.first_group), "--groups", str(part.groups)),
            *(("--spares", str(part.spares)) if part.spares else ()),
        ]

    def common_options(self) -> Sequence[str]:
        """Return the options of `fft run` that all parts share."""
        of_host = ("--ranks-per-host", str(self.local_ranks)) if self.parts_of_group > 1 else ()
        return ("--join", "--ranks", str(self.ranks), *of_host, "--all-groups", str(self.groups))

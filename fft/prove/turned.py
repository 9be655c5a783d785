"""States of the model with other names for the groups. Pure."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fft.prove.intern import Interner, Renamer
from fft.prove.nodes import Shared

if TYPE_CHECKING:
    from fft.prove.acts import State
    from fft.prove.model import Model

GROUPS = "ABCDEFGH"


class Turned:
    """A renaming of the groups in states; every part is renamed once and cached."""

    def __init__(self, model: Model, names: dict[str, str]) -> None:
        self._model, self._rename = model, Renamer(names)
        ranks = model.bounds.ranks
        self._to = [
            GROUPS.index(names[GROUPS[who // ranks]]) * ranks + who % ranks
            for who in range(model.size)
        ]
        self._nodes: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._facts: dict[int, int] = {}
        self._events: dict[int, int] = {}
        self._effects: dict[int, int] = {}
        self._locals: dict[int, int] = {}

    def state(self, state: State) -> State:
        """Return the state with the other names."""
        size, after = self._model.size, list(state)
        nodes = self._nodes
        for who, to in enumerate(self._to):
            number = state[who]
            new = nodes.get(number)
            after[to] = self._node(number) if new is None else new
        number = state[size]
        new = self._shared.get(number)
        after[size] = self._bus(number) if new is None else new
        number = state[-1]
        new = self._facts.get(number)
        after[-1] = self._kept(self._facts, self._model.facts, number) if new is None else new
        return tuple(after)

    def _kept(self, kept: dict[int, int], values: Interner[Any], number: int) -> int:
        new = kept.get(number)
        if new is None:
            new = kept[number] = values.id(self._rename(values[number]))
        return new

    def _node(self, number: int) -> int:
        model, node = self._model, self._model.nodes[number]
        if node.local >= 0:
            task = node.task
            if model.at(node) == "connecting" and task[1] is not None:
                task = (task[0], self._to[task[1]])
            event = partial(self._kept, self._events, model.events)
            effect = partial(self._kept, self._effects, model.effects)
            node = node._replace(
                local=self._kept(self._locals, model.locals, node.local),
                inbox=tuple(map(event, node.inbox)),
                mail=tuple(map(event, node.mail)),
                pending=tuple(map(effect, node.pending)),
                answers=tuple(map(event, node.answers)),
                done=node.done if node.done < 0 else event(node.done),
                task=task,
                source=None if node.source is None else self._to[node.source],
                bits=self._rename(node.bits),
            )
        self._nodes[number] = model.nodes.id(node)
        return self._nodes[number]

    def _bus(self, number: int) -> int:
        head, ballots, bus, scopes = self._model.shared[number]
        rename = self._rename
        turned = tuple(
            (token, tuple(sorted((rename(v) for v in votes), key=lambda v: v.peer)))
            for token, votes in ballots
        )
        new = self._model.shared.id(Shared(rename(head), turned, bus, rename(scopes)))
        self._shared[number] = new
        return new

"""The states of torch's generators before each call that draws, as a step in one piece finds them.

Tiles make the calls of a model in another order, and many times. So all calls are gone through once, before the first
tile, in the order of the model:

    dropout of the image          draws a key, and so does the walk
    bernoulli_ of a plain tensor  is made, on the device where the model makes it, and whatever it is computed from
    the same of a mean            is made with ones in place of what only tiles can tell

Each tile that makes a call begins with the state that the walk found there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.graph.nodes import Place
from mural.memory.call_draws import CallDraws
from mural.memory.call_probe import CANNOT, on_one_rank, whole_tile
from mural.memory.tile_calls import TileCall, TileGraph, as_in_model, made_by
from mural.shard.generators import random_state, set_random_state
from mural.shard.ops.random.lattice import new_key

BY_VALUES = frozenset([
    "poisson", "binomial", "_standard_gamma", "_sample_dirichlet",
    "rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional",
])  # fmt: skip
"""The operations that take more or fewer numbers from the generator, as their arguments have it."""


class RandomStates:
    """Sets torch's generators before a call as a step in one piece that begins with their present state.

    `held` are the parameters, buffers and constants by name.
    """

    def __init__(self, graph: TileGraph, held: Mapping[str, Tensor], device: torch.device):
        self.graph, self.held, self.device = graph, held, device
        self.states: dict[int, Tensor] = {}
        self.values: dict[Place, Any] = {}
        self.guessed: set[Place] = set()
        """The values that only tiles can tell, and what was computed from them."""
        calls = graph.in_order
        last = max((number for number, call in enumerate(calls) if call.random), default=-1)
        made = self._sources(calls[:last])
        for call in calls[: last + 1]:
            if call.random:
                self.states[call.node.id] = random_state(device)
            if call is not calls[last]:
                self._pass(call, call.node.id in made)
        self.values.clear()

    def __call__(self, call: int) -> None:
        """Set the generators as the call with this id finds them."""
        set_random_state(self.states[call], self.device)

    def _sources(self, calls: list[TileCall]) -> set[int]:
        """The calls without tiles that what draws by torch's own means is computed from."""
        found: set[int] = set()
        for call in reversed(calls):
            if call.keys is None or call.node.id in found:
                found.add(call.node.id)
                found.update(source for source in call.node.needs if isinstance(source, int))
        return {call.node.id for call in calls if call.node.id in found and (call.plain or call.keys is None)}

    def _pass(self, call: TileCall, made: bool) -> None:
        """Draw what a call draws."""
        if made:
            self._make(call)
            return
        for _ in range(call.keys or 0):
            new_key()

    def _make(self, call: TileCall) -> None:
        """Make a call for its draws, and for those of calls that need what it makes."""
        node = call.node
        given = [self._argument(place) for place in node.reads]
        try:
            with torch.no_grad(), as_in_model(node, self.device), CallDraws() as draws:
                result = call.form.call(given, self.device)
        except CANNOT as error:
            raise UnsupportedOp(f"{self._unknown(call)}, and it cannot be tried with ones: {error}") from error
        guessed = not self.guessed.isdisjoint(node.reads)
        names = {operation.name().removeprefix("aten::").partition(".")[0] for operation in draws.operations}
        if guessed and names & BY_VALUES:
            raise UnsupportedOp(f"{self._unknown(call)}: how many depends on values that only tiles can tell")
        if call.plain:
            self.values |= made_by(node, result, given)
            self.guessed.update(node.makes if guessed else ())

    def _argument(self, place: Place) -> Any:
        """A tensor that a call is given: ones, if only tiles can tell."""
        if place in self.values:
            return self.values[place]
        name = str(place[0])
        if name in self.held:
            self.values[place] = self.held[name].clone() if name in self._written else self.held[name]
            return self.values[place]
        self.guessed.add(place)
        value = self.graph.values[place]
        ones = torch.ones(value.shape, dtype=value.dtype, device=self.device)
        return on_one_rank(whole_tile(ones, value.axes, value.folds))

    @property
    def _written(self) -> set[str]:
        """The tensors of the model that calls write to: not yet."""
        return {source for call in self.graph.in_order for source in call.node.writes if isinstance(source, str)}

    def _unknown(self, call: TileCall) -> str:
        return (
            f"{call.node.op} at {call.node.site!r} draws random numbers, and a streamed step has to know how many "
            f"before its tiles, so that calls after it draw those of a step in one piece"
        )

"""The states of torch's generators before each call that draws, as a step in one piece finds them.

Tiles make the calls of a model in another order, and many times. So all calls are gone through once before the first
tile, in the order of the model, and what they draw is drawn:

    dropout of the image           a key
    bernoulli_ of a plain tensor   the call is made, with all that its arguments are computed from
    bernoulli of a mean            the call is made with ones, as only tiles can tell the mean

A tile that makes a call begins with the state that was found there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
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
"""The operations that take more numbers from the generator for some arguments than for others of the same shape."""


class RandomStates:
    """Sets torch's generators before a call as a step in one piece finds them, if it begins with what they are now.

    `held` are the parameters, buffers and constants by name.
    """

    def __init__(self, graph: TileGraph, held: Mapping[str, Tensor], device: torch.device):
        self.graph, self.held, self.device = graph, held, device
        self.states: dict[int, Tensor] = {}
        self.values: dict[Place, Any] = {}
        """The tensors of calls that were made."""
        self.guessed: set[Place] = set()
        """What only tiles can tell, and what was computed from it."""
        calls = graph.in_order
        last = max((number for number, call in enumerate(calls) if call.random), default=-1)
        made = made_for_draws(calls[:last])
        for number, call in enumerate(calls[: last + 1]):
            if call.random:
                self.states[call.node.id] = random_state(device)
            if call.node.id in made:
                self._make(call)
            elif number < last:
                for _ in range(call.keys or 0):
                    new_key()
        self.values.clear()

    def __call__(self, call: int) -> None:
        """Set the generators as the call with this id finds them."""
        set_random_state(self.states[call], self.device)

    def _make(self, call: TileCall) -> None:
        """Make a call for its draws, and for those of calls that take what it makes."""
        node = call.node
        given = [self._argument(place) for place in node.reads]
        try:
            with torch.no_grad(), as_in_model(node, self.device), CallDraws() as draws:
                result = call.form.call(given, self.device)
        except CANNOT as error:
            raise refusal(call, f"cannot be tried with ones ({error})") from error
        guessed = not self.guessed.isdisjoint(node.reads)
        names = {operation.overloadpacket.__name__ for operation in draws.operations}
        if guessed and names & BY_VALUES:
            raise refusal(call, "draws as many numbers as values say that only tiles can tell")
        if call.plain:
            self.values |= made_by(node, result, given)
            self.guessed.update(node.makes if guessed else ())

    def _argument(self, place: Place) -> Any:
        """A tensor that a call is given: ones, if only tiles can tell."""
        name = str(place[0])
        if place not in self.values and name in self.held:
            self.values[place] = self.held[name].clone() if name in self._written else self.held[name]
        if place in self.values:
            return self.values[place]
        self.guessed.add(place)
        value = self.graph.values[place]
        ones = torch.ones(value.shape, dtype=value.dtype, device=self.device)
        return on_one_rank(whole_tile(ones, value.axes, value.folds))

    @cached_property
    def _written(self) -> frozenset[str]:
        """The parameters, buffers and constants that calls write to: in a step, and not here."""
        return frozenset(s for call in self.graph.in_order for s in call.node.writes if isinstance(s, str))


def made_for_draws(calls: Sequence[TileCall]) -> set[int]:
    """The calls that draw by torch's own means, and the calls without tiles that their arguments come from."""
    found: set[int] = set()
    for call in reversed(calls):
        if call.keys is None or (call.plain and call.node.id in found):
            found |= {call.node.id, *(source for source in call.node.needs if isinstance(source, int))}
    return {call.node.id for call in calls if call.node.id in found and (call.plain or call.keys is None)}


def refusal(call: TileCall, why: str) -> UnsupportedOp:
    """The error for a call after which the state of the generators cannot be told."""
    return UnsupportedOp(
        f"{call.node.op} at {call.node.site!r} {why}: later calls of a streamed step would draw others than in a step "
        f"in one piece. Let it draw last, or do not stream"
    )

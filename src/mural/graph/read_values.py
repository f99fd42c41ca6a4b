"""Values that Python reads of tensors while a model is captured: those that no image reaches are worked out.

dims = torch.arange(2, x.ndim).tolist()      numbers alone: the call is made again, with memory
if self.weight.min() < 0:                    a buffer: what it holds now, where the capture is of this step alone
if x.max() > 1:                              the image: nobody knows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.graph.nodes import Node, Ref
from mural.graph.origins import Read
from mural.graph.without_memory import META
from mural.shard.functions import KIND as FUNCTION

CPU = torch.device("cpu")


class Unknown(Exception):
    """Values that cannot be known while a model is captured."""


class KnownValues:
    """Works out the values of tensors from the calls that made them; `named` are parameters, buffers, constants."""

    def __init__(self, nodes: Sequence[Node], named: Mapping[str, Tensor]):
        self.nodes, self.named = nodes, named
        self.found: dict[int, list[Tensor]] = {}

    def of(self, read: Read | None) -> Tensor:
        """The values of a tensor, on the CPU; raises `Unknown` where an image or a write in place reaches it."""
        if read is None or read.after:
            raise Unknown
        if not isinstance(read.source, str):
            return self._made(read.source)[read.pick]
        held = self.named.get(read.source)
        if held is None or held.is_meta:
            raise Unknown
        return held.detach().to(CPU)

    def _made(self, number: int) -> list[Tensor]:
        """What a call gives."""
        if number not in self.found:
            node = self.nodes[number]
            if node.writes or node.func is None or node.kind == FUNCTION:
                raise Unknown
            given = [self.of(Read(source, pick, node.after)) for source, pick in node.reads]
            args, kwargs = pytree.tree_map_only(Ref, lambda ref: given[ref.index], (node.args, dict(node.kwargs)))
            args, kwargs = pytree.tree_map_only(torch.device, lambda d: CPU if d == META else d, (args, kwargs))
            state = torch.get_rng_state()
            with torch.no_grad():
                result = node.func(*args, **kwargs)
            if not torch.equal(state, torch.get_rng_state()):
                torch.set_rng_state(state)
                raise Unknown
            self.found[number] = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return self.found[number]

"""The graph of a model: the calls that a forward pass makes, in order, as frozen and printable data."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.graph.sites import At, ModuleCall
from mural.shard.autocasting import Casts

Shape = tuple[int, ...]
Source = int | str
"""Where a tensor comes from: the id of the node that made it, or the name of an input or a parameter."""
Place = tuple[Source, int]
"""A tensor of a graph: where it comes from, and which of the outputs there it is."""
Role = Literal["input", "parameter", "buffer", "constant", "output"]


@dataclass(frozen=True)
class Value:
    """A tensor that enters or leaves the graph: an input, a parameter, buffer or constant, or an output.

    `source`, `pick` and `after` are an output's; they mean what they mean in a `Node`.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    source: Source
    pick: int = 0
    after: tuple[int, ...] = ()
    role: Role = "constant"


@dataclass(frozen=True)
class Ref:
    """A placeholder for a tensor in a recorded call: the i-th of the node's inputs."""

    index: int


@dataclass(frozen=True)
class Saved:
    """Memory that autograd keeps for the backward of a call.

    The same `memory` is the same storage, to be counted once. `owner` says whose tensor is there: a node's id or a
    name; None for memory that the call itself made, as the mask of a dropout.
    """

    memory: int
    bytes: int
    owner: Source | None


@dataclass(frozen=True)
class Node:
    """One call of a torch function, at the level at which a sharded tensor intercepts it.

    `inputs[i]` says who made the i-th tensor among the arguments, and `picks[i]` which of its outputs it is.
    An in-place call is a node whose output is the next version of what it wrote. A call that wrote to an
    argument's memory through another tensor (a view of it, a buffer) is in `after`: it comes first too.
    `kind` is that of the rule in the table of operations, None where there is no rule. `func(*args, **kwargs)` is the
    call, with a `Ref` for each tensor; `writes` says whose memory it writes to, `saved` what its backward keeps,
    `call` is the index of the innermost call of a module that it happened in, `gradients` says for each output whether
    it requires a gradient, and `returns` which inputs are the outputs of a call that writes and returns nothing.
    `result` is what it returned, with a `Ref` for each output, and `same` says for each output which input it is
    itself. `detached` says that the model had turned gradients off (`torch.no_grad`), `casts` what it had changed of
    autocast. `time` counts all calls, including those outside the dataflow. `again` says that it is in a block of
    torch's checkpoint, which backward computes again, and `repeated` how often it writes there then; -1 where that is
    not known.
    """

    id: int
    site: str
    op: str
    kind: str | None
    module: str
    inputs: tuple[Source, ...]
    picks: tuple[int, ...]
    after: tuple[int, ...]
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    input_dtypes: tuple[torch.dtype, ...] = ()
    gradients: tuple[bool, ...] = ()
    writes: tuple[Source, ...] = ()
    saved: tuple[Saved, ...] = ()
    call: int = 0
    returns: tuple[int, ...] = ()
    func: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    args: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    result: Any = field(default=None, compare=False, repr=False)
    same: tuple[int | None, ...] = field(default=(), compare=False, repr=False)
    detached: bool = field(default=False, compare=False, repr=False)
    casts: tuple[Casts, ...] = field(default=(), compare=False, repr=False)
    time: int = field(default=0, compare=False, repr=False)
    again: bool = field(default=False, compare=False, repr=False)
    repeated: int = field(default=0, compare=False, repr=False)

    @cached_property
    def reads(self) -> tuple[Place, ...]:
        """The tensors that it is given, in order."""
        return tuple(zip(self.inputs, self.picks, strict=True))

    @cached_property
    def makes(self) -> tuple[Place, ...]:
        """The tensors that it makes, in order."""
        return tuple((self.id, pick) for pick in range(len(self.output_shapes)))

    @property
    def needs(self) -> tuple[Source, ...]:
        """Everything that this call waits for."""
        return self.inputs + self.after

    @property
    def idle(self) -> bool:
        """Whether it gives back what it got, as a dropout does that drops nothing."""
        return bool(self.same) and None not in self.same and not self.writes


@dataclass(frozen=True, repr=False)
class Graph:
    """The nodes of one forward pass in the order in which they ran; `graph[site]` is the node of a call-site.

    `calls` are the calls of modules, that of the model first. `effects` are calls that change the model but are not
    part of the dataflow, as the counting of batches: each with the id of the node that came next. `held` are the
    constants themselves. `touched` are the attributes that changed, by module and name, with the calls that read or
    set them; `carried` what the next pass reads: the buffers that were rebound, the numbers that were counted on, and
    Python's generators that were drawn from. `besides` is what the forward does that its calls do not, as texts, and
    `reseeded` the time of the first call after it has set torch's generator.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    parameters: tuple[Value, ...]
    outputs: tuple[Value, ...]
    calls: tuple[ModuleCall, ...] = ()
    effects: tuple[tuple[int, Node], ...] = field(default=(), repr=False)
    held: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor], compare=False, repr=False)
    touched: Mapping[tuple[str, str], frozenset[int]] = field(
        default_factory=dict[tuple[str, str], frozenset[int]], compare=False, repr=False
    )
    carried: tuple[str, ...] = field(default=(), compare=False, repr=False)
    besides: tuple[str, ...] = field(default=(), compare=False, repr=False)
    reseeded: int | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, site: str) -> Node:
        if site not in self._by_site:
            module = site.partition("/")[0].partition("@")[0]
            near = [node.site for node in self.nodes if node.module == module][:8]
            raise KeyError(f"{site!r} is not a call-site of this graph; module {module!r} has {near or 'none'}")
        return self._by_site[site]

    @cached_property
    def given(self) -> Mapping[str, Value]:
        """The inputs, parameters, buffers and constants, by name."""
        return {value.name: value for value in (*self.inputs, *self.parameters)}

    @cached_property
    def last_reads(self) -> Mapping[Place, int]:
        """For each tensor that is read, the last node that does; the number of nodes for what the model returns."""
        found = {place: node.id for node in self.nodes for place in node.reads}
        return found | {(value.source, value.pick): len(self.nodes) for value in self.outputs}

    @cached_property
    def effects_at(self) -> Mapping[int, Sequence[Node]]:
        """The effects, by the node that came next; by the last of all where none did."""
        found: dict[int, list[Node]] = {}
        for before, node in self.effects:
            found.setdefault(min(before, len(self.nodes) - 1), []).append(node)
        return found

    @cached_property
    def passed(self) -> tuple[tuple[Place, int], ...]:
        """The results that modules were given, each with the last node of that call: Python holds it so long."""
        found: list[tuple[Place, int]] = []
        for call in self.calls[1:]:
            leaves = pytree.tree_leaves((call.args, dict(call.kwargs)), is_leaf=lambda leaf: isinstance(leaf, At))
            made = [leaf for leaf in leaves if isinstance(leaf, At) and isinstance(leaf.source, int)]
            found += [((at.source, at.pick), call.stop - 1) for at in made if call.stop > call.start]
        return tuple(found)

    @cached_property
    def _by_site(self) -> dict[str, Node]:
        return {node.site: node for node in self.nodes}

    def unsupported(self) -> tuple[Node, ...]:
        """The nodes that read the image and have no rule.

        A call on parameters and fresh tensors alone needs none: those are plain tensors under any plan.
        """
        reached = reached_from({value.name for value in self.inputs}, self.nodes)
        return tuple(node for node in self.nodes if node.kind is None and node.id in reached)

    def __repr__(self) -> str:
        return f"Graph({len(self)} nodes, {_signature(self.inputs)} -> {_signature(self.outputs)})"

    def __str__(self) -> str:
        rows = [("site", "op", "kind", "output")]
        for node in self.nodes:
            rows.append((node.site, node.op, node.kind or "no rule", ", ".join(map(str, node.output_shapes))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join([repr(self), *(line.rstrip() for line in lines)])


def _signature(values: Sequence[Value]) -> str:
    return ", ".join(f"{value.name} {value.shape}" for value in values) or "nothing"


def reached_from(names: Container[Source], nodes: Sequence[Node]) -> set[int]:
    """The ids of the nodes whose result depends on one of these inputs."""
    reached: set[int] = set()
    for node in nodes:
        if any(source in names or source in reached for source in node.needs):
            reached.add(node.id)
    return reached


def needed_by(ids: set[int], nodes: Sequence[Node]) -> set[int]:
    """These nodes and all that they wait for, near or far."""
    needed = set(ids)
    for node in reversed(nodes):
        if node.id in needed:
            needed.update(source for source in node.needs if isinstance(source, int))
    return needed

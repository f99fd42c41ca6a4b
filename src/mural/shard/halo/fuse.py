"""Fused halos: one exchange with a composed window for several layers, if that is cheaper than one for each.

Nothing is delayed. An operation that has to exchange may fetch a wider window and compute its result with a margin;
the operations after it then find what they read in the margin. How wide? The operations that followed in earlier runs
of the same place in the program are known (`window_chain.py`), and a cost model says how many of them to serve
(`fuse_cost.py`). So the first run exchanges for each layer, and later runs for several. A wrong guess costs time, never
correctness: an operation whose margin does not suffice exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mural.comm.exchange import fetch, saving_hooks
from mural.errors import UnsupportedOp
from mural.geometry import Reads, Window
from mural.shard.halo.exchange_costs import measured
from mural.shard.halo.fuse_cost import Constants
from mural.shard.halo.margin import Margin, Spans, box_in, common, own_spans, wants_in
from mural.shard.halo.window_chain import Site, new_site
from mural.shard.layout import Layout, route
from mural.shard.rules import Place, Windowed, output_layout, windowed, windowed_tile
from mural.shard.tensor import ShardedTensor

ROOM = 4096
"""How many exchanging sites are remembered for one mesh."""

_mode: bool | None = None
_given: Constants | None = None
_weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_numbers = count(1)


@contextmanager
def fusing(on: bool | None = None, constants: Constants | None = None) -> Generator[None]:
    """Whether to fuse halos inside the block, the same on all ranks: always, never, or (None) by their cost.

    `constants` replace measured ones.
    """
    global _mode, _given
    before = _mode, _given
    _mode, _given = on, constants
    try:
        yield
    finally:
        _mode, _given = before


@dataclass
class FuseMemory:
    """What is known about the programs that ran on a mesh."""

    sites: dict[Any, Site | None] = field(default_factory=dict[Any, "Site | None"])
    exchanging: int = 0
    constants: dict[Any, Constants] = field(default_factory=dict[Any, Constants])

    def enter(self, key: Any, site: Site | None) -> None:
        """Remember a site, or that there is none; if there are too many, forget all.

        Sites that exchange are counted: one rank alone may run operations that do not, but all must forget together.
        """
        counts = site is not None and site.layer.exchanges
        if self.exchanging + counts > ROOM or (self.exchanging == 0 and len(self.sites) > ROOM):
            self.sites, self.exchanging = {}, 0
        self.exchanging += counts
        self.sites[key] = site


def memory_of(layout: Layout) -> FuseMemory:
    """The memory of a mesh."""
    transport = layout.mesh.transport
    if transport.memory is None:
        transport.memory = FuseMemory()
    return transport.memory


def enabled() -> bool:
    """Whether margins may be made and read, and chains learned, in this mode of torch.

    Not in a checkpoint: its recompute has to take the decisions of its forward. Not where the order of additions must
    not depend on measured times. Not where torch does not count writes, which could make margins stale unnoticed.
    """
    return bool(
        _mode is not False
        and not saving_hooks()
        and not torch.is_inference_mode_enabled()
        and (_mode or _given or not torch.are_deterministic_algorithms_enabled())
    )


def number_of(weight: Tensor | None) -> int:
    """The number of a parameter, in the order of first use; 0 for any other tensor, which each run may create again."""
    if not isinstance(weight, torch.nn.Parameter):
        return 0
    number = _weights.get(weight)
    if number is None:
        number = _weights[weight] = next(_numbers)
    return number


def site_of(x: ShardedTensor, rule: Windowed, weight: Tensor | None, flops: float) -> Site | None:
    """The site of an operation on a tensor, None if it has none; records that the operation runs."""
    layout = x.placement
    if all(layout.axes[d] == "data" for d in layout.cut_dims) or not enabled():
        return None
    piece = x.carrier  # faster than through the sharded tensor itself
    kind = piece.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    grad = torch.is_grad_enabled()
    key = (x.sites, rule.name, rule.dims, number_of(weight), layout, piece.dtype, kind, autocast, grad)
    memory = memory_of(layout)
    site = memory.sites.get(key)
    if site is None and key not in memory.sites:
        dims = whole_dims(rule, layout)
        lead = [max(i.size for i in intervals) for intervals in own_spans(layout)[: layout.ndim - len(dims)]]
        work, width = flops * prod(lead[:-1]), prod(lead) * piece.element_size()
        site = new_site(x.sites, dims, layout, output_layout(layout, rule.dims), work, width, grad)
        memory.enter(key, site)
    if site is not None:
        site.run()
    return site


def whole_dims(rule: Windowed, layout: Layout) -> tuple[Reads, ...]:
    """What the rule reads along all dims after batch and channels; dims that it does not touch read themselves."""
    missing = range(2, layout.ndim - len(rule.dims))
    return (*(Window(layout.shape[d], layout.shape[d]) for d in missing), *rule.dims)


def through(
    x: ShardedTensor,
    rule: Windowed,
    usual: Callable[[], ShardedTensor] | None = None,
    weight: Tensor | None = None,
    flops: float = 0.0,
) -> ShardedTensor:
    """A rule's result: from the margin of x if that suffices, by a wide exchange if that pays, or as usual.

    `flops` are the operations for one output position of one image.
    """
    if x.mesh.tiled:
        return windowed_tile(x, rule)
    site = site_of(x, rule, weight, flops)
    result = None if site is None else fused(x, rule, site)
    if result is None:
        result = windowed(x, rule) if usual is None else usual()
    if site is not None and result is not x:
        result.sites = (site,)
    return result


def fused(x: ShardedTensor, rule: Windowed, site: Site) -> ShardedTensor | None:
    """The result from a margin or a wide exchange; None if the operation should run as usual."""
    margin = x.margin
    if margin is not None and margin.live:
        found = site.within_reach(margin.spans)
        if found is not None:
            return run_wide(margin.read(found[1]), rule, site, found)
    if not site.layer.exchanges:
        return None
    found = site.worth(constants_for(x, site))
    if found is None:
        return None
    piece = fetch(x.local, route(x.placement, wants_in(found[1], x.placement)), x.mesh.transport, rule.name)
    return run_wide(piece, rule, site, found)


def constants_for(x: ShardedTensor, site: Site) -> Constants | None:
    """The measured constants of the mesh, None in a block that always fuses.

    They are measured the first time something can be fused, which all ranks reach together.
    """
    if _mode is True or _given is not None:
        return _given
    known = memory_of(x.placement).constants
    key = x.carrier.device.type, x.carrier.dtype
    if key not in known:
        if len(site.depths()) == 1:
            return Constants()
        with fusing(False):
            known[key] = measured(x)
    return known[key]


def first_order_only(grad: Tensor) -> None:
    """Refuse second derivatives, as exchanges by strips do."""
    if torch.is_grad_enabled():
        raise UnsupportedOp("second derivatives (create_graph=True) through sharded convolutions, norms and pools")


def run_wide(piece: Tensor, rule: Windowed, site: Site, plan: tuple[Spans, Spans]) -> ShardedTensor:
    """The result of a rule run valid on a piece that holds what the plan reads."""
    outs, ins = plan
    first = site.have.ndim - len(rule.dims)
    out, have = box_in(outs, site.target)[first:], box_in(ins, site.have)[first:]
    places = tuple(Place(r, o, (h,)) for r, o, h in zip(rule.dims, out, have, strict=True))
    local = rule.run(piece, places)
    if site.layer.exchanges and local.requires_grad:
        local.register_hook(first_order_only)
    return with_spans(local, outs, site.target.uncut_resized(local.shape))


def with_spans(extended: Tensor, spans: Spans, layout: Layout) -> ShardedTensor:
    """The sharded tensor of a piece with a margin, or without one if the spans are the owned boxes."""
    own = own_spans(layout)
    spans = tuple(s if layout.is_cut(d) else o for d, (s, o) in enumerate(zip(spans, own, strict=True)))
    if spans == own:
        return ShardedTensor(extended, layout)
    return ShardedTensor.with_margin(Margin(extended, spans, layout))


def margin_of(x: ShardedTensor) -> Margin | None:
    """The margin that operations may read, if there is one."""
    return x.margin if x.margin is not None and x.margin.live and enabled() else None


def mapped(x: ShardedTensor, function: Callable[[Tensor], Tensor]) -> ShardedTensor:
    """A pointwise function, on the piece with its margin."""
    margin = margin_of(x)
    result = (
        ShardedTensor(function(x.local), x.placement)
        if margin is None
        else with_spans(function(margin.read(margin.spans)), margin.spans, x.placement)
    )
    result.sites = x.sites if enabled() else ()
    return result


@dataclass(frozen=True)
class Operands:
    """What the tensors of a pointwise call have in common: the margin of the result, and the sites it comes from."""

    spans: Spans | None
    sites: tuple[Site, ...]

    @classmethod
    def of(cls, operands: Sequence[Tensor], layout: Layout) -> Operands:
        """The common part of tensors in one layout; a margin or a site only if each of them allows it."""
        if not layout.cut_dims or not enabled():
            return NOTHING
        spans: Spans | None = None
        sites: dict[Site, None] = {}
        bare = False
        for t in operands:
            if isinstance(t, ShardedTensor) and same_place(t.placement, layout):
                if not t.sites:
                    return NOTHING
                sites.update(dict.fromkeys(t.sites))
                margin = margin_of(t)
                if margin is None:
                    bare = True
                else:
                    spans = margin.spans if spans is None else common(spans, margin.spans)
            elif not flat(t, layout):
                return NOTHING
        return cls(None if bare else spans, tuple(sites))


NOTHING = Operands(None, ())


def same_place(a: Layout, b: Layout) -> bool:
    """Whether two layouts have their pieces in the same places."""
    return a is b or (a.shape == b.shape and a.cuts == b.cuts and a.axes == b.axes)


def flat(tensor: Tensor, layout: Layout) -> bool:
    """Whether an operand has one value along every cut dim, so that it fits any margin."""
    offset = layout.ndim - tensor.ndim
    return all(d < offset or tensor.shape[d - offset] == 1 or layout.axes[d] == "data" for d in layout.cut_dims)


def wide_piece(tensor: Tensor, layout: Layout, spans: Spans) -> Tensor | None:
    """An operand's extended piece at the spans; None for one that is not in the layout's place."""
    if isinstance(tensor, ShardedTensor) and same_place(tensor.placement, layout) and tensor.margin is not None:
        return tensor.margin.read(spans)
    return None

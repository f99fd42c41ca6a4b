"""Whether a small case runs the program of the real one: the same calls, passes and stages, up to extents.

real    conv2d at 'down.0'  (1, 3, 512, 512)  padding 1       pass 0: 0–7, keeps 4, measures 5
small   conv2d at 'down.0'  (1, 3, 47, 47)    padding 1       pass 0: 0–7, keeps 4, measures 5
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mural.engine.stream_program import StreamProgram
from mural.graph.nodes import Graph, Node, Place, Ref

PLACES = frozenset([
    "pad", "getitem", "setitem", "narrow", "select", "slice", "split", "chunk", "tensor_split", "roll", "unfold",
    "fold", "arange", "linspace", "zeros", "ones", "empty", "full", "tensor", "rand", "randn", "randint", "randperm",
    "one_hot", "new_zeros", "new_ones", "new_empty", "new_full", "view", "reshape", "expand", "unflatten", "repeat",
    "tile", "affine_grid", "meshgrid", "broadcast_to", "index_select", "as_strided", "resize", "interpolate",
    "upsample",
    *(f"adaptive_{how}_pool{dims}d" for how in ("avg", "max") for dims in (1, 2, 3)),
])  # fmt: skip
"""The calls whose numbers are places and extents."""
ALIKE = (
    "site", "op", "module", "inputs", "picks", "after", "writes", "returns", "detached", "casts", "gradients", "same",
)  # fmt: skip
"""What a call of the small case has in common with that of the real one."""
Pairs = dict[float, set[float]]


def unlike_calls(real: Graph, small: Graph) -> str:
    """How the calls of two captures differ in more than extents; empty where they do not."""
    pairs = paired((v.shape for v in real.inputs), (v.shape for v in small.inputs), {})
    for a, b in zip(real, small, strict=False):
        paired((*a.input_shapes, *a.output_shapes), (*b.input_shapes, *b.output_shapes), pairs)
        found = unlike_nodes(a, b, pairs)
        if found:
            return found
    if len(real) != len(small):
        longer = real if len(real) > len(small) else small
        node = longer.nodes[min(len(real), len(small))]
        return f"{node.op} at {node.site!r} is called {'only there' if longer is real else 'only in the small case'}"
    if [n.op for _, n in real.effects] != [n.op for _, n in small.effects] or real.carried != small.carried:
        return "it leaves other things for the next step"
    return ""


def unlike_nodes(a: Node, b: Node, pairs: Pairs) -> str:
    """How two calls differ in more than extents."""
    where = f"{a.op} at {a.site!r}"
    for name in ALIKE:
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            how = (
                f"is {b.op} at {b.site!r} in the small case" if name in ("site", "op", "module") else f"has {one} there"
            )
            return f"{where} {how}" + (
                "" if name in ("site", "op", "module") else f" as {name}, and {other} in the small case"
            )
    if [len(s) for s in a.output_shapes] != [len(s) for s in b.output_shapes] or [*map(kind, a.dtypes)] != [
        *map(kind, b.dtypes)
    ]:
        return f"{where} gives other kinds of tensors"
    (ones, form), (others, other_form) = flattened(a), flattened(b)
    if len(ones) != len(others) or str(form) != str(other_form):
        return f"{where} takes other arguments"
    for one, other in zip(ones, others, strict=True):
        if not alike(a.op.rstrip("_"), one, other, pairs):
            return f"{where} takes {one!r:.60} there, and {other!r:.60} in the small case"
    return ""


def flattened(node: Node) -> tuple[list[Any], Any]:
    """A call's arguments, one by one, with the form that they have."""
    leaves, form = pytree.tree_flatten((node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Ref))
    found = list[Any]()
    for leaf in leaves:
        found += [leaf.start, leaf.stop, leaf.step] if isinstance(leaf, slice) else [leaf]
    return found, form


def alike(op: str, one: Any, other: Any, pairs: Pairs) -> bool:
    """Whether two arguments are the same, or extents of the same tensors."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other)
    if isinstance(one, torch.dtype) and isinstance(other, torch.dtype):
        return kind(one) == kind(other)
    if type(one) is type(other) and isinstance(one, (Ref, str, bool, type(None), torch.device)):
        return one == other
    if isinstance(one, (int, float)) and isinstance(other, (int, float)) and bool not in (type(one), type(other)):
        return one == other or op in PLACES or other in pairs.get(one, ()) or parts(one, other, pairs)
    if type(one) is not type(other) and None in (one, other):
        return op in PLACES
    return type(one) is type(other) and (callable(one) or repr(one) == repr(other) or same(one, other))


def parts(one: float, other: float, pairs: Pairs) -> bool:
    """Whether two numbers are one over an extent."""
    return 0 < one < 1 and 0 < other < 1 and round(1 / other) in pairs.get(round(1 / one), ())


def kind(dtype: torch.dtype) -> torch.dtype:
    """A type, or double precision for single, in which a small case may run."""
    return torch.float64 if dtype == torch.float32 else dtype


def same(one: Any, other: Any) -> bool:
    """Whether two values say that they are equal."""
    try:
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):
        return False


def paired(real: Iterable[Sequence[int]], small: Iterable[Sequence[int]], pairs: Pairs) -> Pairs:
    """The extents of real tensors, each with those that the same dims have in the small case."""
    for one, other in zip(real, small, strict=False):
        size, little = 1, 1
        for a, b in reversed(list(zip(one, other, strict=False))):
            size, little = size * a, little * b
            pairs.setdefault(a, set()).add(b)
            pairs.setdefault(size, set()).add(little)
            pairs.setdefault(size**2, set()).add(little**2)  # what a distance of two covariances is divided by
    return pairs


# -- passes -----------------------------------------------------------------------------------------------------------


def passes_text(program: StreamProgram, results: Collection[Place]) -> Iterator[str]:
    """The passes of a streamed step in lines, without extents, and without results that are kept for whoever looks."""
    for one in program.passes.passes:
        calls = [call.node.id for call in one.calls]
        kind = "whole" if one.whole else f"like {one.like}" if one.like is not None else "tiles"
        keeps = [place for place in one.keeps if place not in results]
        yield f"pass {one.number} ({kind}): {calls} reads {one.reads} keeps {keeps} {one.measures} uses {one.uses}"
    yield f"tail {[call.node.id for call in program.passes.tail]}"
    yield f"on the host {sorted(program.kept.host, key=str)}"


def unlike_passes(real: StreamProgram, small: StreamProgram) -> str:
    """How the passes of two programs differ; empty where they do not."""
    told = {(value.source, value.pick) for value in small.graph.outputs} - real.kept.values
    lines = [*passes_text(real, told)], [*passes_text(small, told)]
    for one, other in zip(*lines, strict=False):
        if one != other:
            return f"{one.partition(':')[0]} has other calls, or keeps other values"
    return (
        ""
        if len(lines[0]) == len(lines[1])
        else f"{len(lines[0]) - 2} passes, and {len(lines[1]) - 2} in the small case"
    )


def results_of(real: Graph, small: Graph) -> Mapping[tuple[int, ...], tuple[int, ...]]:
    """The extents that results of the model have, with those of the small case."""
    return {a.shape[2:]: b.shape[2:] for a, b in zip(real.outputs, small.outputs, strict=False) if len(a.shape) > 2}

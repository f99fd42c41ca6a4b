"""Shapes: slices, permutations, reshapes, joins. Data stay where they are wherever the cut dims stay apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.errors import LayoutError, UnsupportedOp
from mural.geometry import Cuts, Interval
from mural.shard.layout import Layout, Want
from mural.shard.ops.pointwise import check_writable, common_layout, piece_of, written
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor, gather, moves_data, pull

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def dim_of(dim: int, ndim: int, name: str) -> int:
    """A dim counted from the start."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"{name}: dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % ndim


def sliced(x: ShardedTensor, dim: int, start: int, stop: int, step: int = 1) -> ShardedTensor:
    """Positions start, start + step, … of one dim, each left where it is."""
    layout = x.placement
    count = max(0, -(-(stop - start) // step))
    cuts = layout.cuts[dim]
    if cuts is None:
        local = x.local[(slice(None),) * dim + (slice(start, stop, step),)]
        return ShardedTensor(local, layout.with_cut(dim, None, count), x.aliased)
    place = layout.with_cut(dim, cuts.sliced(start, stop, step), count)
    mine = place.box[dim]
    first = start + mine.start * step - layout.box[dim].start
    piece = slice(first, first + (mine.size - 1) * step + 1, step) if mine.size else slice(0, 0)
    return ShardedTensor(x.local[(slice(None),) * dim + (piece,)], place, x.aliased)


def selected(x: ShardedTensor, dim: int, index: int, name: str) -> ShardedTensor | Tensor:
    """One position of a dim, on every rank, without that dim."""
    extent = x.placement.shape[dim]
    if not -extent <= index < extent:
        raise IndexError(f"{name}: index {index} is out of range for dim {dim} of extent {extent}")
    index %= extent
    one = sliced(x, dim, index, index + 1)
    moved = gather(one, (dim,), name)
    layout = moved.placement
    dims = [d for d in range(layout.ndim) if d != dim]
    lost = name if moves_data(one, layout) else x.aliased
    local = moved.local.squeeze(dim)
    return ShardedTensor(local, layout.pick(dims, [layout.shape[d] for d in dims]), lost) if dims else local


@register("view", "__getitem__")
def getitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Basic indexing along any dim; a list or plain tensor of positions along a dim that is not cut."""
    x, index = args
    if not isinstance(x, ShardedTensor):
        raise UnsupportedOp("indexing a plain tensor with a sharded one: call .full() on the index")
    items = list(index) if isinstance(index, tuple) else [index]
    given = sum(i is not None and i is not Ellipsis for i in items)
    if given > x.placement.ndim:
        raise IndexError(f"too many indices ({given}) for a sharded tensor of {x.placement.ndim} dims")
    items = [int(i) if isinstance(i, Tensor) and i.ndim == 0 and i.dtype != torch.bool else i for i in items]
    if sum(isinstance(i, (list, Tensor)) for i in items) > 1:
        raise UnsupportedOp("indexing a sharded tensor with several lists of positions: index one dim at a time")
    if Ellipsis not in [i for i in items if not isinstance(i, Tensor)]:
        items.append(Ellipsis)
    at = next(k for k, i in enumerate(items) if i is Ellipsis)
    items[at : at + 1] = [slice(None)] * (x.placement.ndim - given)
    out: Any = x
    dim = 0
    for item in items:
        if item is None:
            out = unsqueezed(out, dim)
            dim += 1
        elif isinstance(item, slice):
            span = range(*item.indices(out.placement.shape[dim]))
            if item != slice(None):
                out = sliced(out, dim, span.start, span.stop, span.step)
            dim += 1
        elif isinstance(item, int) and not isinstance(item, bool):
            out = selected(out, dim, item, "indexing")
        else:
            out = taken(out, dim, item)
            dim += 1
    return ShardedTensor(out.local, out.placement, out.aliased) if out is x else out


def taken(x: ShardedTensor, dim: int, positions: Any) -> ShardedTensor:
    """Listed positions along one dim that is not cut."""
    if isinstance(positions, ShardedTensor):
        raise UnsupportedOp("indexing with a sharded tensor (a mask): use torch.where or masked_fill")
    index = torch.as_tensor(positions, device=x.device)
    if index.ndim != 1 or x.placement.cuts[dim] is not None:
        raise UnsupportedOp(
            f"indexing dim {dim} of a sharded tensor with {tuple(index.shape)} positions: only one list of positions "
            f"along a dim that is not cut is supported (cut dims: {x.placement.cut_dims})"
        )
    local = x.local[(slice(None),) * dim + (index,)]
    return ShardedTensor(local, x.placement.uncut_resized(local.shape))


@register("view", "__setitem__")
def setitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write to a part: through basic indexing, or where a mask of the same shape is true."""
    x, index, value = args
    if not isinstance(x, ShardedTensor):
        raise LayoutError("writing a sharded value into a plain tensor: call .full() on it, or shard the target")
    check_writable(x, "assignment")
    if isinstance(index, Tensor) and index.dtype == torch.bool and not (isinstance(value, Tensor) and value.ndim):
        for _ in range(x.ndim - index.ndim):
            index = index.unsqueeze(-1)
        written(x, x.local.masked_fill_(piece_of(index, x.placement, "assignment"), value))
        return
    part = getitem(func, (x, index), {})
    if any(isinstance(i, (list, Tensor)) and not (isinstance(i, Tensor) and i.ndim == 0) for i in _items(index)):
        write_positions(x, _items(index), part, value)
        return
    if isinstance(part, ShardedTensor):
        check_writable(part, "assignment to one position of a cut dim")
        source = torch.as_tensor(value, dtype=x.dtype, device=x.device) if not isinstance(value, Tensor) else value
        part.local.copy_(piece_of(source, part.placement, "assignment"))
        written(x, x.local)
        return
    raise LayoutError("assignment to a single element of a sharded tensor: assign to a slice")


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def write_positions(x: ShardedTensor, items: tuple[Any, ...], part: ShardedTensor, value: Any) -> None:
    """Write to listed positions of one dim, all others whole."""
    if any(isinstance(i, slice) and i != slice(None) for i in items) or Ellipsis in [i for i in items if i is Ellipsis]:
        raise UnsupportedOp("assignment to listed positions together with slices: assign to one after the other")
    source = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    x.local[items] = piece_of(source, part.placement, "assignment").to(x.dtype)
    written(x, x.local)


@register("view", "narrow")
def narrow(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """`length` positions from `start`."""
    x, dim, start, length = bound(args, kwargs, ("input", "dim", "start", "length"))
    dim = dim_of(dim, x.ndim, "narrow")
    first = int(start) + (x.shape[dim] if int(start) < 0 else 0)
    if not 0 <= first <= first + int(length) <= x.shape[dim]:
        raise RuntimeError(f"narrow: start {start} and length {length} exceed dim {dim} of extent {x.shape[dim]}")
    return sliced(x, dim, first, first + int(length))


@register("view", "select")
def select(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One position, without its dim."""
    x, dim, index = bound(args, kwargs, ("input", "dim", "index"))
    return selected(x, dim_of(dim, x.ndim, "select"), int(index), "select")


@register("view", "index_select")
def index_select(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Listed positions of a dim."""
    x, dim, index = bound(args, kwargs, ("input", "dim", "index"))
    return taken(x, dim_of(dim, x.ndim, "index_select"), index)


def bound(args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str], *defaults: Any) -> list[Any]:
    """Arguments in the order of their names; the last names have the defaults."""
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    unknown = [k for k, v in kwargs.items() if k not in names and v is not None]
    if unknown or len(args) > len(names):
        raise TypeError(
            f"unexpected arguments {unknown or args[len(names) :]}: a rule for sharded tensors takes {names}"
        )
    values |= dict(zip(names, args, strict=False)) | kwargs
    if missing := [name for name in names if name not in values]:
        raise TypeError(f"missing arguments {missing}")
    return [values[name] for name in names]


@register("view", "split", "chunk", "tensor_split", "unbind", "split_with_sizes")
def split(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Consecutive slices; torch itself says where, on a tensor of the same extent without memory."""
    x = args[0]
    name = name_of(func)
    dim = kwargs.get(
        "dim", (args[1] if len(args) > 1 else 0) if name == "unbind" else (args[2] if len(args) > 2 else 0)
    )
    dim = dim_of(dim, x.ndim, name)
    if name == "unbind":
        return tuple(selected(x, dim, i, name) for i in range(x.shape[dim]))
    given = list(args[1:2]) or [v for k, v in kwargs.items() if k != "dim"]
    parts = func(torch.empty(x.shape[dim], device="meta"), *given)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.shape[0])
    return tuple(sliced(x, dim, a, b) for a, b in pairwise(starts))


@register("view", "flip", "fliplr", "flipud")
def flip(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The order reversed; the pieces stay on their ranks, in reversed order."""
    x, *rest = args
    name = name_of(func)
    dims: Any = {"fliplr": (1,), "flipud": (0,)}.get(name)
    if dims is None:
        dims = kwargs.get("dims", rest[0] if len(rest) == 1 else tuple(rest))
    dims = [dim_of(d, x.ndim, name) for d in ((dims,) if isinstance(dims, int) else dims)]
    layout: Layout = x.placement
    images = dict(layout.images)
    cuts = list(layout.cuts)
    for dim in dims:
        if (cut := cuts[dim]) is not None:
            cuts[dim] = cut.flipped()
            axis = layout.axes[dim] or ""
            images[axis] = images[axis].flipped()
    place = replace(layout, cuts=tuple(cuts), images=tuple(sorted(images.items())))
    return ShardedTensor(torch.flip(x.local, dims), place)


@register("view", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t")
def permute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The dims in another order; torch itself says in which, on a tensor whose extents are the dims' numbers."""
    x = args[0]
    probe = torch.empty_strided((2,) * x.ndim, tuple(range(1, x.ndim + 1)), device="meta")
    order = [s - 1 for s in func(probe, *args[1:], **kwargs).stride()]
    return permuted(x, order)


def permuted(x: ShardedTensor, order: Sequence[int]) -> ShardedTensor:
    """The dims in that order."""
    layout = x.placement.pick(order, [x.placement.shape[d] for d in order])
    return ShardedTensor(x.local.permute(*order), layout, x.aliased)


@register("view", "T.__get__", "mT.__get__")
def transposed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """`.T` and `.mT`."""
    order = list(range(args[0].ndim))
    if getattr(func, "__self__", None) is torch.Tensor.mT:
        return permuted(args[0], [*order[:-2], order[-1], order[-2]])
    return permuted(args[0], order[::-1])


def unsqueezed(x: ShardedTensor, dim: int) -> ShardedTensor:
    """A new dim of extent 1."""
    layout = x.placement
    dims: list[int | None] = list(range(layout.ndim))
    dims.insert(dim, None)
    shape = (*layout.shape[:dim], 1, *layout.shape[dim:])
    return ShardedTensor(x.local.unsqueeze(dim), layout.pick(dims, shape), x.aliased)


@register("view", "unsqueeze")
def unsqueeze(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A new dim of extent 1."""
    x, dim = bound(args, kwargs, ("input", "dim"))
    return unsqueezed(x, dim_of(dim, x.ndim + 1, "unsqueeze"))


@register("view", "squeeze")
def squeeze(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without dims of extent 1."""
    x = args[0]
    dims = kwargs.get("dim", args[1] if len(args) > 1 else tuple(range(x.ndim)))
    chosen = [dim_of(d, x.ndim, "squeeze") for d in ((dims,) if isinstance(dims, int) else dims)]
    gone = {d for d in chosen if x.shape[d] == 1}
    whole = gather(x, sorted(gone), "squeeze")
    keep = [d for d in range(x.ndim) if d not in gone]
    layout = whole.placement.pick(keep, [x.shape[d] for d in keep])
    local = whole.local.squeeze(tuple(sorted(gone)))
    lost = "squeeze" if moves_data(x, whole.placement) else x.aliased
    return ShardedTensor(local, layout, lost) if keep else local


def groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of old dims and new dims with equal products, as short as possible.

    >>> groups((2, 3, 4, 5), (2, 12, 5))
    [([0], [0]), ([1, 2], [1]), ([3], [2])]
    """
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(left), j + len(right)
        while (a := prod(old[d] for d in left)) != (b := prod(new[d] for d in right)) or not left or not right:
            if i >= len(old) and j >= len(new):
                break
            if (a <= b and i < len(old)) or j >= len(new):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        found.append((left, right))
    return found


def regrouped(layout: Layout, shape: Sequence[int]) -> tuple[Layout | None, list[int]]:
    """The layout after a reshape; or None and the dims to gather first.

    A cut dim survives where it comes first (apart from dims of extent 1) on both sides of its group and
    every bound falls between two positions of the new dim.
    """
    axes: list[str | None] = [None] * len(shape)
    cuts: list[Cuts | None] = [None] * len(shape)
    lost: list[int] = []
    for left, right in groups(layout.shape, shape):
        named = [d for d in left if layout.axes[d] is not None]
        wide = [d for d in left if layout.shape[d] != 1]
        targets = [d for d in right if shape[d] != 1] or right[:1]
        for d in named:
            cut = layout.cuts[d]
            first = d == (wide or left)[0]
            if not first or not targets:
                lost += [d] if cut is not None else []
                continue
            inner_old = prod(layout.shape[e] for e in left if e > d)
            inner_new = prod(shape[e] for e in right if e > targets[0])
            if cut is None:
                axes[targets[0]] = layout.axes[d] if len(wide) <= 1 and len(targets) == 1 else None
            elif inner_new and all(b * inner_old % inner_new == 0 for b in cut.bounds):
                axes[targets[0]] = layout.axes[d]
                cuts[targets[0]] = Cuts(tuple(b * inner_old // inner_new for b in cut.bounds), cut.owners)
            else:
                lost.append(d)
    if lost:
        return None, lost
    return replace(layout, shape=tuple(shape), axes=tuple(axes), cuts=tuple(cuts)), []


def reshaped(x: ShardedTensor, shape: Sequence[int], name: str) -> ShardedTensor | Tensor:
    """The tensor under another shape; cut dims that would merge or split are gathered first."""
    layout, lost = regrouped(x.placement, shape)
    aliased = x.aliased
    if layout is None:
        whole = gather(x, lost, name)
        aliased = name if moves_data(x, whole.placement) else aliased
        layout, still = regrouped(whole.placement, shape)
        if layout is None:
            whole, (layout, _) = (
                gather(whole, still, name),
                regrouped(gather(whole, still, name).placement, shape),
            )
        x = whole
    if layout is None:
        raise UnsupportedOp(f"{name} from {tuple(x.shape)} to {tuple(shape)} with cuts {x.placement.cuts}")
    local = x.local.reshape(layout.local_shape)
    return ShardedTensor(local, layout, aliased) if layout.ndim else local


@register("view", "reshape", "view", "flatten", "unflatten", "reshape_as", "view_as", "ravel")
def reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another shape; torch itself says which, on a tensor without memory."""
    x = args[0]
    name = name_of(func)
    if any(isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values())):
        raise UnsupportedOp("view(dtype) of a sharded tensor")
    probe = torch.empty(tuple(x.shape), device="meta")
    others = [torch.empty(tuple(a.shape), device="meta") if isinstance(a, Tensor) else a for a in args[1:]]
    return reshaped(x, tuple(func(probe, *others, **kwargs).shape), name)


@register("view", "expand", "expand_as", "broadcast_to")
def expand(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Dims of extent 1 repeated without memory; like the other tensor where one is given."""
    x = args[0]
    if len(args) > 1 and isinstance(args[1], Tensor):
        layout = common_layout(func, (x, args[1]))
    else:
        probe = func(torch.empty(tuple(x.shape), device="meta"), *args[1:], **kwargs)
        layout = x.placement.pick([None] * (probe.ndim - x.ndim) + list(range(x.ndim)), probe.shape)
        grown = [d for d in range(probe.ndim) if layout.shape[d] != ((1,) * probe.ndim + tuple(x.shape))[x.ndim + d]]
        layout = layout.gathered(grown)
    local = piece_of(x, layout, name_of(func)).expand(layout.local_shape)
    return ShardedTensor(local, layout, x.aliased if isinstance(x, ShardedTensor) else "")


@register("view", "repeat", "tile")
def repeat(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor several times along its dims, by joining it with itself where a dim is cut."""
    x, *rest = args
    times = kwargs.get(
        "repeats", kwargs.get("dims", rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest)
    )
    counts = [1] * (x.ndim - len(times)) + [int(n) for n in times]
    for _ in range(len(counts) - x.ndim):
        x = unsqueezed(x, 0)
    for dim, count in enumerate(counts):
        x = joined([x] * count, dim, "repeat") if count != 1 else x
    return x


@register("view", "cat", "concat", "concatenate")
def cat(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Tensors one after the other along a dim."""
    tensors, dim = bound(args, kwargs, ("tensors", "dim"), 0)
    return joined(list(tensors), dim, "cat")


@register("view", "stack")
def stack_new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Tensors side by side along a new dim."""
    tensors, dim = bound(args, kwargs, ("tensors", "dim"), 0)
    dim = dim_of(dim, tensors[0].ndim + 1, "stack")
    return joined(
        [unsqueezed(t, dim) if isinstance(t, ShardedTensor) else t.unsqueeze(dim) for t in tensors],
        dim,
        "stack",
    )


def joined(tensors: list[Tensor], dim: int, name: str) -> ShardedTensor:
    """Tensors one after the other along a dim, which is cut in the image's proportions if it was cut."""
    tensors = [t for t in tensors if t.ndim != 1 or t.shape[0]] or tensors[:1]  # torch skips empty 1-D tensors
    dim = dim_of(dim, tensors[0].ndim, name)
    rest = [tuple(n for d, n in enumerate(t.shape) if d != dim) for t in tensors]
    if len(set(rest)) != 1:
        raise LayoutError(f"{name} along dim {dim}: the shapes {[tuple(t.shape) for t in tensors]} differ elsewhere")
    total = sum(t.shape[dim] for t in tensors)
    slim = [
        t.narrow(dim, 0, 1) if not isinstance(t, ShardedTensor) else sliced(t, dim, 0, 1)
        for t in tensors
        if t.shape[dim]
    ]
    base = (
        common_layout(torch.cat, slim)
        if len(slim) > 1
        else next(t for t in tensors if isinstance(t, ShardedTensor)).placement
    )
    cut = [t for t in tensors if isinstance(t, ShardedTensor) and t.placement.cuts[dim] is not None]
    if not cut:
        layout = base.with_cut(dim, None, total)
        pieces = [piece_of(t, layout.with_cut(dim, None, t.shape[dim]), name) for t in tensors]
        return ShardedTensor(torch.cat(pieces, dim), layout)
    first = cut[0].placement
    layout = base.with_cut(dim, first.cut_for(dim, total), total)
    layout = replace(layout, axes=(*layout.axes[:dim], first.axes[dim], *layout.axes[dim + 1 :]))
    pieces, offset = [], 0
    for tensor in tensors:
        wants = list(layout.wants())
        axis, intervals = wants[dim]
        extent = tensor.shape[dim]
        inside = tuple(((span & Interval(offset, offset + extent)).shift(-offset),) for (span,) in intervals)
        wants[dim] = (axis, tuple((Interval(0, 0),) if span.size == 0 else (span,) for (span,) in inside))
        pieces.append(part_of(tensor, tuple(wants), layout, name))
        offset += extent
    return ShardedTensor(torch.cat(pieces, dim), layout)


def part_of(tensor: Tensor, wants: tuple[Want, ...], layout: Layout, name: str) -> Tensor:
    """What this rank wants of a sharded tensor, or of one that every rank holds whole."""
    if isinstance(tensor, ShardedTensor):
        return pull(tensor, wants, name)
    at = layout.mesh.coordinates
    mine = [intervals[at[axis] if axis else 0][0] for axis, intervals in wants]
    return tensor[tuple(slice(i.start, i.stop) for i in mine)]


@register("view", "linear", "matmul", "__matmul__")
def linear(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product with a plain matrix along the last dim, which is gathered first if it is cut."""
    names = ("input", "weight", "bias") if name_of(func) == "linear" else ("input", "other")
    x, weight, *rest = bound(args, kwargs, names, *(None,) * (len(names) - 2))
    if not isinstance(x, ShardedTensor) or isinstance(weight, ShardedTensor) or weight.ndim > 2:
        raise UnsupportedOp(f"{name_of(func)} needs a sharded tensor and a plain matrix; call .full() on the other")
    x = gather(x, (x.ndim - 1,), name_of(func))
    local = func(x.local, weight, *rest)
    layout = x.placement
    if local.ndim < layout.ndim:
        keep = list(range(layout.ndim - 1))
        return ShardedTensor(local, layout.pick(keep, [layout.shape[d] for d in keep])) if keep else local
    layout = replace(layout, axes=(*layout.axes[:-1], None)).uncut_resized(local.shape)
    return ShardedTensor(local, layout)

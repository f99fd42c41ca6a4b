"""Pointwise operations: each position by itself, between sharded, replicated and broadcast operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from mural.errors import LayoutError, UnsupportedOp
from mural.geometry import Interval, broadcast
from mural.shard.gradient_guard import mirror_gradient
from mural.shard.halo.fuse import NOTHING, Operands, enabled, same_place, wide_piece, with_spans
from mural.shard.halo.margin import Margin, Spans
from mural.shard.layout import Layout, Want
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.pointwise.overlap import check_overlap
from mural.shard.relayout import pull
from mural.shard.table import functions, name_of, register
from mural.shard.tensor import ShardedTensor, local_of, run_replicated, sharded_in
from mural.shard.tiles import common_tile

UNARY = """
abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil
celu clamp clamp_max clamp_min clip clip_ conj conj_physical cos cosh deg2rad digamma elu erf erfc erfinv exp exp2
expit expm1 fix floor frac frexp gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf
isposinf isreal leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit logsigmoid mish mul nan_to_num
neg negative positive polygamma rad2deg real reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin
sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold trunc fill fill_ zero_ imag
bessel_j0 bessel_j1 entr erfcx gammaln i0e i1 i1e log_ndtr multigammaln ndtr ndtri psi resolve_conj resolve_neg
__neg__ __invert__ __abs__ __pos__ bool byte char double float half int long short bfloat16 cfloat type
"""
BINARY = """
add addcdiv addcmul arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign
div divide eq float_power floor_divide fmax fmin fmod ge greater greater_equal gt heaviside hypot isclose ldexp le
lerp less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt masked_fill maximum minimum multiply
ne nextafter not_equal pow remainder rsub sub subtract true_divide where xlogy copy_ igamma igammac xlog1py zeta complex
polar
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __div__ __rdiv__ __idiv__ __truediv__
__rtruediv__ __itruediv__ __floordiv__ __rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__
__and__ __rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__ __lshift__ __rlshift__ __ilshift__
__rshift__ __rrshift__ __irshift__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
"""
BASES = (UNARY + BINARY).split()
NAMES = [name for base in BASES for name in (base, f"{base}_") if name == base or not base.endswith("_")]
INPLACE = {
    function
    for name in NAMES
    if (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")
    for function in functions(name)
}
"""The functions that write to their first argument."""
VIEWS = {"real", "imag", "conj"}
"""The functions whose result may be a view."""


def operand_want(layout: Layout, shape: Sequence[int]) -> tuple[Want, ...]:
    """What an operand of that shape needs so that it broadcasts against pieces of the layout."""
    first = layout.ndim - len(shape)
    ones: Want = (None, ((Interval(0, 1),),))
    return tuple(
        ones if extent == 1 and whole != 1 else want
        for extent, whole, want in zip(shape, layout.shape[first:], layout.wants()[first:], strict=True)
    )


def common_layout(func: Any, operands: Sequence[Tensor]) -> Layout:
    """The layout of a pointwise result: per dim, the cuts of the first operand that is cut there.

    If operands disagree, cuts in the image's own proportions win, since later layers return to those.
    """
    sharded = [t for t in operands if isinstance(t, ShardedTensor)]
    if len(sharded) == len(operands) and all(t.placement is sharded[0].placement for t in sharded):
        return sharded[0].placement
    shape = common_shape(func, operands)
    if sharded[0].mesh.tiled:
        return common_tile(sharded, shape)
    axes: list[str | None] = [None] * len(shape)
    cuts: list[Any] = [None] * len(shape)
    for tensor in sharded:
        lay = tensor.placement
        for dim, out in enumerate(range(len(shape) - lay.ndim, len(shape))):
            axis, cut = lay.axes[dim], lay.cuts[dim]
            if axis is None or lay.shape[dim] != shape[out] or (axis in axes and axes[out] != axis):
                continue
            standard = cut is not None and cut == lay.cut_for(dim, shape[out])
            if axes[out] is None or cuts[out] is None or (standard and axes[out] == axis):
                axes[out], cuts[out] = axis, cut if cut is not None else cuts[out]
    return Layout(sharded[0].mesh, tuple(shape), tuple(axes), tuple(cuts), sharded[0].placement.images)


def common_shape(func: Any, operands: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape to which the operands are broadcast."""
    try:
        return tuple(broadcast(*(tuple(t.shape) for t in operands)))
    except ValueError as error:
        raise LayoutError(f"{name_of(func)}: shapes {[tuple(t.shape) for t in operands]} do not broadcast") from error


def piece_of(operand: Tensor, layout: Layout, name: str) -> Tensor:
    """The part of an operand that belongs to this rank's piece of the layout."""
    if isinstance(operand, ShardedTensor):
        lay = operand.placement
        if lay.shape == layout.shape and lay.cuts == layout.cuts and lay.axes == layout.axes:
            return operand.local
        return pull(operand, operand_want(layout, lay.shape), name)
    if operand.ndim == 0:
        return operand
    offset = layout.ndim - operand.ndim
    slices = tuple(
        slice(None)
        if layout.cuts[d + offset] is None or (operand.shape[d] == 1 and layout.shape[d + offset] != 1)
        else slice(layout.box[d + offset].start, layout.box[d + offset].stop)
        for d in range(operand.ndim)
    )
    return operand[slices] if any(s != slice(None) for s in slices) else operand


def check_writable(tensor: ShardedTensor, name: str) -> None:
    """Raise if an in-place write would not reach the tensor that torch would alias; else drop its margin."""
    if tensor.aliased:
        raise LayoutError(
            f"{name} writes in place to the result of {tensor.aliased}: mural had to communicate to make it, or cannot "
            f"tell whether torch would have copied it. Write to a copy (.clone()), or to the original"
        )
    tensor.drop_margin()


def written(tensor: ShardedTensor, local: Tensor) -> ShardedTensor:
    """The tensor after an in-place operation on its piece."""
    if local.requires_grad:
        mirror_gradient(tensor)
    return tensor


@register("pointwise", *NAMES)
def pointwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bring the operands to one layout, then run the operation on the pieces."""
    name = name_of(func)
    if name == "type" and len(args) == 1 and not kwargs:
        return args[0].local.type()
    if name == "where" and len(args) + len(kwargs) == 1:
        return listed_where(func, args[0])
    inplace = func in INPLACE or bool(kwargs.get("inplace"))
    if name not in VIEWS and (alike := in_one_place(args, kwargs)):
        return of_pieces(func, name, args, kwargs, alike, inplace)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if inplace:
        target = args[0]
        if not isinstance(target, ShardedTensor):
            return write_to_plain(func, args, kwargs)
        layout = target.placement
        if common_shape(func, operands) != layout.shape:
            raise LayoutError(f"{name}: the operands {[tuple(t.shape) for t in operands]} do not fit in place")
    else:
        layout = common_layout(func, operands)
    shared = NOTHING if name in VIEWS else Operands.of(operands, layout)
    if inplace and shared.spans is not None:
        return write_wide(func, leaves, spec, shared)
    if inplace:
        check_writable(args[0], name)
        check_overlap(name, args[0], operands[1:])
    pieces = pieces_of(leaves, layout, shared.spans, name)
    local_args, local_kwargs = pytree.tree_unflatten(pieces, spec)
    result = func(*local_args, **local_kwargs)
    if inplace and result is not NotImplemented:
        if args[0].dtype != result.dtype:
            raise LayoutError(f"{name} in place changed the type from {args[0].dtype} to {result.dtype}")
        args[0].sites = shared.sites
        return written(args[0], result)
    return wrap(result, layout, args[0] if args else None, shared)


def in_one_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ShardedTensor]:
    """The tensors of a call if the first argument is one, and all are sharded, in one place and without margins."""
    first = args[0] if args else None
    if not isinstance(first, ShardedTensor):
        return []
    found: list[ShardedTensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, ShardedTensor):
            if value.placement is not first.placement or value.margin is not None:
                return []
            found.append(value)
        elif isinstance(value, (Tensor, list, tuple)):
            return []
    return found


def of_pieces(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], alike: list[ShardedTensor],
    inplace: bool,
) -> Any:  # fmt: skip
    """An operation on tensors in one place, on their pieces: the fast path."""
    x = alike[0]
    sites = x.sites
    if sites and len(alike) > 1:
        sites = tuple(dict.fromkeys(s for t in alike for s in t.sites)) if all(t.sites for t in alike) else ()
    if sites and not enabled():
        sites = ()
    if inplace:
        check_writable(x, name)
        check_overlap(name, x, alike[1:])
    if len(alike) == 1:
        result = func(x.local, *args[1:], **kwargs)
    else:
        result = func(*map(local_of, args), **{key: local_of(value) for key, value in kwargs.items()})
    if not inplace or result is NotImplemented:
        return wrap(result, x.placement, x, Operands(None, sites) if sites else NOTHING)
    if x.dtype != result.dtype:
        raise LayoutError(f"{name} in place changed the type from {x.dtype} to {result.dtype}")
    x.sites = sites
    return written(x, result)


def pieces_of(leaves: Sequence[Any], layout: Layout, spans: Spans | None, name: str) -> list[Any]:
    """The call's arguments with pieces instead of tensors: extended ones if the result is to have a margin."""
    found: list[Any] = []
    for leaf in leaves:
        wide = wide_piece(leaf, layout, spans) if spans is not None else None
        found.append(leaf if not isinstance(leaf, Tensor) else piece_of(leaf, layout, name) if wide is None else wide)
    return found


def wrap(result: Any, layout: Layout, first: Any, shared: Operands) -> Any:
    """Pieces as sharded tensors; the operand itself if torch returned it unchanged (`.float()` of a float)."""
    if result is NotImplemented:  # `x == None`: Python then asks the other operand
        return result
    if isinstance(result, (tuple, list)):
        items = [wrap(item, layout, first, shared) for item in result]
        return type(result)(items)
    if isinstance(first, ShardedTensor) and first.holds(result):
        return first
    if result.ndim == 0:
        return result
    made = ShardedTensor(result, layout) if shared.spans is None else with_spans(result, shared.spans, layout)
    made.sites = shared.sites
    return made


def write_wide(func: Callable[..., Any], leaves: Sequence[Any], spec: Any, shared: Operands) -> ShardedTensor:
    """An in-place operation on the extended piece, and on the owned piece if it is in use."""
    target: ShardedTensor = leaves[0]
    margin, spans, name = target.margin, shared.spans, name_of(func)
    if not isinstance(margin, Margin) or spans is None:
        raise LayoutError(f"{name}: no margin to write to")
    wide = pieces_of(leaves, target.placement, spans, name)

    def write(pieces: list[Any]) -> Tensor:
        local_args, local_kwargs = pytree.tree_unflatten(pieces, spec)
        result = func(*local_args, **local_kwargs)
        if result.dtype != target.dtype:
            raise LayoutError(f"{name} in place changed the type from {target.dtype} to {result.dtype}")
        return result

    if margin.piece is not None:
        own = [
            t.local if isinstance(t, ShardedTensor) and same_place(t.placement, target.placement) else w
            for t, w in zip(leaves, wide, strict=True)
        ]
        margin.version = write(own)._version
    margin.extended, margin.spans, margin.used = write(wide), spans, False
    target.sites = shared.sites
    return written(target, margin.extended)


def write_to_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An in-place write of sharded values to a plain tensor, which stays plain and so takes all values."""
    cut = [t for t in sharded_in(args, kwargs) if t.placement.cut_dims]
    if cut and any(t.requires_grad for t in cut):
        raise LayoutError(
            f"{name_of(func)} writes a sharded tensor in place to a plain one, which every rank holds whole: "
            f"swap the operands, or call .full() on the sharded one"
        )
    local_args, local_kwargs = pytree.tree_map(
        lambda t: t.full() if isinstance(t, ShardedTensor) else t, (args, kwargs)
    )
    return func(*local_args, **local_kwargs)


def listed_where(func: Callable[..., Any], condition: ShardedTensor) -> Any:
    """The positions where a condition is true that every rank holds whole."""
    if condition.placement.cut_dims:
        raise UnsupportedOp(
            f"where(condition) of a sharded tensor of shape {tuple(condition.shape)}, where dims "
            f"{condition.placement.cut_dims} are cut, lists positions: give both values"
        )
    return run_replicated(func, (condition,), {})


@register("pointwise", "tril", "triu", "tril_", "triu_")
def triangle(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The lower or upper triangle of the last two dims, zeros elsewhere."""
    x, diagonal = bound(args, kwargs, ("input", "diagonal"), 0)
    if x.ndim < 2:
        raise RuntimeError(f"{name_of(func)} takes at least 2 dims, not a tensor of shape {tuple(x.shape)}")
    rows, columns = x.box[-2:]
    if name_of(func).endswith("_"):
        check_writable(x, name_of(func))
    local = func(x.local, diagonal + rows.start - columns.start)
    return written(x, local) if local is x.local else ShardedTensor(local, x.placement)

"""Operations with dims on tensors with merged dims: each names the dims underneath instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.shard.folds.regroup import Folds, spans
from mural.shard.folds.reshape import on_settled
from mural.shard.folds.underneath import common_factors, folded, folds_of, opened, rule_of
from mural.shard.ops.call_arguments import bound, dim_of, dims_of
from mural.shard.ops.pointwise.along_dim import ALONG, DEFAULT_DIM
from mural.shard.ops.tensor_calls.attributes import GLOBAL, LOCAL, new
from mural.shard.ops.view.getitem import in_order, items_of
from mural.shard.shape_probes import order_after, result_for
from mural.shard.table import name_of, register_folded
from mural.shard.tensor import ShardedTensor, local_of, unfolded

KEEPING = """
detach data.__get__ clone to cpu cuda type_as pin_memory contiguous zeros_like ones_like empty_like full_like
"""
WHOLE = f"""
{GLOBAL} {LOCAL} reshape view flatten unflatten reshape_as view_as ravel
requires_grad_ requires_grad.__set__ retain_grad detach_ grad.__delete__
"""
GRAD_OPTIONS = ("retain_graph", "create_graph", "only_inputs", "allow_unused")
NORMS = ("batch_norm", "group_norm", "instance_norm", "prelu")
ALONG_DIM = ALONG | {
    "softmax": 1, "log_softmax": 1, "softmin": 1, "unbind": 1, "chunk": 2, "split": 2, "tensor_split": 2,
    "split_with_sizes": 2, "repeat_interleave": 2, "narrow": 1, "select": 1, "index_select": 1, "argmax": 1,
    "argmin": 1, "max": 1, "min": 1,
}  # fmt: skip
FIRST_DIM = dict.fromkeys(("unbind", "chunk", "split", "tensor_split", "split_with_sizes"), 0)
OVER_DIMS = dict.fromkeys(
    ("sum", "mean", "nansum", "nanmean", "count_nonzero", "var", "std", "var_mean", "std_mean", "all", "any", "amax",
     "amin", "logsumexp"), 1,
) | {"norm": 2, "vector_norm": 2}  # fmt: skip


def refolded(result: Any, folds: Folds) -> Any:
    """A result, or several, with its dims merged as `folds` says; one with other dims unchanged."""
    return pytree.tree_map(
        lambda y: folded(y, folds) if isinstance(y, ShardedTensor) and y.placement.ndim == sum(folds) else y, result
    )


@register_folded(*WHOLE.split())
def of_the_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the usual rule, which serves any tensor."""
    return rule_of(func, args, kwargs)


@register_folded(*KEEPING.split())
def keeping(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same positions in another type, device or order of memory."""
    order = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.memory_format)]
    if order and order[0] not in (torch.contiguous_format, torch.preserve_format):
        return on_settled(func, args, kwargs)
    x = args[0]
    inner = unfolded(x) if isinstance(x, ShardedTensor) else x
    result = rule_of(func, (inner, *pytree.tree_map(local_of, args[1:])), pytree.tree_map(local_of, kwargs))
    return x if result is inner else refolded(result, folds_of(x))


@register_folded("grad.__set__")
def set_gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replace or clear the gradient."""
    x, *value = args
    inner = unfolded(x)
    rule_of(func, (inner, *(None if v is None else v.reshape(x.placement.shape) for v in value)), kwargs)


@register_folded("autograd.grad")
def gradients(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients of merged inputs are merged as they are."""
    names = ("outputs", "inputs", "grad_outputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    several: dict[str, list[Any]] = {
        k: [v] if isinstance(v, Tensor) else list(v) for k, v in given.items() if k in names and v is not None
    }
    outputs, inputs, seeds = (several.get(name, []) for name in names)
    apart = [o.placement.shape if isinstance(o, ShardedTensor) else tuple(o.shape) for o in outputs]
    opened_up: dict[str, Any] = {
        "outputs": [unfolded(o) if isinstance(o, ShardedTensor) else o for o in outputs],
        "inputs": [unfolded(i) if isinstance(i, ShardedTensor) else i for i in inputs],
    }
    if seeds:
        opened_up["grad_outputs"] = [
            None if s is None else s.reshape(shape) for s, shape in zip(seeds, apart, strict=True)
        ]
    rest = {k: v for k, v in kwargs.items() if k not in names}
    found = rule_of(func, (), opened_up | rest | dict(zip(GRAD_OPTIONS, args[3:], strict=False)))
    return tuple(
        folded(g, folds_of(i)) if isinstance(g, ShardedTensor) else g for g, i in zip(found, inputs, strict=True)
    )


@register_folded("grad.__get__", "_grad.__get__")
def gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient, merged as its tensor is."""
    return refolded(rule_of(func, (unfolded(args[0]),), kwargs), folds_of(args[0]))


@register_folded("register_hook")
def register_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a hook with the gradient, merged as its tensor is."""
    x, hook = args

    def on_open(grad: ShardedTensor) -> Any:
        changed = hook(folded(grad, folds_of(x)))
        return None if changed is None else changed.reshape(tuple(grad.shape))

    return rule_of(func, (unfolded(x), on_open), kwargs)


@register_folded("new_empty", "new_zeros", "new_ones", "new_full")
def creation(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A new tensor of a global shape, cut where an extent is that of a plain cut dim."""
    x: ShardedTensor = args[0]
    firsts = [a if b - a == 1 else None for a, b in spans(x.folds)]
    seen = x.placement.pick(firsts, tuple(x.shape))
    plain = ShardedTensor(x.local.new_empty(seen.local_shape), seen)
    return new(func, (plain, *args[1:]), kwargs)


@register_folded("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T.__get__", "mT.__get__")
def permute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The dims in another order."""
    x: ShardedTensor = args[0]
    order = order_after(func, x.ndim, *args[1:], **kwargs)
    inner = [d for k in order for d in range(*spans(x.folds)[k])]
    layout = x.placement.pick(inner, [x.placement.shape[d] for d in inner])
    return ShardedTensor(x.local.permute(*inner), layout, x.aliased, tuple(x.folds[k] for k in order))


@register_folded("unsqueeze")
def unsqueeze(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A new dim of extent 1."""
    x, dim = bound(args, kwargs, ("input", "dim"))
    dim = dim_of(dim, x.ndim + 1, "unsqueeze")
    inner = unfolded(x).unsqueeze(sum(x.folds[:dim]))
    return folded(inner, (*x.folds[:dim], 1, *x.folds[dim:]))


@register_folded("expand", "broadcast_to")
def expand(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Plain dims of extent 1 repeated without memory."""
    x: ShardedTensor = args[0]
    shape = tuple(result_for(func, x.shape, *args[1:], **kwargs).shape)
    more = len(shape) - x.ndim
    folds = (1,) * more + x.folds
    if any(n > 1 and shape[more + d] != x.shape[d] for d, n in enumerate(x.folds)):
        return on_settled(func, args, kwargs)
    inner = list(shape[:more])
    for (a, b), extent in zip(spans(x.folds), shape[more:], strict=True):
        inner += x.placement.shape[a:b] if b - a > 1 else [extent]
    return folded(unfolded(x).expand(inner), folds)


@register_folded(*ALONG_DIM)
def along_dim(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation along one dim; a merged one is settled first."""
    name, x = name_of(func), args[0]
    place = ALONG_DIM[name]
    dim = kwargs.get("dim", args[place] if len(args) > place else (DEFAULT_DIM | FIRST_DIM).get(name))
    others = any(isinstance(a, ShardedTensor) for a in (*args[1:], *kwargs.values()))
    if not isinstance(dim, int) or others or not isinstance(x, ShardedTensor):
        return on_settled(func, args, kwargs)
    dim = dim_of(dim, x.ndim, name)
    if x.folds[dim] > 1:
        return on_settled(func, args, kwargs)
    inner = sum(x.folds[:dim])
    args = (unfolded(x), *args[1:])
    if "dim" in kwargs or len(args) <= place:
        kwargs = kwargs | {"dim": inner}
    else:
        args = (*args[:place], inner, *args[place + 1 :])
    result = rule_of(func, args, kwargs)
    return refolded(refolded(result, x.folds), (*x.folds[:dim], *x.folds[dim + 1 :]))


@register_folded(*OVER_DIMS)
def over_dims(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reduction over dims, merged or not."""
    name, x = name_of(func), args[0]
    place = OVER_DIMS[name]
    given = kwargs.get("dim", args[place] if len(args) > place else None)
    if isinstance(given, bool):  # the old form: var(x, unbiased)
        return on_settled(func, args, kwargs)
    dims = dims_of(given, x.ndim, name)
    inner = tuple(d for k in dims for d in range(*spans(x.folds)[k]))
    args = (unfolded(x), *args[1:])
    if len(args) > place:
        args = (*args[:place], inner, *args[place + 1 :])
    else:
        kwargs = kwargs | {"dim": inner}
    left = tuple(n for d, n in enumerate(x.folds) if d not in dims)
    # Where the reduced dims are kept, a merged one is kept as one dim.
    more = tuple(d for k in dims for d in range(*spans(x.folds)[k])[1:])
    kept = tuple(1 if d in dims else n for d, n in enumerate(x.folds))

    def shaped(y: Any) -> Any:
        if not isinstance(y, ShardedTensor) or y.placement.ndim != sum(x.folds):
            return refolded(y, left)
        return folded(y.squeeze(more) if more else y, kept)

    return pytree.tree_map(shaped, rule_of(func, args, kwargs))


@register_folded("layer_norm", "rms_norm")
def layer_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A norm over the last dims."""
    x = args[0]
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    if any(n > 1 for n in x.folds[x.ndim - len(shape) :]):
        return on_settled(func, args, kwargs)
    return folded(rule_of(func, (unfolded(x), *args[1:]), kwargs), x.folds)


@register_folded(*NORMS)
def channel_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A norm (or slope) per channel: batch and channel come first, or all positions are merged before the channel."""
    x: ShardedTensor = args[0]
    if x.ndim == 2 and x.folds[1] == 1:
        result = rule_of(func, (unfolded(x).movedim(-1, 1), *args[1:]), kwargs)
        return folded(result.movedim(1, -1), x.folds)
    if any(n > 1 for n in x.folds[:2]):
        return on_settled(func, args, kwargs)
    return folded(rule_of(func, (unfolded(x), *args[1:]), kwargs), x.folds)


@register_folded("adaptive_avg_pool1d")
def adaptive_pool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The mean over a merged dim; for other sizes, the result of the settled tensor."""
    x, size = bound(args, kwargs, ("input", "output_size"))
    if size in (1, (1,), [1]):
        return x.mean(-1, keepdim=True)
    return on_settled(func, args, kwargs)


@register_folded("__getitem__")
def getitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Slices and positions of plain dims; a merged dim is taken whole, or settled first."""
    x, index = args
    if not isinstance(x, ShardedTensor):
        return on_settled(func, args, kwargs)
    items = in_order(items_of(index), x.ndim)
    if any(isinstance(item, (bool, Tensor)) for item in items):
        return on_settled(func, args, kwargs)
    inner: list[Any] = []
    folds: list[int] = []
    rest = iter(x.folds)
    for item in items:
        count = 1 if item is None else next(rest)
        if count > 1 and item != slice(None):
            return on_settled(func, args, kwargs)
        inner += [item] * count
        folds += [] if isinstance(item, int) else [count]
    return refolded(rule_of(func, (unfolded(x), tuple(inner)), kwargs), tuple(folds))


@register_folded("cat", "concat", "concatenate", "stack")
def join(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensors concatenated along a plain dim, or stacked along a new one."""
    tensors, dim = bound(args, kwargs, ("tensors", "dim"), 0)
    tensors = list(tensors)
    new_dim = name_of(func) == "stack"
    dim = dim_of(dim, tensors[0].ndim + new_dim, "cat")
    if len({t.ndim for t in tensors}) > 1 or (not new_dim and any(folds_of(t)[dim] > 1 for t in tensors)):
        return on_settled(func, args, kwargs)

    def labels(i: int, x: Tensor) -> Sequence[Any]:
        return [(i, d) if d == dim and not new_dim else d for d in range(x.ndim)]

    factors = common_factors([(t, labels(i, t)) for i, t in enumerate(tensors)])
    parts = [opened(t, labels(i, t), factors) for i, t in enumerate(tensors)]
    counts = [1 if d == dim and not new_dim else len(factors[d]) for d in range(tensors[0].ndim)]
    result = rule_of(func, (parts, sum(counts[:dim])), {})
    return folded(result, (*counts[:dim], 1, *counts[dim:]) if new_dim else tuple(counts))

"""The sharded tensor: a global tensor of which this rank holds one piece.

It intercepts at `__torch_function__`, above autograd, so autograd runs on the plain local pieces and every
communication is a node between them. What comes past that level raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.comm import Mesh, fetch, stack
from mural.errors import LayoutError, UnsupportedOp
from mural.geometry import Box
from mural.shard.layout import Layout, Want, route
from mural.shard.margin import Margin, forget
from mural.shard.table import TABLE, name_of


class ShardedTensor(Tensor):
    """A tensor cut over a mesh. `.shape`, `.size()` and `.numel()` are global; `.local` is this rank's piece.

    `aliased` names the view operation that had to communicate: torch would have returned a view there, so
    an in-place write to this tensor would not reach the original and raises. `margin` holds the piece with
    positions of neighbours around it, where some were computed here as well, and `sites` the windowed operations
    whose results this one takes its margin from (see `fuse.py`).
    """

    placement: Layout
    aliased: str
    margin: Margin | None = None
    sites: tuple[Any, ...] = ()
    _local: Tensor | None

    @staticmethod
    def __new__(cls: type[ShardedTensor], local: Tensor, placement: Layout, aliased: str = "") -> ShardedTensor:
        if tuple(local.shape) != placement.local_shape:
            raise LayoutError(
                f"a piece of shape {tuple(local.shape)} was given for the place {placement.box} of a tensor of "
                f"shape {placement.shape}: the piece's shape must be {placement.local_shape}"
            )
        return cls._wrapping(local, placement, aliased)

    @classmethod
    def _wrapping(cls, carrier: Tensor, placement: Layout, aliased: str = "") -> ShardedTensor:
        wrapper: ShardedTensor = Tensor._make_wrapper_subclass(  # type: ignore[assignment]
            cls, placement.shape, dtype=carrier.dtype, device=carrier.device
        )
        wrapper._local, wrapper.placement, wrapper.aliased = carrier, placement, aliased
        if carrier.requires_grad:
            mirror_gradient(wrapper)
        return wrapper

    @classmethod
    def with_margin(cls, margin: Margin) -> ShardedTensor:
        """The tensor of an extended piece; its own piece is cut out when it is asked for."""
        wrapper = cls._wrapping(margin.extended, margin.placement)
        wrapper._local, wrapper.margin = None, margin
        return wrapper

    @property
    def local(self) -> Tensor:
        """This rank's piece, without a margin."""
        if self._local is None and self.margin is not None:
            self._local = self.margin.cut_out()
        return self._local  # type: ignore[return-value]

    @property
    def carrier(self) -> Tensor:
        """The plain tensor that carries the history: the piece, or the extended piece where there is one."""
        return self.margin.extended if self.margin is not None and self.margin.live else self.local

    def holds(self, value: Tensor) -> bool:
        """Whether a plain tensor is this tensor's piece, or its extended one."""
        return value is self._local or (self.margin is not None and value is self.margin.extended)

    def settle(self) -> None:
        """Before a write: the own piece alone is this tensor from now on."""
        self._local, self.margin, self.sites = self.local, None, ()
        forget(self._local)

    @property
    def mesh(self) -> Mesh:
        """The mesh that the tensor is cut over."""
        return self.placement.mesh

    @property
    def box(self) -> Box:
        """The global place of this rank's piece, one interval per dim."""
        return self.placement.box

    def full(self) -> Tensor:
        """The whole tensor on every rank, as a plain tensor; differentiable, collective."""
        return relayout(self, self.placement.gathered(range(self.placement.ndim)), "full").local

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        box = ", ".join(f"{i.start}:{i.stop}" for i in self.box)
        return f"ShardedTensor(shape={self.placement.shape}, box=[{box}], rank={self.mesh.rank}, local={self.local!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = usual_names(args, kwargs or {})
        sharded = list(sharded_in((args, kwargs)))
        try:
            check_operands(func, sharded)
            entry = TABLE.get(func)
            if entry is not None:
                return entry[1](func, args, kwargs)
            if not any(t.placement.cut_dims for t in sharded):
                return run_replicated(func, args, kwargs)
            raise UnsupportedOp(
                f"{name_of(func)} has no rule for sharded tensors (shapes {[t.placement.shape for t in sharded]}, "
                f"cut dims {[t.placement.cut_dims for t in sharded]}): call .full() first if the whole tensor "
                f"fits on one rank, or add a rule to src/mural/shard/ops/"
            )
        except BaseException as error:
            if sharded:
                sharded[0].mesh.transport.raised(error)
            raise

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # nested checkpoints unpack the inputs that they saved
            return ShardedTensor(args[0].local.detach(), args[0].placement, args[0].aliased)
        raise UnsupportedOp(
            f"{func} reached a sharded tensor below autograd: a custom autograd.Function, a reentrant checkpoint, "
            f"a full backward hook or torch.compile handed it there. Its gradients would be lost, so it is refused; "
            f"use non-reentrant checkpoint and plain operations, or add a rule to src/mural/shard/ops/"
        )


def mirror_gradient(wrapper: ShardedTensor, wanted: bool = True) -> None:
    """Let the wrapper require a gradient as its piece does, and refuse any that reaches the wrapper itself.

    Gradients belong to the pieces. One that comes to the wrapper was made past this class, by a custom
    autograd.Function, and would be lost.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if wanted and not wrapper.requires_grad:
            wrapper.requires_grad_(True)
            wrapper.register_hook(refuse_gradient)
        elif not wanted:
            wrapper.requires_grad_(False)


def refuse_gradient(grad: Tensor) -> None:
    """Raise for a gradient that reached a wrapper."""
    raise UnsupportedOp(
        "a gradient reached a sharded tensor past its pieces: a custom autograd.Function took the sharded tensor as "
        "an input, and the gradient would be lost. Write the operation in plain torch, or give it .local or .full()"
    )


def usual_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with torch's usual names: `axis` and `keepdims` are `dim` and `keepdim`, the input comes first."""
    if not kwargs:
        return args, kwargs
    renamed = {{"axis": "dim", "keepdims": "keepdim"}.get(k, k): v for k, v in kwargs.items()}
    if not args:
        first = next((k for k in ("input", "self", "x") if isinstance(renamed.get(k), Tensor)), None)
        if first is not None:
            args = (renamed.pop(first),)
    return args, renamed


def sharded_in(tree: Any) -> Iterator[ShardedTensor]:
    """Every sharded tensor among the arguments of a call."""
    for leaf in tree if isinstance(tree, list) else (tree,):
        if isinstance(leaf, ShardedTensor):
            yield leaf
        elif isinstance(leaf, (tuple, list)):
            for item in leaf:
                yield from sharded_in(item)
        elif isinstance(leaf, dict):
            for item in leaf.values():
                yield from sharded_in(item)


def grad_fn_of(tensor: ShardedTensor) -> Any:
    """The autograd node on the wrapper itself; there must be none."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn


def check_operands(func: Any, sharded: Sequence[ShardedTensor]) -> None:
    """Raise if the sharded operands come from different meshes, or past this level."""
    for tensor in sharded:
        if tensor.mesh is not sharded[0].mesh and tensor.mesh != sharded[0].mesh:
            raise LayoutError(f"{name_of(func)} got tensors from two meshes, {tensor.mesh} and {sharded[0].mesh}")
        if tensor.carrier.requires_grad:
            mirror_gradient(tensor)
        if (node := grad_fn_of(tensor)) is not None:
            raise UnsupportedOp(
                f"{name_of(func)} got a sharded tensor that {node.name()} made: a custom autograd.Function (or a "
                f"reentrant checkpoint, a full backward hook, FSDP2) bypassed the sharded tensor, and gradients "
                f"through it would be lost. Use checkpoint(use_reentrant=False), write the operation in plain torch, "
                f"or (DDP with find_unused_parameters or static_graph) return the loss from the wrapped module"
            )


def run_replicated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call on tensors that every rank holds whole, which is the plain call."""
    like = next(sharded_in((args, kwargs)))
    plain_args, plain_kwargs = pytree.tree_map(local_of, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for tensor in sharded_in((args, kwargs)):
            if tensor.local is value:
                return tensor
        return replicated(value, like.placement)

    return pytree.tree_map(wrap, result)


def local_of(value: Any) -> Any:
    """A sharded tensor's piece; anything else as it is."""
    return value.local if isinstance(value, ShardedTensor) else value


def replicated(value: Tensor, like: Layout) -> Tensor:
    """A tensor that every rank holds whole, of the same mesh; a number stays plain."""
    if value.ndim == 0:
        return value
    if tuple(value.shape) == like.shape and not like.cut_dims:
        return ShardedTensor(value, like)
    axes = like.axes if like.ndim == value.ndim else (None,) * value.ndim
    return ShardedTensor(value, Layout(like.mesh, tuple(value.shape), axes, (None,) * value.ndim, like.images))


def pull(tensor: ShardedTensor, wants: tuple[Want, ...], name: str) -> Tensor:
    """The piece of a tensor that this rank wants, from wherever it lies."""
    return fetch(tensor.local, route(tensor.placement, wants), tensor.mesh.transport, name)


def relayout(tensor: ShardedTensor, target: Layout, name: str) -> ShardedTensor:
    """The same tensor in another layout; the very same one where nothing has to move."""
    if target.cuts == tensor.placement.cuts and target.axes == tensor.placement.axes:
        return tensor
    return ShardedTensor(pull(tensor, target.wants(), name), target)


def moves_data(tensor: ShardedTensor, target: Layout) -> bool:
    """Whether a change of layout has to communicate."""
    return not route(tensor.placement, target.wants()).inside


def gather(tensor: ShardedTensor, dims: Sequence[int], name: str) -> ShardedTensor:
    """The same tensor with some dims whole on every rank."""
    return relayout(tensor, tensor.placement.gathered(dims), name)


def merged(value: Tensor, mesh: Mesh, axes: Sequence[str], name: str) -> Tensor:
    """The sum of the tensors of all ranks along those axes, added in one order; the same bits on each."""
    return stacked(value, mesh, axes, name).sum(0) if axes else value


def stacked(value: Tensor, mesh: Mesh, axes: Sequence[str], name: str) -> Tensor:
    """The tensors of all ranks along those axes in a new leading dim."""
    return stack(value, mesh.peers(axes), mesh.rank, mesh.transport, name)

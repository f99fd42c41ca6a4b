"""The sharded tensor: a global tensor of which this rank holds one piece.

It intercepts at `__torch_function__`, above autograd, so autograd runs on the plain local pieces and every
communication is a node between them. A call that bypasses that level raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _StopRecomputationError

from mural.comm import fetch
from mural.errors import LayoutError, OutOfTime, UnsupportedOp
from mural.geometry import Box
from mural.ranks import Mesh
from mural.shard.call_forms import usual_form, write_out
from mural.shard.compiler import hide_from_compiler
from mural.shard.folds.regroup import Folds, folded_shape
from mural.shard.gradient_guard import REFUSING, mirror_gradient
from mural.shard.halo.margin import Margin, forget
from mural.shard.layout import Layout, route
from mural.shard.misread_calls import refusal_of
from mural.shard.table import FOLDED, RESHAPING, TABLE, name_of


class ShardedTensor(Tensor):
    """A tensor cut over a mesh. `.shape`, `.size()` and `.numel()` are global; `.local` is this rank's piece.

    `aliased` names the view operation that had to communicate: torch would have returned a view there, so
    an in-place write to this tensor would not reach the original and raises. `folds` says which dims merge
    several dims of the placement; `.local` and `.box` keep those apart. `margin` holds the piece with neighbours'
    positions around it, if some were computed here as well, and `sites` the windowed operations whose results the
    margin comes from (see `fuse.py`).
    """

    placement: Layout
    aliased: str
    folds: Folds
    extents: torch.Size
    margin: Margin | None = None
    sites: tuple[Any, ...] = ()
    partial: bool = False  # a slice of a cut dim, or a view of one: its piece cannot tell what torch would copy
    _local: Tensor | None

    @staticmethod
    def __new__(
        cls: type[ShardedTensor], local: Tensor, placement: Layout, aliased: str = "", folds: Folds = ()
    ) -> ShardedTensor:
        if local.shape != placement.local_shape:
            raise LayoutError(
                f"a piece of shape {tuple(local.shape)} was given for the place {placement.box} of a tensor of "
                f"shape {placement.shape}: the piece's shape must be {placement.local_shape}"
            )
        return cls._wrapping(local, placement, aliased, folds)

    @classmethod
    def _wrapping(cls, carrier: Tensor, placement: Layout, aliased: str = "", folds: Folds = ()) -> ShardedTensor:
        size, trains = (
            torch.Size(folded_shape(placement.shape, folds)) if folds else placement.size,
            carrier.requires_grad,
        )
        wrapper: ShardedTensor = Tensor._make_wrapper_subclass(  # type: ignore[assignment]
            cls, size, dtype=carrier.dtype, device=carrier.device, requires_grad=trains
        )
        wrapper._local, wrapper.placement, wrapper.aliased, wrapper.folds = carrier, placement, aliased, folds
        wrapper.extents = size
        if trains:
            with torch._C.DisableTorchFunctionSubclass():
                wrapper._backward_hooks = REFUSING
        hide_from_compiler(cls)
        return wrapper

    @classmethod
    def with_margin(cls, margin: Margin) -> ShardedTensor:
        """The tensor of an extended piece; the owned piece is cut out at first use."""
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
        """The plain tensor that carries the autograd history: the piece, or the extended piece if there is one."""
        return self.margin.extended if self.margin is not None and self.margin.live else self.local

    def holds(self, value: Tensor) -> bool:
        """Whether a plain tensor is this tensor's piece, or its extended one."""
        return value is self._local or (self.margin is not None and value is self.margin.extended)

    def drop_margin(self) -> None:
        """Drop the margin before a write: from now on, this tensor is only its own piece."""
        self._local, self.margin, self.sites = self.local, None, ()
        forget(self._local)

    # What models use most often, without the detour through `__torch_function__`.

    @property
    def _some(self) -> Tensor:
        return self.margin.extended if self._local is None and self.margin is not None else self.local

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return self.extents

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dims."""
        return len(self.extents)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The type of the pieces."""
        return self._some.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of this rank's piece."""
        return self._some.device

    def dim(self) -> int:
        """The number of dims."""
        return len(self.extents)

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """The global shape, or one extent of it."""
        return self.extents if dim is None else self.extents[dim]

    def is_floating_point(self) -> bool:
        """Whether the pieces hold floating point numbers."""
        return self._some.is_floating_point()

    @property
    def mesh(self) -> Mesh:
        """The mesh that the tensor is cut over."""
        return self.placement.mesh

    @property
    def box(self) -> Box:
        """The global place of this rank's piece, one interval per dim of the placement."""
        return self.placement.box

    def full(self) -> Tensor:
        """The whole tensor on every rank, as a plain tensor; differentiable, collective."""
        whole, target = self.local, self.placement.gathered(range(self.placement.ndim))
        if target.cuts != self.placement.cuts:
            whole = fetch(whole, route(self.placement, target.wants()), self.mesh.transport, "full")
            if not whole.requires_grad:  # it is only read
                self.mesh.transport.await_gpu("full")
        return whole.reshape(tuple(self.shape)) if self.folds else whole

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        box = ", ".join(f"{i.start}:{i.stop}" for i in self.box)
        return f"ShardedTensor(shape={tuple(self.shape)}, box=[{box}], rank={self.mesh.rank}, local={self.local!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = usual_form(func, args, kwargs or {})
        sharded = sharded_in(args, kwargs)
        try:
            folded = check_operands(func, sharded)
            if kwargs.get("out") is not None:
                return write_out(func, args, kwargs)
            entry = TABLE.get(func)
            if folded:
                return FOLDED.get(entry[0] if entry else "", FOLDED[""])(func, args, kwargs)
            if entry is not None:
                return entry[1](func, args, kwargs)
            if name_of(func) in RESHAPING:
                raise UnsupportedOp(f"{name_of(func)} changes the shape of a sharded tensor in place: use its result")
            if not any(t.placement.cut_dims for t in sharded):
                return run_replicated(func, args, kwargs)
            raise UnsupportedOp(
                f"{name_of(func)} has no rule for sharded tensors (shapes {[t.placement.shape for t in sharded]}, "
                f"cut dims {[t.placement.cut_dims for t in sharded]}): call .full() first if the whole tensor "
                f"fits on one rank, or add a rule to src/mural/shard/ops/"
            )
        except _StopRecomputationError:  # how a checkpoint ends its recompute, on every rank
            raise
        except OutOfTime as error:
            if sharded[0].mesh.tiled:
                raise UnsupportedOp(f"{name_of(func)} looks at positions outside of its tile") from error
            raise OutOfTime(
                f"{name_of(func)} of shapes {[tuple(t.shape) for t in sharded]} looks at other images of the batch, "
                f"which come in another micro-batch ({error}): use microbatches = 1"
            ) from error
        except BaseException as error:
            refusal = refusal_of(func, args, kwargs, error)
            if sharded:
                sharded[0].mesh.transport.raised(refusal or error)
            if refusal is not None:
                raise refusal from error
            raise

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # nested checkpoints unpack the inputs that they saved
            return ShardedTensor(args[0].local.detach(), args[0].placement, args[0].aliased, args[0].folds)
        raise UnsupportedOp(
            f"{func} reached a sharded tensor below autograd: a C++ operator, a reentrant checkpoint, a full backward "
            f"hook or torch.compile handed it there. Its gradients would be lost, so it is refused; "
            f"use non-reentrant checkpoint and plain operations, or add a rule to src/mural/shard/ops/"
        )


LEAVES = frozenset({int, float, bool, str, type(None), Tensor, torch.nn.Parameter})
"""The types of most arguments, which hold no sharded tensors."""


def sharded_in(args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> list[ShardedTensor]:
    """Every sharded tensor among the arguments of a call."""
    found: list[ShardedTensor] = []
    collect(args, found)
    if kwargs:
        collect(kwargs.values(), found)
    return found


def collect(items: Iterable[Any], found: list[ShardedTensor]) -> None:
    """Append the sharded tensors among some values, and in tuples, lists and dicts of them, to a list."""
    for item in items:
        kind = type(item)
        if kind in LEAVES:
            continue
        if kind is ShardedTensor or isinstance(item, ShardedTensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            collect(item, found)
        elif isinstance(item, dict):
            collect(item.values(), found)


def check_operands(func: Any, sharded: Sequence[ShardedTensor]) -> bool:
    """Whether any operand has folds; raises if they come from different meshes, or bypassed this level."""
    folded = False
    first = sharded[0].placement.mesh if sharded else None
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in sharded:
            mesh = tensor.placement.mesh
            if mesh is not first and mesh != first:
                raise LayoutError(f"{name_of(func)} got tensors from two meshes, {mesh} and {first}")
            folded = folded or bool(tensor.folds)
            carrier = tensor._local if tensor.margin is None else tensor.carrier
            if not tensor.requires_grad:
                if carrier.requires_grad:  # type: ignore[union-attr]
                    mirror_gradient(tensor)
            elif (node := tensor.grad_fn) is not None:
                raise UnsupportedOp(
                    f"{name_of(func)} got a sharded tensor that {node.name()} made: a reentrant checkpoint, a full "
                    f"backward hook, FSDP2, or a custom autograd.Function that did not get it as an argument, bypassed "
                    f"the sharded tensor, and gradients through it would be lost. Use checkpoint(use_reentrant=False), "
                    f"give tensors to a Function as arguments, or (DDP with find_unused_parameters or static_graph) "
                    f"return the loss from the wrapped module"
                )
            elif not carrier.requires_grad and torch.is_grad_enabled():  # type: ignore[union-attr]
                # A nested checkpoint unpacked it: torch gave the wrapper its flag back, not the piece.
                tensor._local = tensor.local.detach().requires_grad_()
    return folded


def run_replicated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The plain call, for tensors that every rank holds whole."""
    like = sharded_in(args, kwargs)[0]
    plain_args, plain_kwargs = pytree.tree_map(local_of, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for tensor in sharded_in(args, kwargs):
            if tensor.local is value:
                return tensor
        return replicated(value, like.placement)

    return pytree.tree_map(wrap, result)


def local_of(value: Any) -> Any:
    """A sharded tensor's piece; anything else unchanged."""
    return value.local if isinstance(value, ShardedTensor) else value


def replicated(value: Tensor, like: Layout) -> Tensor:
    """A tensor that every rank holds whole, on the same mesh; a number stays plain."""
    if value.ndim == 0:
        return value
    if tuple(value.shape) == like.shape and not like.cut_dims:
        return ShardedTensor(value, like)
    axes = like.axes if like.ndim == value.ndim else (None,) * value.ndim
    return ShardedTensor(value, Layout(like.mesh, tuple(value.shape), axes, (None,) * value.ndim, like.images))


def unfolded(tensor: ShardedTensor) -> ShardedTensor:
    """The tensor with one dim for each dim of its placement."""
    return ShardedTensor(tensor.local, tensor.placement, tensor.aliased) if tensor.folds else tensor

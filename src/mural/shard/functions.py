"""Custom autograd Functions on sharded tensors: forward and backward both run on sharded tensors, served by the rules.

`Function.apply` does not go through `__torch_function__`, and autograd would record the wrapper. So a call with sharded
tensors goes through a bridge, a Function of the plain pieces, which autograd differentiates:

    caller           x: sharded                      y: sharded          ∇y of the piece        ∇x of the piece
    bridge           pieces ──────┐          ┌────── pieces              │ true scale           ↑ scale of backward
    user's Function            forward(ctx, x) → y                       backward(ctx, ∇y) → ∇x, all sharded

torch's own Functions (a reentrant checkpoint, a full backward hook) differentiate their inputs outside of `backward`;
they stay as they are, and their results for a sharded tensor are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx
from torch.utils.checkpoint import _StopRecomputationError

from mural.comm import mark
from mural.errors import UnsupportedOp
from mural.ranks import Mesh
from mural.shard.function_parts import FunctionPart, part_of
from mural.shard.gradient_guard import mirror_gradient
from mural.shard.tensor import LEAVES, ShardedTensor, check_operands, local_of, sharded_in

OWN = "mural."
FOREIGN = ("torch.", OWN)
"""Modules whose Functions are called unchanged."""

KIND = "function"
"""The kind of a custom Function's node in a graph, next to the kinds of rules."""

Seen = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a Function: `seen(function, apply, args, kwargs)`."""

Told = Callable[[Any, tuple[Any, ...]], None]
"""Told of one of torch's own Functions and its arguments before it is applied."""

_base: Any = torch.autograd.function._SingleLevelFunction  # type: ignore[attr-defined]
_watchers: list[tuple[Seen, Told | None]] = []
_bridges: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class Context(FunctionCtx):
    """What a custom Function gets as `ctx`: attributes, and the tensors that it saves."""

    materialize_grads = True
    to_save: tuple[Any, ...] = ()
    dirty_tensors: tuple[Tensor, ...] = ()
    non_differentiable: tuple[Tensor, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self._unpack: Callable[[], tuple[Any, ...]] = tuple

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tensors that forward saved."""
        return self._unpack()

    @contextmanager
    def unpacking(self, unpack: Callable[[], tuple[Any, ...]]) -> Generator[None]:
        """Saved tensors can be read only in the block: a lasting reference would be a cycle, and leak memory."""
        self._unpack = unpack
        try:
            yield
        finally:
            self._unpack = tuple


@dataclass
class FunctionCall:
    """One call of a Function: which parts the plain tensors are that it takes, returns and saves.

    `still` says which results are not differentiable, and `alone` that there is a single one, not in a tuple.
    """

    function: Any
    mesh: Mesh
    inputs: tuple[FunctionPart | None, ...]
    context: Context = field(default_factory=lambda: Context(()))
    outputs: tuple[FunctionPart | None, ...] = ()
    still: tuple[bool, ...] = ()
    saved: tuple[FunctionPart | None, ...] = ()
    alone: bool = False

    def run(self, context: Context, pieces: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results of the Function's own forward."""
        self.context = context
        # New tensors around the pieces, without margins: what it writes has to reach the pieces.
        args = tuple(p if part is None else part.seen(p) for p, part in zip(pieces, self.inputs, strict=True))
        if has_setup(self.function):
            result = self.function.forward(*args)
            self.function.setup_context(context, args, result)
        else:
            result = self.function.forward(context, *args)
        self.alone = not isinstance(result, tuple)
        results = (result,) if self.alone else cast("tuple[Any, ...]", result)
        self.outputs = tuple(part_of(r, self.mesh) for r in results)
        self.still = tuple(any(r is t for t in context.non_differentiable) for r in results)
        self.saved = tuple(part_of(t, self.mesh) for t in context.to_save)
        return results

    def differentiate(self, grads: tuple[Any, ...], unpack: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """The gradients that the Function's own backward returns, from those of the pieces."""
        function, context = self.function, self.context
        true = [
            None if g is None or part is None else part.seen(g) if still or not carries(g) else part.gradient_seen(g)
            for g, part, still in zip(grads, self.outputs, self.still, strict=True)
        ]
        backward = function.vjp if function.vjp is not Function.vjp else function.backward
        boxed = getattr(function, "boxed_grads_call", False)  # all gradients in one list
        with context.unpacking(unpack):
            found = backward(context, true) if boxed else backward(context, *true)
        return cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found,)

    def gradients_of_pieces(self, found: tuple[Any, ...]) -> list[Any]:
        """What autograd gets for the arguments: gradients of pieces, None where none is needed."""
        name, count = self.function.__name__, len(self.inputs)
        if len(found) != count and (len(found) < count or any(g is not None for g in found[count:])):
            raise RuntimeError(f"{name}.backward returned {len(found)} gradients for {count} inputs")
        return [
            (part.gradient_of_piece(grad, name) if needed else None) if part and isinstance(grad, Tensor) else grad
            for grad, part, needed in zip(found, self.inputs, self.context.needs_input_grad, strict=False)
        ]


def carries(grad: Tensor) -> bool:
    """Whether a gradient is real: integer results get zeros."""
    return grad.is_floating_point() or grad.is_complex()


class Bridge(Function):
    """A custom Function as a Function of pieces."""

    @staticmethod
    def forward(ctx: Any, call: FunctionCall, *pieces: Any) -> tuple[Any, ...]:
        """The pieces of the results."""
        context = Context(ctx.needs_input_grad[1:])
        results = call.run(context, pieces)
        ctx.call = call
        ctx.set_materialize_grads(context.materialize_grads)
        ctx.save_for_backward(*map(local_of, context.to_save))
        ctx.mark_dirty(*map(local_of, context.dirty_tensors))
        ctx.mark_non_differentiable(*map(local_of, context.non_differentiable))
        # The context lives as long as the node, and keeps alive whatever it refers to.
        context.to_save, context.dirty_tensors, context.non_differentiable = (), (), ()
        return tuple(map(local_of, results))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of the pieces of the arguments."""
        call: FunctionCall = ctx.call

        def unpack() -> tuple[Any, ...]:
            saved = zip(call.saved, ctx.saved_tensors, strict=True)
            return tuple(piece if part is None else part.seen(piece) for part, piece in saved)

        with named(call.function, "backward", call.mesh):
            if torch.is_grad_enabled():
                raise UnsupportedOp("second derivatives (create_graph=True) of sharded tensors are not supported")
            found = call.differentiate(grads, unpack)
            return (None, *call.gradients_of_pieces(found))


@contextmanager
def named(function: Any, part: str, mesh: Mesh) -> Generator[None]:
    """Add the Function's name to a refusal, and tell the other ranks about any error."""
    try:
        yield
    except _StopRecomputationError:  # how a checkpoint ends its recompute, on every rank
        raise
    except UnsupportedOp as error:
        refusal = UnsupportedOp(f"{function.__name__}.{part} of a custom autograd.Function: {error}")
        mesh.transport.raised(refusal)
        raise refusal from error
    except BaseException as error:
        mesh.transport.raised(error)
        raise


def bridged(function: Any, sharded: list[ShardedTensor], args: tuple[Any, ...]) -> Any:
    """The result of a custom Function for sharded tensors; its gradients go through their pieces."""
    mesh = sharded[0].mesh
    with named(function, "forward", mesh):
        check_operands(function, sharded)
        call = FunctionCall(function, mesh, tuple(part_of(a, mesh) for a in args))
        pieces: tuple[Any, ...] = bridge_of(function).apply(call, *map(local_of, args))
    mark()
    results = tuple(result_of(piece, part, args) for piece, part in zip(pieces, call.outputs, strict=True))
    return results[0] if call.alone else results


def result_of(piece: Any, part: FunctionPart | None, args: tuple[Any, ...]) -> Any:
    """The tensor that a piece is part of; the argument itself if the Function wrote to it and returned it."""
    if part is None:
        return piece
    for arg in args:  # autograd returns the same piece if it was written to, and a new tensor otherwise
        if isinstance(arg, ShardedTensor) and arg.holds(piece):
            arg.drop_margin()
            mirror_gradient(arg, piece.requires_grad)
            return arg
    return part.seen(piece)


def bridge_of(function: Any) -> Any:
    """A bridge of the Function's name, which is the name of its node in autograd's graph."""
    if function not in _bridges:
        _bridges[function] = type(function.__name__, (Bridge,), {"__module__": __name__})
    return _bridges[function]


def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch's `apply` returns, through a bridge if arguments are sharded."""
    if cls.__module__.startswith(FOREIGN):
        told = _watchers[-1][1] if _watchers else None
        if told is not None and not cls.__module__.startswith(OWN):
            told(cls, args)
        return super(_base, cls).apply(*args, **kwargs)
    if _watchers:
        return _watchers[-1][0](cls, partial(carried_out, cls), args, kwargs)
    return carried_out(cls, *args, **kwargs)


def carried_out(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a custom Function, through a bridge if arguments are sharded."""
    plain = super(_base, cls).apply
    if not kwargs and LEAVES.issuperset(map(type, args)):
        return plain(*args)
    sharded = sharded_in(args, kwargs)
    if not sharded:
        return plain(*args, **kwargs)
    return bridged(cls, sharded, by_position(cls, args, kwargs) if kwargs else args)


def by_position(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call as forward counts them, which is how backward returns their gradients."""
    first = () if has_setup(function) else (None,)
    bound = signature(function.forward).bind(*first, *args, **kwargs)
    if bound.kwargs:
        raise TypeError(f"{function.__name__}.forward: {list(bound.kwargs)} come after an argument that is missing")
    return bound.args[len(first) :]


def has_setup(function: Any) -> bool:
    """Whether a Function's forward takes no `ctx`, and `setup_context` does."""
    return function.setup_context is not _base.setup_context


def watch_functions() -> None:
    """From now on, let custom Functions check their arguments.

    This hook, below `Function.apply`, also catches Functions whose `apply` was stored before.
    """
    if "apply" not in vars(_base):
        _base.apply = classmethod(applied)


@contextmanager
def seeing_functions(seen: Seen, told: Told | None = None) -> Generator[None]:
    """Inside the block, custom Functions are handed to `seen`, and somebody is `told` of torch's own."""
    watcher = seen, told
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)

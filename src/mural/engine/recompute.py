"""Recompute: blocks whose activations are not kept, but computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mural.errors import PlanError
from mural.graph.follow import is_followed
from mural.graph.held_state import HeldState
from mural.memory.offload.moments import UNWATCHED
from mural.shard import ShardedTensor
from mural.shard.halo.margin import Margin

MOST_LAYERS = 12
"""A module with others inside that has more layers, or more than half of the model's, is not a block."""


def recompute(model: nn.Module, blocks: str | tuple[str, ...], leaving: bool = False) -> None:
    """Let some blocks of a model be computed again in backward: named ones, or all. Their state changes only once.

    If what they take may be `leaving` for the host, autograd keeps the pieces of it that are on this rank.
    """
    if blocks == "stages" or not blocks:
        return
    for module in chosen(model, blocks):
        forget_activations(module, leaving)


def chosen(model: nn.Module, blocks: str | tuple[str, ...]) -> Iterator[nn.Module]:
    """The blocks that a plan names; of all, those of several layers that hold no block of several layers."""
    modules = dict(model.named_modules())
    if isinstance(blocks, tuple):
        for name in blocks:
            if name not in modules or not name:
                raise PlanError(
                    f"recompute names {name!r}, which is not a module of the model: choose from {[*modules][1:9]}…"
                )
            yield modules[name]
    elif blocks == "all":
        yield from (modules[name] for name in block_names(model))
    else:
        raise PlanError(f'recompute = {blocks!r}: give a list of blocks, as ["down.0"], "all" or "stages"')


def block_names(model: nn.Module) -> list[str]:
    """The names of the blocks: the outermost modules of a few layers, one of which at least is their own.

    >>> part = lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    >>> block_names(nn.Sequential(nn.Sequential(part(), part()), nn.Conv2d(3, 2, 1)))
    ['0.0', '0.1']
    """
    found, most = list[str](), min(MOST_LAYERS, layers_of(model) // 2)
    for name, module in model.named_modules():
        if name and is_block(module, most) and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def is_block(module: nn.Module, most: int) -> bool:
    """Whether a module is several layers, one of which at least is its own; with others inside, at most so many."""
    children = list(module.children())
    own = [child for child in children if all(len(list(inner.children())) < 2 for inner in child.modules())]
    few = len(own) == len(children) or layers_of(module) <= most
    return len(children) > 1 and few and any(map(layers_of, own))


def layers_of(module: nn.Module) -> int:
    """How many modules in it have parameters of their own."""
    return sum(any(True for _ in inner.parameters(recurse=False)) for inner in module.modules())


def forget_activations(module: nn.Module, leaving: bool) -> None:
    """Let a module's forward keep its inputs alone, wherever gradients are wanted.

    A block that a cut goes through is kept: several stages have their parts of it.
    """
    writes: WeakKeyDictionary[nn.Module, dict[tuple[bool, ...], bool]] = WeakKeyDictionary()
    own = vars(module).get("forward")
    if isinstance(own, MethodType) and own.__self__ is module:
        own = own.__func__
    elif own is None:
        own = type(module).forward
    else:
        own = partial(without_self, own)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain, modules = partial(own, self), dict(self.named_modules())
        call = BlockCall(plain, args, kwargs, leaving)
        if not torch.is_grad_enabled() or is_followed() or any(tensor.is_meta for tensor in call.tensors):
            return plain(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            held = HeldParameters.by(modules)
            return held.seen(), again(HeldState.by(modules), held)

        known, mode = writes.setdefault(self, {}), tuple(one.training for one in modules.values())
        copied = known.get(mode, True)
        result = call.forgetful(copied, context_fn=contexts)
        if call.written and not copied:
            raise PlanError(
                f"{type(self).__name__}, a block in recompute, writes to what it takes in some calls and not in "
                f"others: it would be computed again from what it wrote. Leave it out of recompute"
            )
        known[mode] = known.get(mode, False) or call.written
        return result

    module.forward = MethodType(forward, module)  # a copy of the module has one that runs the copy


def without_self(function: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a function gives that somebody put in place of a module's forward."""
    return function(*args, **kwargs)


class BlockCall:
    """A call of a block: forward with what the caller gave, and again in backward with what was in it before.

    Forward may append to the caller's lists, and write to its tensors, as an activation in place does. So tensors are
    kept when it is over: they, or copies that were made before. If they may be `leaving` for the host, it runs on this
    rank's pieces alone.
    """

    def __init__(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], leaving: bool):
        self.plain, self.leaving = plain, leaving
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.leaves, self.tree = pytree.tree_flatten((args, kwargs))
        self.places = [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.tensors = [self.leaves[place] for place in self.places]
        self.written = False
        """Whether forward wrote to what it took."""
        self.ways: list[Callable[[Tensor], Tensor]] = []
        self.kept: Any = None
        """What the tensors are made of again: pieces, as autograd keeps them."""

    def forgetful(self, copied: bool, **options: Any) -> Any:
        """What the block makes, of which autograd keeps nothing; tensors are `copied` if forward may write to them."""
        tensors = self.tensors
        for x in tensors:
            if self.leaving and isinstance(x, ShardedTensor) and x.margin is not None:
                x.drop_margin()
        before = [(x, version_of(x)) for x in map(carrier, tensors)]
        copies = [copy_of(x) for x in tensors] if copied else tensors
        places = [torch.empty(0, device=x.device) for x, _ in before]  # whose random numbers checkpoint keeps
        result = checkpoint(self._run, *places, use_reentrant=False, **options)
        now = map(carrier, tensors)
        self.written = any(x is not y or version_of(y) != version for (x, version), y in zip(before, now, strict=True))
        self._keep(copies if self.written else tensors)
        return result

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        """Have autograd keep tensors: it finds out if they are written to, and lets them leave."""
        self.ways = [again_of(x) for x in tensors]
        pieces = map(carrier, tensors)
        self.kept = Kept.apply(torch.empty(0, requires_grad=True), *pieces).grad_fn
        self.tensors.clear()
        for place in self.places:
            self.leaves[place] = None

    def _run(self, *_: Tensor) -> Any:
        """What the block makes, for the first time or again."""
        if self.given is not None:
            (args, kwargs), self.given = self.given, None
            return self.plain(*args, **kwargs)
        leaves = [*self.leaves]
        for place, way, piece in zip(self.places, self.ways, self.kept.saved_tensors[1:], strict=True):
            leaves[place] = way(piece)
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return self.plain(*args, **kwargs)


class Kept(torch.autograd.Function):
    """Has autograd keep tensors, in the node that makes the result."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """An empty tensor."""
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Nobody goes back through it."""
        raise AssertionError


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, as far as torch counts; nobody who watches calls sees the question."""
    with UNWATCHED():
        return 0 if tensor.is_inference() else tensor._version


def carrier(tensor: Tensor) -> Tensor:
    """The plain tensor that has the memory of a tensor."""
    return tensor.carrier if isinstance(tensor, ShardedTensor) else tensor


def copy_of(tensor: Tensor) -> Tensor:
    """A copy of a tensor, and of this rank's piece alone."""
    if not isinstance(tensor, ShardedTensor):
        return tensor.clone()
    return ShardedTensor(tensor.local.clone(), tensor.placement, tensor.aliased, tensor.folds)


def again_of(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """How a tensor is made of its carrier again."""
    if not isinstance(tensor, ShardedTensor):
        return lambda piece: piece
    margin, placement, aliased, folds = tensor.margin, tensor.placement, tensor.aliased, tensor.folds
    if margin is not None and margin.live:
        spans, layout = margin.spans, margin.placement
        return lambda piece: ShardedTensor.with_margin(Margin(piece, spans, layout))
    return lambda piece: ShardedTensor(piece, placement, aliased, folds)


@dataclass
class HeldParameters:
    """The parameters that modules have at one time; under `torch.func.functional_call`, what stands in for them."""

    modules: Mapping[str, nn.Module]
    tables: list[dict[str, Any]]
    left: list[tuple[str, Tensor, int]] = field(default_factory=list[tuple[str, Tensor, int]])
    """Those to which the forward did not write, by name, with how often others had done so."""

    @classmethod
    def by(cls, modules: Mapping[str, nn.Module]) -> HeldParameters:
        """What modules have now, by path."""
        return cls(modules, [dict(module._parameters) for module in modules.values()])

    @contextmanager
    def seen(self) -> Generator[None]:
        """A block in which the modules' forward runs."""
        pairs = zip(self.modules, self.tables, strict=True)
        named = [
            (f"{path}.{name}".lstrip("."), p) for path, table in pairs for name, p in table.items() if p is not None
        ]
        before = [version_of(p) for _, p in named]
        yield
        self.left = [(name, p, v) for (name, p), v in zip(named, before, strict=True) if version_of(p) == v]

    def put_back(self) -> None:
        """Give the modules what they had; raise if its numbers are others now."""
        for name, p, version in self.left:
            if version_of(p) != version:
                raise PlanError(
                    f"{name} of a block in recompute was written to after the block's forward and before its backward, "
                    f"which would compute the block again with other numbers: write to it after the step, or leave the "
                    f"block out of recompute"
                )
        for module, table in zip(self.modules.values(), self.tables, strict=True):
            module._parameters.update(table)


@contextmanager
def again(before: HeldState, parameters: HeldParameters) -> Generator[None]:
    """A block in which a module finds what it held before its forward; afterwards it holds what it holds now."""
    now, tables = HeldState.by(before.modules), HeldParameters.by(before.modules)
    before.put_back()
    parameters.put_back()
    try:
        yield
    finally:
        now.put_back(always=True)  # torch counts no write of the first one
        tables.put_back()

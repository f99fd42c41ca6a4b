"""Recompute: blocks whose activations are not kept, but computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mural.errors import PlanError
from mural.graph.follow import is_followed
from mural.graph.held_state import HeldState
from mural.shard import ShardedTensor

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
    plain = module.forward
    modules = dict(module.named_modules())

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), again(HeldState.by(modules))

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not torch.is_grad_enabled() or is_followed() or any(tensor.is_meta for tensor in tensors):
            return plain(*args, **kwargs)
        # Lists of its own: the caller may append to those that it gave before backward comes, as dense blocks do.
        args, kwargs = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        run = plain
        if leaving:
            run, args, kwargs = in_pieces(plain, args, kwargs)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    module.forward = forward


def in_pieces(
    plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A call of a block with this rank's pieces of its arguments."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    run = Pieces(plain, leaves, tree).run
    return run, tuple(x.local if isinstance(x, ShardedTensor) else x for x in leaves), {}


class Pieces:
    """How the arguments of a block are made of this rank's pieces.

    Autograd keeps plain tensors for backward; a sharded one would be kept as it is, on the device.
    """

    def __init__(self, plain: Callable[..., Any], leaves: list[Any], tree: pytree.TreeSpec):
        self.plain, self.tree = plain, tree
        self.sharded = [(x.placement, x.aliased, x.folds) if isinstance(x, ShardedTensor) else None for x in leaves]

    def run(self, *local: Any) -> Any:
        """What the block makes of the pieces."""
        pairs = zip(local, self.sharded, strict=True)
        leaves = [piece if how is None else ShardedTensor(piece, *how) for piece, how in pairs]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return self.plain(*args, **kwargs)


@contextmanager
def again(before: HeldState) -> Generator[None]:
    """A block in which a module finds what it held before its forward; afterwards it holds what it holds now."""
    now = HeldState.by(before.modules)
    before.put_back()
    try:
        yield
    finally:
        now.put_back()

"""Recompute: blocks whose activations are not kept, but computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mural.engine.block_call import BlockCall, Repeated
from mural.engine.block_inputs import FirstWrites
from mural.engine.held_parameters import HeldParameters, again, held_with_hooks
from mural.errors import PlanError
from mural.graph.follow import is_followed

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
    told_by: WeakKeyDictionary[nn.Module, dict[tuple[bool, ...], Writes]] = WeakKeyDictionary()
    own = vars(module).get("forward")
    if isinstance(own, MethodType) and own.__self__ is module:
        own = own.__func__
    elif own is None:
        own = type(module).forward
    else:
        own = partial(without_self, own)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain, modules = partial(own, self), dict(self.named_modules())
        name = type(self).__name__
        call = BlockCall(plain, args, kwargs, leaving, name)
        if not torch.is_grad_enabled() or is_followed() or any(tensor.is_meta for tensor in call.tensors):
            return plain(*args, **kwargs)
        known, mode = told_by.setdefault(self, {}), tuple(one.training for one in modules.values())
        told = known.get(mode)
        writes = FirstWrites() if told is None or told.parameters else None
        parameters = HeldParameters.by(modules)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            held = held_with_hooks(modules)
            return parameters.seen(name, writes), Repeated(partial(again, held, parameters))

        result = call.forgetful(told is not None and told.inputs, writes, context_fn=contexts)
        check_writes(call, parameters, told)
        before = told or Writes(False, False)
        known[mode] = Writes(before.inputs or call.written, before.parameters or bool(parameters.written))
        return result

    module.forward = MethodType(forward, module)  # a copy of the module has one that runs the copy


class Writes(NamedTuple):
    """What a block's forward wrote to in a mode: the tensors that it takes, its parameters."""

    inputs: bool
    parameters: bool


def check_writes(call: BlockCall, parameters: HeldParameters, told: Writes | None) -> None:
    """Raise if a block wrote to what it takes where that was not seen, or where a copy is not enough."""
    if call.written and not call.copied:
        how = "by an operation that torch does not tell of" if told is None else "in some calls and not in others"
        raise PlanError(
            f"{call.name}, a block in recompute, writes to what it takes, {how}: it would be computed again from what "
            f"it wrote. Leave it out of recompute"
        )
    if call.written and call.memory & parameters.memory():
        raise PlanError(
            f"{call.name}, a block in recompute, writes to what it takes, some of which is in the memory of a "
            f"parameter or buffer of its own: it would be computed again with the two apart. Give it a clone, or leave "
            f"it out of recompute"
        )


def without_self(function: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a function gives that somebody put in place of a module's forward."""
    return function(*args, **kwargs)

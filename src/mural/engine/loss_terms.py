"""What a loss brings along: its parameters and buffers, as `loss.*` next to the names of the model.

    loss = Uncertainty()                          loss.weights
    loss = partial(criterion, temperature=t)      loss.temperature
    def loss(o, y): return net(o, y)              loss.net.conv.weight

For as long as torch's own `state_dict` and its like run, the loss is a submodule of the model. So names, hooks,
ties and strictness are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mural.engine.extra_state import keepers, share_from_first
from mural.engine.loss_variables import Path, held_by
from mural.engine.materialize import materialize
from mural.errors import PlanError
from mural.graph.commons import Commons, Name
from mural.graph.held_state import HeldState
from mural.pipeline.step_runs import check_left
from mural.ranks import Mesh

LOSS = "loss"
Held = tuple[Path, nn.Module | Tensor]
Place = tuple[dict[str, Any], str, Any]
"""A dict of a module (its parameters, buffers or submodules), a key in it, and what is there in a block."""


@dataclass(frozen=True)
class LossTerms:
    """The parameters and buffers of a loss that are not the model's; false where it has none.

    `root` holds them: it is the loss, or the module whose method the loss is, or a module that was made of the loss's
    variables. `places` are variables next to such a module, and None wherever it holds something of the model.
    """

    root: nn.Module = field(default_factory=nn.Module)
    model: nn.Module = field(default_factory=nn.Module)
    places: Sequence[Place] = ()
    some: bool = False

    @classmethod
    def of(cls, loss: Callable[..., Any], model: nn.Module) -> LossTerms:
        """The terms of a loss for a model; raises where the model has a module `loss` with a state of its own."""
        held = distinct(held_by(loss), model)
        itself = next((value for path, value in held if not path and isinstance(value, nn.Module)), None)
        others = tree_of((path, value) for path, value in held if path)
        root = others if itself is None else itself
        places = [*borrowed((value for _, value in held), model), *([] if itself is None else moved(others, itself))]
        with swapped(places):
            name = next(state_names(root), None)
        if name is None:
            return cls()
        theirs = model._modules.get(LOSS)
        if theirs is not None and next(state_names(theirs), None) is not None:
            raise PlanError(
                f"the loss has a {LOSS}.{name}, and the model has a module {LOSS!r} of its own with a state, so that "
                f"names in a state dict could mean either: give the model's module another name"
            )
        return cls(root, model, places, True)

    def __bool__(self) -> bool:
        return self.some

    @contextmanager
    def alone(self) -> Generator[nn.Module]:
        """A block in which `root` has all that the loss brings along, and nothing of the model."""
        with swapped(self.places):
            yield self.root

    @contextmanager
    def attached(self) -> Generator[nn.Module]:
        """A block in which the model has the loss as its submodule `loss`, if that brings anything along."""
        places = [*self.places, (self.model._modules, LOSS, self.root)] if self else []
        with swapped(places):
            yield self.model

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters, each once."""
        with self.alone() as root:
            return list(root.named_parameters(LOSS))

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers, each once."""
        with self.alone() as root:
            return list(root.named_buffers(LOSS))

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        return [p for _, p in self.named_parameters()]

    def buffers(self) -> list[Tensor]:
        """The buffers, each once."""
        return [b for _, b in self.named_buffers()]

    def state_keys(self) -> list[str]:
        """The names of tensors in a state dict."""
        with self.alone() as root:
            return [f"{LOSS}.{key}" for key, value in root.state_dict().items() if isinstance(value, Tensor)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        with self.alone() as root:
            root.zero_grad(set_to_none)

    def settle(self, device: torch.device | None, mesh: Mesh) -> None:
        """Bring them to a device (None: where they are), with the values of rank 0 on every rank. Collective."""
        if self:
            with self.alone() as root:
                materialize(root, device, "the loss")
                share_from_first(root, mesh)


def distinct(held: Iterable[Held], model: nn.Module) -> list[Held]:
    """Modules and then tensors, without the model's, those inside another module of the list, and repetitions."""
    known, tensors = ids_of(model)
    found = list(held)
    modules = [(path, value) for path, value in found if isinstance(value, nn.Module)]
    inner = {id(m) for _, value in modules for m in value.modules() if m is not value}
    kept: list[Held] = [(path, value) for path, value in modules if id(value) not in known | inner]
    for _, value in kept:
        tensors |= ids_of(value)[1] if isinstance(value, nn.Module) else set()
    kept += [(path, value) for path, value in found if isinstance(value, Tensor) and id(value) not in tensors]
    return kept


def ids_of(module: nn.Module) -> tuple[set[int], set[int]]:
    """The identities of a module and all modules inside it, and of their tensors."""
    return {id(m) for m in module.modules()}, {id(t) for t in (*module.parameters(), *module.buffers())}


def tree_of(held: Iterable[Held]) -> nn.Module:
    """A module that holds modules and tensors at their paths; a name that is taken gets a number."""
    root, made = nn.Module(), set[int]()
    for path, value in held:
        node = root
        for name in path[:-1]:
            if id(node._modules.get(name)) not in made:
                name, child = unused(node, name), nn.Module()
                node._modules[name] = child
                made.add(id(child))
            node = node._modules[name] or node
        table: dict[str, Any] = node._modules if isinstance(value, nn.Module) else node._parameters
        table[unused(node, path[-1])] = value
    return root


def unused(node: nn.Module, name: str) -> str:
    """The name, or with a number that makes it one that the module does not have."""
    taken, number, free = {*node._modules, *node._parameters, *node._buffers}, 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def moved(tree: nn.Module, root: nn.Module) -> list[Place]:
    """Places in another module for what a module holds itself."""
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (tree._modules, root._modules),
        (tree._parameters, root._parameters),
    ]
    return [(there, unused(root, name), value) for here, there in tables for name, value in here.items()]


def borrowed(held: Iterable[nn.Module | Tensor], model: nn.Module) -> Iterator[Place]:
    """None for the places where modules hold modules or tensors of the model."""
    known, tensors = ids_of(model)
    outer = {id(m): m for value in held if isinstance(value, nn.Module) for m in value.modules()}
    for module in outer.values():
        if id(module) in known:
            continue
        tables: list[dict[str, Any]] = [module._modules, module._parameters, module._buffers]
        for table in tables:
            yield from ((table, key, None) for key, value in table.items() if id(value) in known | tensors)


@contextmanager
def swapped(places: Sequence[Place]) -> Generator[None]:
    """A block in which some entries of modules' dicts are replaced."""
    before = [(table, key, key in table, table.get(key)) for table, key, _ in places]
    try:
        for table, key, value in places:
            table[key] = value
        yield
    finally:
        for table, key, there, value in before:
            if there:
                table[key] = value
            else:
                del table[key]


def state_names(module: nn.Module) -> Iterator[str]:
    """The names of a module's parameters and buffers, and of modules that keep another state."""
    yield from (name for name, _ in module.named_parameters())
    yield from (name for name, _ in module.named_buffers())
    yield from keepers(module)


# -- the loss of a step in micro-batches -------------------------------------------------------------------------------


class StepLoss:
    """A loss that may be called several times in a step; each call finds what the first one found.

    Where calls leave something else in an attribute or a buffer of the loss, `PlanError` names it.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], function: Callable[..., Any], model: nn.Module):
        self.loss = loss
        own = {id(module) for module in model.modules()}
        found = [(".".join(map(str, path)), value) for path, value in held_by(function)]
        modules = {
            f"loss{'.' if path else ''}{path}{'.' if inner else ''}{inner}": module
            for path, value in found
            if isinstance(value, nn.Module)
            for inner, module in value.named_modules()
            if id(module) not in own
        }
        self.held = HeldState.by(modules) if modules else None
        self.left: dict[Name, Any] | None = None
        self.commons: Commons | None = None
        """What modules have in common when the first call begins, after the forward of its micro-batch."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss."""
        held = self.held
        self.commons = self.commons or Commons.of(() if held is None else held.modules.values())
        if held is not None:
            held.put_back()
        self.commons.put_back()
        value = self.loss(output, target)
        if held is None:
            return value
        changes = held.changes()
        self.left = changes if self.left is None else self.left
        check_left(self.left, changes)
        return value

"""The leaves of a loss's graph: each is a parameter whose gradient is averaged, an input, or refused by its name.

Backward adds to the gradient of an unknown leaf on each rank by itself. With several ranks that is a part of it, or a
multiple, and nothing adds up the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mural.engine.loss_variables import attributes, variables
from mural.engine.materialize import uncompiled
from mural.errors import MuralError, PlanError
from mural.shard import ShardedTensor


def leaves_of(loss: Tensor, stop: Iterable[Any] = ()) -> list[Tensor]:
    """The leaf tensors that backward of a loss adds gradients to, each once.

    Beyond the nodes in `stop` none is looked for, and what a reentrant checkpoint hides in its backward is not found.

    >>> weight = nn.Linear(2, 1).weight
    >>> [leaf is weight for leaf in leaves_of((weight * weight).sum())]
    [True]
    """
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    found: dict[int, Tensor] = {}
    seen, open_nodes = {*stop, loss.grad_fn}, [loss.grad_fn]
    while open_nodes:
        node: Any = open_nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                open_nodes.append(following)
    return list(found.values())


def check_leaves(
    loss: Tensor, inputs: Any, known: Iterable[Tensor], model: nn.Module, function: Callable[..., Any]
) -> None:
    """Raise for a leaf of the loss's graph that is neither a `known` tensor nor one of the inputs."""
    given = [t.carrier if isinstance(t, ShardedTensor) else t for t in pytree.tree_leaves(inputs)]
    tensors = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    allowed = {id(t) for t in (*known, *tensors)}
    for leaf in leaves_of(loss, [t.grad_fn for t in tensors if t.grad_fn is not None]):
        if id(leaf) not in allowed:
            raise PlanError(
                f"the loss depends on {named(leaf, model, function)}, which requires a gradient but is neither a "
                f"parameter of the model nor of the loss, so that each rank would keep a gradient of its own: register "
                f"it as an nn.Parameter of the model or of an nn.Module that is given as loss=, or detach it"
            )


def named(leaf: Tensor, model: nn.Module, function: Callable[..., Any]) -> str:
    """A leaf by the attribute or variable that holds it, or by its shape and type."""
    form = f"{tuple(leaf.shape)}, {leaf.dtype}"
    places = (*inside(model, "model"), *inside_loss(function, "loss"))
    name = next((name for name, value in places if value is leaf), "")
    return f"{name} ({form})" if name else f"a tensor ({form}) that no attribute of the model or the loss holds"


def inside(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    """What the modules in a module hold as attributes, and in lists, tuples and dicts among these."""
    for path, part in module.named_modules(prefix=prefix):
        for name, value in attributes(part):
            yield from contents(value, f"{path}.{name}")


def contents(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """A value, and what is in it if it is a list, tuple or dict."""
    yield name, value
    if isinstance(value, (list, tuple, dict)):
        yield from ((f"{name}.{key}", part) for key, part in variables(value, whole=False))


def inside_loss(function: Any, prefix: str, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """What a loss refers to, also by way of objects that it refers to."""
    function = uncompiled(function)
    if isinstance(function, nn.Module):
        yield from inside(function, prefix)
    elif depth:
        for name, value in (*variables(function, whole=False), *attributes(function)):
            path = f"{prefix}.{name}" if name else prefix
            yield path, value
            yield from inside_loss(value, path, depth - 1)


# -- parameters and buffers of other stages ----------------------------------------------------------------------------


class AbsentReads(TorchFunctionMode):
    """Notes the first tensor of a model that a call computes with, or copies, and that has no memory here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        every = (*model.named_parameters(), *model.named_buffers())
        self.absent = {id(tensor): name for name, tensor in every if tensor.is_meta}
        self.found: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        names = (self.absent.get(id(leaf)) for leaf in pytree.tree_leaves((args, kwargs or {})))
        name = next(filter(None, names), None)
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            self.found = self.found or name
            raise
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):  # what asks for a shape reads nothing
            self.found = self.found or name
        return result


@contextmanager
def naming_absent(loss: Callable[..., Any], model: nn.Module, given: tuple[Any, Any]) -> Generator[None]:
    """If a loss fails in the block because it reads a tensor that another stage holds, the error says which."""
    try:
        yield
    except MuralError:
        raise
    except Exception as error:
        check_present(loss, model, given, error)
        raise


def check_present(loss: Callable[..., Any], model: nn.Module, given: tuple[Any, Any], cause: Exception | None) -> None:
    """Raise where a loss reads a parameter or a buffer of another stage."""
    reads = AbsentReads(model)
    if not reads.absent:
        return
    with suppress(Exception), reads:
        loss(*given)
    if reads.found is not None:
        raise PlanError(
            f"the loss reads {reads.found}, which another stage holds: a term on parameters of all stages has no rank "
            f"that could compute it. Use the optimizer's weight_decay for a penalty, or one stage"
        ) from cause

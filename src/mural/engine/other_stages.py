"""Losses that read parameters of other stages: refused by the parameter's name."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mural.errors import MuralError, PlanError


class AbsentReads(TorchFunctionMode):
    """Notes the first tensor without memory that a call computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        result = func(*args, **(kwargs or {}))
        makes = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result))
        if self.found is None and makes:
            self.found = next((t for t in given if isinstance(t, nn.Parameter) and t.is_meta), None)
        return result


@contextmanager
def naming_absent(loss: Callable[..., Any], model: nn.Module, given: tuple[Any, Any]) -> Generator[None]:
    """Where a loss fails in the block, as it reads a parameter that another stage holds, the error says which."""
    try:
        yield
    except MuralError:
        raise
    except Exception as error:
        check_present(loss, model, given, error)
        raise


def check_present(loss: Callable[..., Any], model: nn.Module, given: tuple[Any, Any], cause: Exception | None) -> None:
    """Raise where a loss reads a parameter of another stage."""
    if not any(p.is_meta for p in model.parameters()):
        return
    with suppress(Exception), AbsentReads() as reads:
        loss(*given)
    if reads.found is not None:
        name = next((name for name, p in model.named_parameters() if p is reads.found), "a parameter")
        raise PlanError(
            f"the loss reads {name}, which another stage holds: a term on parameters of all stages has no rank that "
            f"could compute it. Use the optimizer's weight_decay for a penalty, or one stage"
        ) from cause

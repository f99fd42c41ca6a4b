"""The first module whose values differ: the case again, with the results of all modules next to the model's own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mural.check.compared_case import Case
from mural.check.comparison import Comparison, Row
from mural.check.copies import copied
from mural.engine import Loss
from mural.errors import PeerError

MODULES = "modules"


def first_different_module(case: Case, found: Comparison) -> str:
    """The module whose values are the first to differ, in words: forward, then its gradients backward. Collective."""
    names = [name for name, _ in case.model.named_modules() if name]
    kinds = {name: type(module).__name__ for name, module in case.model.named_modules()}
    wrong = [row for row in forward_rows(case) if row.differs]
    order = {name: number for number, name in enumerate(names)}
    if wrong:
        first = min(wrong, key=lambda row: int(row.name.split("[")[2].split("]")[0]))
        name = first.name.split("'")[1] if "'" in first.name else ""
        return f"The first module whose values differ is {name or 'the model'} ({kinds.get(name, '')}), in forward"
    gradients = [row for row in found.rows if row.differs and row.kind == "gradient"]
    if gradients:
        last = max(gradients, key=lambda row: order.get(row.name.rpartition(".")[0], -1))
        owner = last.name.rpartition(".")[0]
        return (
            f"The first module whose values differ is {owner or 'the model'} ({kinds.get(owner, 'a loss')}): the "
            f"gradient of {last.name}, in backward"
        )
    buffers = [row for row in found.rows if row.differs and row.kind == "buffer"]
    if buffers:
        first = min(buffers, key=lambda row: order.get(row.name.rpartition(".")[0], -1))
        return f"The first module whose values differ is {first.name.rpartition('.')[0]}: its buffer {first.name}"
    return "The results of all modules are the same: it is the loss that differs"


def forward_rows(case: Case) -> list[Row]:
    """The differences of all modules' results; none where the model cannot be run in this way. Collective."""
    try:
        model, loss = copied(case.model, case.loss)
        telling(model)
        told = replace(case, model=model, loss=partial(of_result, loss), steps=1)
        return [row for row in told.rows() if row.kind == "output" and row.name.startswith(f"['{MODULES}']")]
    except PeerError:
        raise
    except Exception:  # what is told of the modules helps, and is not what failed
        return []


def of_result(loss: Loss, result: Any, target: Any) -> Tensor:
    """The loss of the model's own result."""
    return loss(result["result"], target)


def telling(model: nn.Module) -> None:
    """Have a model return the tensors that its modules return, in order, next to its own result."""
    kind = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with listening(self) as heard:
            result = kind.forward(self, *args, **kwargs)
        return {"result": result, MODULES: heard}

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@contextmanager
def listening(model: nn.Module) -> Generator[list[Any]]:
    """A block in which the tensors that modules return are noted, each under the module's name."""
    heard = list[Any]()

    def note(name: str, _: nn.Module, __: Any, result: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        heard.append({name: [t for t in tensors if t.is_floating_point() or t.dtype == torch.int64]})

    handles = [m.register_forward_hook(partial(note, name)) for name, m in model.named_modules() if name]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()

"""The first module whose values differ: the case again, with the results of all modules next to the model's own."""

from __future__ import annotations

import re
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
from mural.check.leaves import gap, kept, largest, leaves, matching
from mural.check.plain_run import device_of
from mural.comm.failure.agree import gather
from mural.engine import Loss
from mural.engine.applied_plan import apply_plan
from mural.errors import PeerError
from mural.shard.generators import generators_kept

MODULES = "modules"
PLACE = re.compile(rf"\['{MODULES}'\]\[(\d+)\]\['(.*?)'\]")
"""The place of a module's result in what a model returns that tells of its modules: its number, and its name."""
APART = 1e-4
"""How far results may be apart that are not compared with what rounding does, relative to the largest entry."""


def first_different_module(case: Case, found: Comparison) -> str:
    """The module whose values are the first to differ, in words: forward, then its gradients backward. Collective."""
    kinds = {name: type(module).__name__ for name, module in case.model.named_modules()}
    order = {name: number for number, name in enumerate(kinds)}

    def words(module: str, how: str) -> str:
        called = f"{module} ({kinds.get(module, 'of the loss')})" if module else "the model itself"
        return f"The first module whose values differ is {called}: {how}"

    def owner(row: Row) -> str:
        return row.name.rpartition(".")[0]

    wrong = [place for place in map(PLACE.match, (row.name for row in forward_rows(case) if row.differs)) if place]
    if wrong:
        return words(min(wrong, key=lambda place: int(place[1]))[2], "what it returns, in forward")
    gradients = [row for row in found.rows if row.differs and row.kind == "gradient"]
    if gradients:
        last = max(gradients, key=lambda row: order.get(owner(row), len(order)))
        return words(owner(last), f"the gradient of {last.name}, in backward")
    buffers = [row for row in found.rows if row.differs and row.kind == "buffer"]
    if buffers:
        first = min(buffers, key=lambda row: order.get(owner(row), len(order)))
        return words(owner(first), f"its buffer {first.name}")
    return "What all modules return is the same: it is the loss that differs"


def forward_rows(case: Case) -> list[Row]:
    """The differences of all modules' results; none where the model cannot be run in this way. Collective."""
    try:
        model, loss = copied(case.model, case.loss)
        telling(model)
        told = replace(case, model=model, loss=partial(of_result, loss), steps=1)
        return streamed_rows(told) if case.plan.stream is not None else [r for r in told.rows() if r.kind == "output"]
    except PeerError:
        raise
    except Exception:  # what is told of the modules helps, and is not what failed
        return []


def streamed_rows(case: Case) -> list[Row]:
    """The differences of all modules' results, of a plan whose tiles are not put together in a step. Collective."""
    images = case.image if isinstance(case.image, tuple) else (case.image,)
    device = device_of(case.model)
    with torch.no_grad(), generators_kept(device):
        plain = {place: kept(value) for place, value in leaves(copied(case.model, case.loss)[0](*images))}
        divided = apply_plan(case.model, case.plan, case.loss, mesh=case.mesh, image=case.extents)
        there = dict(leaves(divided(case.image)))
    rows = list[Row]()
    for place, whole in plain.items():
        size = largest(whole) or 1.0
        rows.append(Row("output", place, 0, gap(*matching(there.get(place), whole, None)).size / size, APART))
    found = gather(case.mesh, rows, "modules").values()
    return [max(of_place, key=lambda row: row.difference) for of_place in zip(*found, strict=True)]


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

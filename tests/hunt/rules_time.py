"""Cases in time: the call on micro-batches of a batch, and on tiles of an image that is streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import mural
from hunt.rules_case import Job
from hunt.rules_draw import Draw
from hunt.rules_forms import Run
from hunt.rules_ranks import (
    Skipped,
    Wrong,
    check_gradients,
    check_tensor,
    check_values,
    describe,
    gradients,
    is_unset,
    leaf,
    leaves_of,
)  # fmt: skip
from mural.engine.microbatches import rows_of
from mural.shard.in_time import batch_dim, lifted, lowered, rows_of_batch


@cache
def one_rank() -> mural.Mesh:
    """A mesh of this process alone."""
    return mural.init()


# --- micro-batches --------------------------------------------------------------------------------------------------


def in_microbatches(job: Job, expected: Any) -> Any:
    """The call on each micro-batch, put together and compared with plain torch."""
    case, run, tensors = job.case, job.run, job.tensors
    draw = Draw(f"microbatches {case.place.seed}")
    leads = [t for t in tensors if case.place.fits(t)]
    images = leads[0].shape[0]
    batched = [t.ndim > 0 and t.shape[0] == images and (t is leads[0] or draw.of(True, True, False)) for t in tensors]
    inputs = [leaf(t) for t in tensors]
    every = rows_of(images, draw.of(2, 2, 3))
    parts: list[Any] = []
    for number, rows in enumerate(every):
        given = [
            lifted(mural.shard(t[rows.start : rows.stop], one_rank(), dims=()), number, every) if cut else t
            for t, cut in zip(inputs, batched, strict=True)
        ]
        torch.manual_seed(case.place.seed)
        with rows_of_batch(rows):
            result = run(given)
            parts.append([(x, batch_dim(x)) for x in leaves_of(result)])
    result = joined(parts, is_unset(case))
    if isinstance(expected, Exception):
        return describe(result)
    check_values(case, result, expected[0])
    if expected[1] is not None and (found := gradients(result, inputs)) is not None:
        check_gradients(job, found, expected[1], expected[0])
    return None


def joined(parts: Sequence[Any], unset: bool) -> list[Any]:
    """The results of all micro-batches: images one after the other; what all of them hold whole has to be the same."""
    found: list[Any] = []
    for pieces in zip(*parts, strict=True):
        values, dims = zip(*pieces, strict=True)
        if not isinstance(values[0], Tensor):
            if any(v != values[0] and v == v for v in values):
                raise Wrong(f"micro-batches give {values}")
            found.append(values[0])
            continue
        if dims[0] is not None:
            full = [lowered(v).full() for v in values]
            found.append(torch.cat(full, dims[0]))
            continue
        full = [v.full() if isinstance(v, mural.ShardedTensor) else v for v in values]
        for other in full[1:]:
            check_tensor(other, full[0].detach(), "a whole result of another micro-batch", unset, 1e-10)
        found.append(sum(full[1:], full[0]) / len(full) if full[0].is_floating_point() else full[0])
    return found


# --- tiles ----------------------------------------------------------------------------------------------------------


class Called(nn.Module):
    """A call on an image, with its other tensors as parameters and buffers."""

    def __init__(self, run: Run, tensors: Sequence[Tensor], lead: int):
        super().__init__()
        self.run, self.lead = run, lead
        self.scale = nn.Parameter(torch.ones((), dtype=tensors[lead].dtype))
        for number, tensor in enumerate(tensors):
            if number == lead:
                continue
            if tensor.is_floating_point():
                self.register_parameter(f"t{number}", nn.Parameter(tensor.detach().clone()))
            else:
                self.register_buffer(f"t{number}", tensor.detach().clone())
        self.count = len(tensors)

    def forward(self, image: Tensor) -> Any:
        given = [image * self.scale if i == self.lead else getattr(self, f"t{i}") for i in range(self.count)]
        result = self.run(given)
        found = tuple(leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor))
        return found[0] if len(found) == 1 else found


def uneven(result: Any, target: Any) -> Tensor:
    """A loss in which all floating results matter, each otherwise."""
    total: Any = 0.0
    for number, tensor in enumerate(leaves_of(result)):
        if tensor.is_floating_point():
            total = total + (tensor * tensor * (0.5 + number) + tensor).mean()
    return total


def in_tiles(job: Job, expected: Any) -> Any:
    """A model of that call, streamed, compared with itself without a plan: loss, gradients, and results."""
    case, run, tensors = job.case, job.run, job.tensors
    draw = Draw(f"tiles {case.place.seed}")
    if job.drawn:
        raise Skipped("it draws")
    lead = next(i for i, t in enumerate(tensors) if case.place.fits(t))
    image = tensors[lead]
    tile = tuple(max(1, draw.int(n // 3, n // 2 + 1)) for n in image.shape[2:])
    if isinstance(expected, Exception):
        raise Skipped("torch refuses it")
    model = Called(run, tensors, lead)
    streamed = Called(run, tensors, lead)
    plain_image = image.clone().requires_grad_()
    try:
        loss = uneven(model(plain_image), None)
        loss.backward()
    except Exception as error:
        raise Skipped("torch has no gradient for it") from error
    parallel = mural.parallelize(streamed, mural.Plan(stream=tile), loss=uneven)
    ours = image.clone().requires_grad_()
    got = parallel.step(ours, torch.zeros(len(image), dtype=torch.float64))
    check_tensor(got.detach(), loss.detach(), "the loss", False, 1e-10)
    named, learned = dict(model.named_parameters()), dict(streamed.named_parameters())
    given = {i: (named[f"t{i}"].grad, learned[f"t{i}"].grad) for i in range(len(tensors)) if f"t{i}" in named}
    given[lead] = (plain_image.grad, ours.grad)
    some = replace(job, tensors=tuple(tensors[i] for i in given))
    check_gradients(some, [q for _, q in given.values()], [p for p, _ in given.values()], expected[0])
    with torch.no_grad():
        found = parallel(image)
        found = pytree.tree_map(lambda t: t.full() if isinstance(t, mural.ShardedTensor) else t, found)
        check_values(case, found, model(image))
    return None

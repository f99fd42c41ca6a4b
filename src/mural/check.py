"""`check` runs a plan and plain autograd side by side, and says how far apart they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.comm import Mesh
from mural.comm.agree import greatest, together
from mural.engine import Loss, Parallel, share_from_first
from mural.engine.microbatches import part_of, rows_of
from mural.parallelize import mesh_of, parallelize
from mural.plan import Plan
from mural.shard import ShardedTensor
from mural.shard.channel_share import share_of
from mural.shard.rows import Rows


def check(
    model: nn.Module,
    plan: Plan,
    image: Tensor,
    target: Any,
    loss: Loss = F.cross_entropy,
    *,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """The largest relative difference of "output", "loss", "gradients" and "buffers" between the plan and one device.

    Every rank runs the whole model on the whole image too, so it has to fit; neither run changes the model. Where
    the model draws random numbers, the one device is a mesh of one rank. Collective.

    >>> found = check(nn.Conv2d(3, 2, 3), Plan(), torch.zeros(1, 3, 8, 8), torch.zeros(1, 6, 6).long())
    >>> max(found.values()) == 0.0
    True
    """
    plan.check_runnable()
    mesh = mesh_of(plan) if mesh is None else mesh
    share_from_first(model, mesh)
    with together(mesh, "the run on one device"):
        alone = one_device(deepcopy(model), plan, loss, image, target, mesh)
    divided = parallelize(deepcopy(model), plan, loss, mesh=mesh, image=tuple(image.shape[1:]))
    outputs: list[Any] = []
    divided.observe = outputs.append
    value = divided.step(image, target)
    found = {"output": parted(outputs, alone["output"]), "loss": apart(value, alone["loss"])}
    grads = [apart(p.grad, held(alone["gradients"][name], p)) for name, p in divided.named_parameters()]
    found["gradients"] = max(grads, default=0.0)
    buffers = dict(divided.named_buffers())
    found["buffers"] = max((apart(buffer, alone["buffers"][name]) for name, buffer in buffers.items()), default=0.0)
    worst = greatest(mesh, torch.tensor(list(found.values()), dtype=torch.float64), "check")
    return dict(zip(found, worst.tolist(), strict=True))


def held(whole: Tensor | None, parameter: nn.Parameter) -> Tensor | None:
    """What a rank holds of a parameter's tensor: all, or its share."""
    share = share_of(parameter)
    return whole if share is None or whole is None else share.cut(whole)


def parted(outputs: list[Any], whole: Any) -> float:
    """The difference of the results of micro-batches from that of the batch, on the ranks that have them."""
    if not outputs:
        return 0.0
    if not isinstance(whole, Tensor) or len(outputs) == 1:
        return apart(outputs[0], whole)
    full = [output.full() if isinstance(output, ShardedTensor) else output for output in outputs]
    bounds = list(accumulate((len(output) for output in full), initial=0))
    return max(apart(output, whole[a:b]) for output, a, b in zip(full, bounds, bounds[1:], strict=False))


def one_device(
    model: nn.Module, plan: Plan, loss: Loss, image: Tensor, target: Any, mesh: Mesh, seed: int = 0
) -> dict[str, Any]:
    """What plain autograd gives: output, loss, gradients and buffers."""
    fresh, before = deepcopy(model), torch.get_rng_state()
    parts = rows_of(len(image), plan.microbatches if plan.batchnorm == "micro" else 1)
    found = plain(model, loss, image, target, parts)
    if torch.equal(torch.get_rng_state(), before):
        return found
    torch.set_rng_state(before)
    single = Parallel(fresh, Plan(precision=plan.precision), mesh.alone(data_only=False), loss, seed)
    outputs: list[Any] = []
    single.observe = outputs.append
    value = single.step(image, target)
    return results(fresh, outputs[0], value)


def plain(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], image: Tensor, target: Any, parts: Sequence[Rows]
) -> dict[str, Any]:
    """One step of plain autograd, over all images at once or in parts whose losses count by their images."""
    outputs: list[Any] = []
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        output = model(part_of(image, rows))
        value = loss(output, part_of(target, rows)) * (rows.count / rows.total)
        value.backward()
        outputs.append(output)
        total += value.detach().double().cpu()
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return results(model, joined, total)


def results(model: nn.Module, output: Any, value: Tensor) -> dict[str, Any]:
    """What a step left, by name."""
    return {
        "output": output,
        "loss": value.detach(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


def apart(mine: Any, other: Any) -> float:
    """The largest difference relative to the largest value; infinite where only one of them is there."""
    if isinstance(mine, ShardedTensor):
        mine = mine.full()
    if isinstance(other, ShardedTensor):
        other = other.full()
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        return 0.0 if type(mine) is type(other) else float("inf")
    if mine.shape != other.shape:
        return float("inf")
    if not mine.numel():
        return 0.0
    a, b = mine.detach().double().cpu(), other.detach().double().cpu()
    scale = b.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float((a - b).abs().max() / scale)

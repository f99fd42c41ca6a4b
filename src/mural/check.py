"""`check` runs a plan and plain autograd side by side, and says how far apart they are."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.comm import Mesh, init
from mural.comm.agree import together
from mural.engine import Loss, Parallel, share_from_first
from mural.parallelize import parallelize
from mural.plan import Plan
from mural.shard import ShardedTensor


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
    mesh = init(spatial=plan.spatial or None, data=plan.data) if mesh is None else mesh
    share_from_first(model, mesh)
    divided = parallelize(deepcopy(model), plan, loss, mesh=mesh)
    with together(mesh, "the run on one device"):
        alone = one_device(deepcopy(model), divided, image, target, mesh)
    divided.calls = 0
    outputs: list[Any] = []
    hook = divided.module.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    value = divided.step(image, target)
    hook.remove()
    found = {"output": apart(outputs[0], alone["output"]), "loss": apart(value, alone["loss"])}
    grads = {name: p.grad for name, p in divided.named_parameters()}
    found["gradients"] = max((apart(grads[name], grad) for name, grad in alone["gradients"].items()), default=0.0)
    buffers = dict(divided.named_buffers())
    found["buffers"] = max((apart(buffers[name], value) for name, value in alone["buffers"].items()), default=0.0)
    return found


def one_device(model: nn.Module, like: Parallel, image: Tensor, target: Any, mesh: Mesh) -> dict[str, Any]:
    """What plain autograd gives: output, loss, gradients and buffers."""
    fresh, before = deepcopy(model), torch.get_rng_state()
    found = plain(model, like.loss, image, target)
    if torch.equal(torch.get_rng_state(), before):
        return found
    torch.set_rng_state(before)
    plan = Plan(precision=like.plan.precision)
    single = Parallel(fresh, plan, mesh.alone(data_only=False), like.loss, like.seed)
    outputs: list[Any] = []
    fresh.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    value = single.step(image, target)
    return results(fresh, outputs[0], value)


def plain(model: nn.Module, loss: Callable[[Any, Any], Tensor], image: Tensor, target: Any) -> dict[str, Any]:
    """One step of plain autograd."""
    output = model(image)
    value = loss(output, target)
    value.backward()
    return results(model, output, value)


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

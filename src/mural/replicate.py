"""Gradients of replicated parameters: their mean over data × spatial is the single-device gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mural.comm import Mesh

BUCKET_BYTES = 32 * 2**20


def reduce_gradients(model: nn.Module | Iterable[Tensor], mesh: Mesh) -> None:
    """Make every parameter's `.grad` the single-device gradient, on every rank; calling it twice changes nothing.

    The loss is the same number on every rank, and each rank differentiates its own copy; so the mean over
    the ranks is exact for sharded and for replicated parts of the model alike. Collective.
    """
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    wanted = [p for p in parameters if p.requires_grad and not is_reduced(p.grad)]
    if mesh.replicas > 1:
        wanted = present_somewhere(wanted, mesh)
        for bucket in buckets(wanted):
            flat = torch.cat([grad_of(p).reshape(-1) for p in bucket])
            dist.all_reduce(flat, group=mesh.transport.group)
            flat /= mesh.replicas
            offset = 0
            for p in bucket:
                grad = grad_of(p)
                grad.copy_(flat[offset : offset + grad.numel()].view(grad.shape))
                offset += grad.numel()
    for p in wanted:
        if p.grad is not None:
            p.grad._mural_version = p.grad._version  # type: ignore[attr-defined]


def is_reduced(grad: Tensor | None) -> bool:
    """Whether this gradient was reduced and nothing was added since."""
    return grad is not None and getattr(grad, "_mural_version", None) == grad._version


def grad_of(parameter: Tensor) -> Tensor:
    """The gradient, made of zeros where this rank's graph did not reach the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def present_somewhere(parameters: list[Tensor], mesh: Mesh) -> list[Tensor]:
    """The parameters that have a gradient on some rank."""
    if not parameters:
        return []
    flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.transport.group)
    return [p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag]


def buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one type and device in groups of limited size, in order."""
    current: list[Tensor] = []
    size = 0
    for p in parameters:
        width = p.numel() * p.element_size()
        if current and (size + width > BUCKET_BYTES or p.dtype != current[0].dtype or p.device != current[0].device):
            yield current
            current, size = [], 0
        current.append(p)
        size += width
    if current:
        yield current

"""Gradients of replicated parameters: their mean over the ranks that hold them is the single-device gradient."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mural.channel.share import share_of, shares_among
from mural.comm import Transport
from mural.errors import LayoutError
from mural.gradients.fibres import REPLICAS, group_of
from mural.gradients.waiting import wait_for
from mural.ranks import Mesh

BUCKET_BYTES = 32 * 2**20


def reduce_gradients(model: nn.Module | Iterable[Tensor], mesh: Mesh) -> None:
    """Make every parameter's `.grad` the single-device gradient, on every rank; calling it twice changes nothing.

    The loss is the same number on every rank, and each rank differentiates its own copy; so the mean over
    the ranks is exact for sharded and for replicated parts of the model alike. Parameters that are split by channels
    are averaged over the ranks that hold the same share. Collective.
    """
    parameters = [p for p in (model.parameters() if isinstance(model, nn.Module) else model) if p.requires_grad]
    with mesh.transport.meeting("gradients"):
        if mesh.replicas > 1:
            average_gradients([p for p in parameters if share_of(p) is None], mesh.transport.group, mesh.replicas)
        shares = shares_among(parameters)
        group = group_of(shares[0][1].mesh, REPLICAS) if shares else None
        if group is not None:
            average_gradients([p for p, _ in shares], group, group.size())
    for p in parameters:
        if p.grad is not None:
            mark_reduced(p.grad)


def average_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup | None, ranks: int) -> None:
    """Make gradients that were not averaged yet their mean over the ranks of a group."""
    check_same(parameters, group, "reduce_gradients")
    for bucket in buckets(wanted_somewhere(parameters, group)):
        flat = torch.cat([grad_of(p).reshape(-1) for p in bucket])
        dist.all_reduce(flat, group=group)
        flat /= ranks
        offset = 0
        for p in bucket:
            grad = grad_of(p)
            grad.copy_(flat[offset : offset + grad.numel()].view(grad.shape))
            offset += grad.numel()


def mark_reduced(grad: Tensor, axes: Sequence[str] = REPLICAS) -> None:
    """Note that a gradient is the mean over those axes now; whatever is added to it later changes its version."""
    grad._mural_reduced = (grad._version, frozenset(axes))  # type: ignore[attr-defined]


def is_reduced(grad: Tensor | None, axes: Sequence[str] = REPLICAS) -> bool:
    """Whether this gradient was reduced over at least those axes and nothing was added since."""
    version, reduced = getattr(grad, "_mural_reduced", (None, frozenset[str]()))
    return grad is not None and version == grad._version and reduced.issuperset(axes)


def grad_of(parameter: Tensor) -> Tensor:
    """The gradient, made of zeros where this rank's graph did not reach the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def check_same(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None, name: str, transport: Transport | None = None
) -> None:
    """Raise on every rank of a group if the ranks brought different lists of tensors.

    By a `transport`, a rank hears of one that raised and does not come.
    """
    code = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode())
    device = tensors[0].device if tensors else torch.device("cpu")
    both = torch.tensor([code, -code, len(tensors), -len(tensors)], device=device)
    work: Any = dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group, async_op=True)
    if transport is None:
        work.wait()
    else:
        wait_for(work, transport, name)
    if both[0] != -both[1] or both[2] != -both[3]:
        raise LayoutError(
            f"{name} got different parameters on different ranks (here {len(tensors)}, elsewhere {int(-both[3])} to "
            f"{int(both[2])}, or of other shapes): give every rank the same model"
        )


def wanted_somewhere(parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """The parameters that have a gradient on some rank that was not reduced yet."""
    if not parameters:
        return []
    fresh = [p.grad is not None and not is_reduced(p.grad) for p in parameters]
    flags = torch.tensor(fresh, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
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

"""Tensors and values of one rank, on every rank of a run: of any type, whatever their strides."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mural.channel.share import share_of
from mural.ranks import Mesh


def shared(value: Tensor, mesh: Mesh, owner: int) -> Tensor:
    """A rank's tensor on every rank, contiguous; each gives one of its shape and type. Collective.

    Bytes travel, since no backend knows every type. One that a rank has on meta arrives on its CPU. The owner gets
    its own tensor back, if that is contiguous.
    """
    home = torch.device("cpu") if value.is_meta else value.device
    if mesh.rank == owner or mesh.world == 1:
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
    else:
        plain = torch.empty(value.shape, dtype=value.dtype, device=home)
    if mesh.world == 1 or not plain.numel():
        return plain
    sent = mesh.transport.in_common(plain.reshape(-1).view(torch.uint8))
    with mesh.transport.meeting("state"):
        dist.broadcast(sent, src=owner, group=mesh.transport.group)
    return sent.to(home).view(plain.dtype).view(plain.shape)


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor other values, in place; one that was expanded has each of its places in memory written once."""
    narrow, given = compact(tensor), values
    for dim, extent in enumerate(narrow.shape):
        given = given.narrow(dim, 0, extent)
    narrow.copy_(given)


def compact(tensor: Tensor) -> Tensor:
    """The tensor with one entry along each dim that was expanded."""
    for dim, (extent, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if extent > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def host_memory(tensor: Tensor) -> Tensor:
    """New memory on the CPU for a tensor's values, with its strides, or without gaps where it has some."""
    return torch.empty_like(compact(tensor.detach()), device="cpu").expand(tensor.shape)


def share_from_first(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank the parameters and buffers of rank 0; those that are split stay. Collective."""
    if mesh.world == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if share_of(tensor) is None:
            values = shared(tensor, mesh, 0)
            if mesh.rank != 0:
                fill(tensor, values)

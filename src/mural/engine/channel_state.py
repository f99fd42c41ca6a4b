"""The state of a model whose layers are split by channels, as that of the whole model; and norms over all shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mural.comm import Mesh, stack
from mural.comm.agree import together
from mural.shard.channel_share import share_of


def joined_state(model: nn.Module, *, wanted: bool) -> dict[str, Any]:
    """The unsplit model's state on the CPU; where it is not `wanted`, nothing. Collective."""
    found: dict[str, Any] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        share = share_of(value)
        whole = value if share is None else share.whole(value)
        if wanted:
            found[key] = whole.detach().to("cpu", copy=True) if isinstance(whole, Tensor) else whole
    return found


def load_joined(model: nn.Module, state: Mapping[str, Any], mesh: Mesh, strict: bool, rank0: bool) -> None:
    """Take over the unsplit model's state: each rank its shares of rank 0's. Collective."""
    own = {k: v for k, v in model.state_dict(keep_vars=True).items() if share_of(v) is not None}
    with together(mesh, "load_state_dict"):
        if not rank0 or mesh.rank == 0:
            model.load_state_dict(cut_state(state, own), strict=strict)
    told: list[Any] = [[key for key in own if key in state]]
    if mesh.world > 1:
        dist.broadcast_object_list(told, src=0, group=mesh.transport.group)
    for key in told[0]:
        share = share_of(own[key])
        if share is not None:
            given = state[key] if mesh.rank == 0 else torch.empty(share.shape)
            whole = mesh.transport.outbound(given.detach().to(own[key].device, own[key].dtype).contiguous())
            if mesh.world > 1:
                dist.broadcast(whole, src=0, group=mesh.transport.group)
            with torch.no_grad():
                own[key].copy_(share.cut(whole))
    share_from_first(model, mesh)


def cut_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A whole model's state with this rank's shares in the place of what is split."""
    found = dict(state)
    for key, parameter in own.items():
        share, given = share_of(parameter), found.get(key)
        if share is None or not isinstance(given, Tensor):
            continue
        if tuple(given.shape) != share.shape:
            raise RuntimeError(f"size mismatch for {key}: {tuple(given.shape)} was given, the model has {share.shape}.")
        found[key] = share.cut(given)
    return found


def share_from_first(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank the parameters and buffers of rank 0; those that are split stay."""
    if mesh.world == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if share_of(tensor) is not None:
                continue
            sent = mesh.transport.outbound(tensor.detach().contiguous())
            dist.broadcast(sent, src=0, group=mesh.transport.group)
            tensor.copy_(sent)


@torch.no_grad()
def clip_shared(parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
    """The norm of the whole gradient, scaled down where it is larger than `max_norm`. Collective over channels."""
    held = [(p.grad, share_of(p)) for p in parameters if p.grad is not None]
    mesh = next(share.mesh for p in parameters if (share := share_of(p)) is not None)
    device = parameters[0].device
    split = total_norm([g for g, share in held if share is not None], norm_type, device)
    rows = stack(split.view(1), mesh.peers(("channel",)), mesh.rank, mesh.transport, "norm of gradients")
    whole = total_norm([g for g, share in held if share is None], norm_type, device)
    norm = torch.linalg.vector_norm(torch.cat([rows.view(-1), whole.view(1)]), norm_type)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def total_norm(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all these gradients as one vector."""
    return nn.utils.get_total_norm(grads, norm_type).to(device) if grads else torch.zeros((), device=device)

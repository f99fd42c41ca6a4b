"""The state of a model whose layers are split by channels, as that of the whole model; and norms over all shares."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from mural.channel.share import share_of, shares_among
from mural.comm import stack
from mural.comm.failure.agree import together
from mural.engine.extra_state import fill, load_from_first, set_extra, share_from_first, shared
from mural.engine.whole_state import released, substituted
from mural.ranks import Mesh


def joined_state(model: nn.Module, *, wanted: bool) -> dict[str, Any]:
    """The unsplit model's state on the CPU; where it is not `wanted`, nothing. Collective."""
    with whole_parameters(model, wanted=wanted) as wholes:
        state = model.state_dict(keep_vars=True) if wanted else {}
    return released(state, {id(whole) for whole in wholes.values()})


def load_joined(model: nn.Module, state: Mapping[str, Any], mesh: Mesh, strict: bool, rank0: bool) -> _IncompatibleKeys:
    """Take over the unsplit model's state: each rank its shares of rank 0's. Collective."""
    extra: dict[str, Any] = {}
    with whole_parameters(model, wanted=not rank0 or mesh.rank == 0) as wholes:
        if rank0:
            keys, extra = load_from_first(model, state, mesh, strict)
        else:
            with together(mesh, "load_state_dict"):
                keys = model.load_state_dict(state, strict=strict)
    for parameter, share in shares_among(model.parameters()):
        mine = wholes[id(parameter)] if mesh.rank == 0 else share.without_memory(parameter)
        fill(parameter, share.cut(shared(mine, mesh, 0)))
    share_from_first(model, mesh)
    set_extra(model, extra, mesh)
    return keys


@contextmanager
def whole_parameters(model: nn.Module, *, wanted: bool) -> Generator[dict[int, nn.Parameter]]:
    """Whole parameters on the CPU, which replace the shares inside the block, by the identity of the shares.

    So torch's own `state_dict` and `load_state_dict` see the unsplit model, and a module's hooks on them, too. Where
    they are not `wanted`, the rank only gives its parts. Collective.
    """
    wholes: dict[int, nn.Parameter] = {}
    for parameter, share in shares_among(model.parameters()):
        whole = share.whole(parameter)
        if wanted:
            wholes[id(parameter)] = nn.Parameter(whole.cpu(), parameter.requires_grad)
    with substituted(model, wholes):
        yield wholes


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

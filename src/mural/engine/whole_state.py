"""The state of the whole model, from ranks that hold parts of it, and back to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mural.comm import Mesh
from mural.comm.agree import together
from mural.engine.division import Division


@dataclass(frozen=True)
class WholeState:
    """A model of which each rank of a run holds the parameters and buffers that its division says."""

    model: nn.Module
    division: Division
    mesh: Mesh

    def gathered(self, rank0: bool) -> dict[str, Any]:
        """The unsplit model's state on the CPU, on every rank or, with `rank0`, on rank 0 alone. Collective."""
        first = self._first_names()
        found: dict[str, Any] = {}
        known: dict[str, Tensor] = {}
        wanted = not rank0 or self.mesh.rank == 0
        for key, value in self.model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor) or id(value) not in first:
                found[key] = value
                continue
            name = first[id(value)]
            if name not in known:
                known[name] = self._whole(value, self.division.holders[name][0])
            if wanted:
                found[key] = known[name] if not any(known[name] is v for v in found.values()) else known[name].clone()
            else:
                known[name] = known[name][:0] if known[name].ndim else known[name]
        return found if wanted else {}

    def _first_names(self) -> dict[int, str]:
        named = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        return {id(t): name for name, t in reversed(named)}

    def _whole(self, tensor: Tensor, owner: int) -> Tensor:
        """A tensor that one rank has, on every rank's CPU."""
        mine = self.mesh.rank == owner
        value = tensor.detach().to("cpu", copy=True) if mine else torch.empty(tensor.shape, dtype=tensor.dtype)
        if self.mesh.world > 1:
            sent = self.mesh.transport.outbound(value)
            dist.broadcast(sent, src=owner, group=self.mesh.transport.group)
            value = sent.cpu()
        return value

    def load(self, state: Mapping[str, Any], strict: bool, rank0: bool) -> None:
        """Take over the unsplit model's state; with `rank0`, the one that rank 0 gives. Collective."""
        first = self._first_names()
        own = {k: v for k, v in self.model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
        giver = self.mesh.rank == 0 or not rank0
        with together(self.mesh, "load_state_dict"):
            if giver:
                check_state(state, own, strict)
        for key, tensor in own.items():
            given = state[key] if giver and key in state else None
            if rank0:
                given = self._whole(tensor if given is None else given, 0) if self._known(state, key) else None
            if given is not None and self.division.holds(first[id(tensor)]):
                with torch.no_grad():
                    tensor.copy_(given)

    def _known(self, state: Mapping[str, Any], key: str) -> bool:
        """Whether rank 0 gives a value for a key."""
        flag = torch.tensor([float(self.mesh.rank == 0 and key in state)])
        if self.mesh.world > 1:
            flag = self.mesh.transport.outbound(flag)
            dist.broadcast(flag, src=0, group=self.mesh.transport.group)
        return bool(flag[0] > 0)


def check_state(state: Mapping[str, Any], own: Mapping[str, Tensor], strict: bool) -> None:
    """Raise unless a state fits the model, as torch does."""
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    faults: list[str] = []
    if strict and missing:
        faults.append(f"Missing key(s) in state_dict: {', '.join(map(repr, missing))}.")
    if strict and unexpected:
        faults.append(f"Unexpected key(s) in state_dict: {', '.join(map(repr, unexpected))}.")
    for key, tensor in own.items():
        given = state.get(key)
        if isinstance(given, Tensor) and given.shape != tensor.shape:
            faults.append(
                f"size mismatch for {key}: {tuple(given.shape)} was given, the model has {tuple(tensor.shape)}."
            )
    if faults:
        raise RuntimeError("Error(s) in loading state_dict:\n\t" + "\n\t".join(faults))

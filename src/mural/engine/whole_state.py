"""The state of the whole model, from ranks that hold parts of it, and back to them."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from mural.comm.failure.agree import together
from mural.engine.division import Division
from mural.engine.extra_state import (
    compact,
    extra_of_owners,
    fill,
    host_memory,
    load_from_first,
    on_cpu,
    set_extra,
    shared,
)
from mural.ranks import Mesh


@dataclass(frozen=True)
class WholeState:
    """A model of which each rank of a run holds the parameters and buffers that its division says.

    Whole tensors are put into the model for as long as torch's own `state_dict` or `load_state_dict` runs. So hooks,
    versions and casts are torch's.
    """

    model: nn.Module
    division: Division
    mesh: Mesh

    def gathered(self, rank0: bool) -> dict[str, Any]:
        """The unsplit model's state on the CPU, on every rank or, with `rank0`, on rank 0 alone. Collective."""
        wanted = not rank0 or self.mesh.rank == 0
        with extra_of_owners(self.model, self.mesh, self.division.keeper), self._wholes(wanted) as wholes:
            state = self.model.state_dict(keep_vars=True) if wanted else {}
        return released(state, {id(whole) for whole in wholes.values()})

    def load(self, state: Mapping[str, Any], strict: bool, rank0: bool) -> _IncompatibleKeys:
        """Take over the unsplit model's state; with `rank0`, the one that rank 0 gives. Collective."""
        if not rank0:
            with together(self.mesh, "load_state_dict"), warnings.catch_warnings():
                # What other ranks hold is on meta here: torch compares its shape, and warns that it copies nothing.
                warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)
                return self.model.load_state_dict(state, strict=strict)
        with self._wholes(self.mesh.rank == 0) as wholes:
            keys, extra = load_from_first(self.model, state, self.mesh, strict)
        for name, tensor in self._tensors().items():
            values = shared(wholes.get(name, tensor), self.mesh, 0)
            if self.division.holds(name):
                fill(tensor, values)
        set_extra(self.model, extra, self.mesh)
        return keys

    def _tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers, each by the first of its names."""
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor for name, tensor in named if name in self.division.holders}

    @contextmanager
    def _wholes(self, wanted: bool) -> Generator[dict[str, Tensor]]:
        """A block in which the model has all its tensors, on the CPU, by name; none where not `wanted`. Collective."""
        wholes: dict[str, Tensor] = {}
        swaps: dict[int, Tensor] = {}
        for name, tensor in self._tensors().items():
            values = shared(tensor, self.mesh, self.division.owner(name))
            if not wanted:
                continue
            if tensor.is_meta and tensor.is_contiguous():
                whole = values
            else:
                whole = host_memory(tensor)
                fill(whole, values)
            wholes[name] = nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
            swaps[id(tensor)] = wholes[name]
        with substituted(self.model, swaps):
            yield wholes


@contextmanager
def substituted(model: nn.Module, swaps: Mapping[int, Tensor]) -> Generator[None]:
    """A block in which other tensors replace some of the model's, which are named by their identity."""
    places = [
        (held, key, tensor)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None and id(tensor) in swaps
    ]
    try:
        for held, key, tensor in places:
            held[key] = swaps[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for held, key, tensor in places:
            held[key] = tensor  # type: ignore[assignment]


def released(state: Mapping[str, Any], own: set[int]) -> dict[str, Any]:
    """A state on the CPU of which no two tensors share memory; those in `own` are nobody else's, and not copied."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and id(value) in own:
            own = own - {id(value)}
            found[key] = value.detach() if compact(value) is value else value.detach().clone()
        else:
            found[key] = on_cpu(value)
    return found

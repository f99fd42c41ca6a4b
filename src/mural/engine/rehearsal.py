"""A rehearsal: a step on tensors without memory, with the memory that a GPU would take and the time that it would need.

It is the step itself that is noted, forward and backward, with blocks that are computed again; so it has the moments
that a run will have, and the same choice can be made of it (`SwapChoice`), before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from mural.cost.channels_last import COPIES_REACH, PRODUCTS_REACH
from mural.cost.fitted_model import SHORTEST
from mural.cost.hardware import Hardware
from mural.cost.rates import Rates
from mural.engine.recompute import chosen
from mural.engine.tile_inputs import CHANNELS_LAST, memory_format
from mural.memory.host_memory import HostMemory
from mural.memory.meta_kernels import GpuTally
from mural.memory.offload.moments import Gates
from mural.memory.offload.noted_step import NotedStep
from mural.memory.offload.step_trace import StepTrace
from mural.memory.offload.swapped_memory import SwappedMemory
from mural.memory.offload.used_tensors import SHAPES, tensors_in
from mural.memory.stream_memory import without_memory
from mural.shard.meta_autocast import meta_autocast

META = torch.device("meta")
KERNELS = 1.47
"""How many times as long as the roofline torch's own kernels take: a U-Net's steps at 2048² and 3072² in bfloat16 with
channels last on an H200, with and without blocks that are computed again (1.46 to 1.49)."""
TWICE = ("batch_norm", "group_norm", "layer_norm")
"""Operations that read what they normalize twice."""


class PricedTally(GpuTally):
    """Counts memory as a GPU would take it, and the seconds that its kernels would need by a roofline."""

    def __init__(self, rates: Rates):
        super().__init__()
        self.rates = rates
        self.clock = 0.0
        self.stops: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.clock += KERNELS * self._price(func, args, kwargs or {}, result)
        return result

    def _price(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """The seconds of an operation; none for one that only makes a view."""
        schema = func._schema
        view = bool(schema.returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        name = schema.name.split("::")[-1]
        if view or name in SHAPES or name.startswith("empty"):
            return 0.0
        read = list(tensors_in((*args, *kwargs.values())))
        moved = sum(t.nbytes for t in (*read, *tensors_in((result,))))
        if any(word in name for word in TWICE) and read:
            moved += read[0].nbytes
        counted = flop_registry.get(func._overloadpacket)
        if counted is None:
            return max(SHORTEST, moved / (COPIES_REACH * self.rates.bandwidth))
        products = counted(*args, **kwargs, out_val=result)
        kind, family = str(read[0].dtype).split(".")[-1], "conv" if "conv" in name else "product"
        reached = PRODUCTS_REACH[min(read[0].element_size(), 4)] * self.rates.of(kind, family)
        return max(SHORTEST, products / reached, moved / (COPIES_REACH * self.rates.bandwidth))

    # -- as a gauge ----------------------------------------------------------------------------------------------------

    def most(self) -> int:
        """The most bytes since the last moment."""
        return self.peak

    def now(self) -> int:
        """The bytes now."""
        return self.live

    def stop(self) -> None:
        """A moment begins."""
        self.stops.append(self.clock)

    def start(self) -> None:
        """It is over."""
        self.forget()

    def seconds(self) -> tuple[float, ...]:
        """The seconds after each moment, up to the next one."""
        return tuple(b - a for a, b in zip(self.stops[:-1], self.stops[1:], strict=True))


def rehearsed(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], given: Sequence[tuple[Sequence[int], torch.dtype]], *,
    hardware: Hardware, recompute: str | tuple[str, ...] = (), lower: torch.dtype | None = None, numbers: float = 0.0,
    least: int = 2**22,
) -> StepTrace:  # fmt: skip
    """The trace of a step for an image and a target of these shapes and types.

    Under autocast, `lower` is its type; the optimizer keeps `numbers` for each of a parameter's.
    """
    copy = model_without_memory(model)
    for block in chosen(copy, recompute) if recompute else ():
        computed_again(block, lower)
    tally = PricedTally(hardware.rates)
    image, target = (torch.empty(tuple(shape), dtype=dtype, device=META) for shape, dtype in given)
    form = memory_format(copy)
    image = image.to(memory_format=form) if image.ndim in CHANNELS_LAST else image
    state = [*copy.parameters(), *copy.buffers()]
    for tensor in (*state, image, target):
        tally.enter(tensor)
    tally.hold(hardware.rates.workspace + int(numbers * sum(p.nbytes for p in copy.parameters())))
    step = NotedStep(SwappedMemory(HostMemory(META)), [], ["activations"], META, None, least, tally)
    generator = torch.get_rng_state()
    try:
        with tally, Gates([], True).open(step):
            with meta_autocast(lower):
                found = loss(copy(image), target)
            found.backward()
    finally:
        torch.set_rng_state(generator)
    return step.trace()


def model_without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model on tensors without memory, in their memory formats."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = without_memory(tensor)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return deepcopy(model, memo)


def computed_again(block: nn.Module, lower: torch.dtype | None) -> None:
    """Let a block be computed again in backward, under the same autocast."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    options["context_fn"] = lambda: (nullcontext(), meta_autocast(lower))
    plain = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(plain, *args, **options, **kwargs)

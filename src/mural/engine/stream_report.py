"""What is predicted for a streamed step, from the program that it runs, and what was measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mural.cost.hardware import Hardware
from mural.engine.stream_program import StreamProgram
from mural.engine.tile_inputs import PieceInput, SourceInput, TensorInput, formed, memory_format
from mural.geometry import Box
from mural.memory.kept_tensors import KeptTensor
from mural.memory.stream_cost import stream_cost
from mural.memory.stream_memory import META, StreamPeak, stream_peak, without_memory
from mural.memory.sweep_costs import StreamCost, describe_step, site_names
from mural.memory.tile_needs import Needs
from mural.memory.tile_sweeps import QUEUED
from mural.memory.tile_task import TileInput

if TYPE_CHECKING:
    from mural.engine.streamed_batch import StreamedBatch


class MetaSource:
    """Windows of a source without memory: one in use, and others in the type of the source.

    They are those of tiles that are queued, and of the next one.
    """

    wanted = False

    def __init__(self, dtype: torch.dtype, raw: torch.dtype, form: torch.memory_format):
        self.dtype, self.raw, self.form = dtype, raw, form
        self.others: deque[Tensor] = deque(maxlen=QUEUED + 1)

    def plan(self, boxes: Sequence[Box]) -> None:
        """Nothing to prepare."""

    def read(self, box: Box) -> Tensor:
        """The next window."""
        shape = [i.size for i in box]
        here = torch.empty(shape, dtype=self.raw, device="meta")
        while len(self.others) < QUEUED:
            self.others.append(torch.empty(shape, dtype=self.raw, device="meta"))
        self.others.append(torch.empty(shape, dtype=self.raw, device="meta"))
        return formed(here.to(self.dtype), self.form)

    def add_gradient(self, box: Box, grad: Tensor) -> None:
        """Sources have no gradient."""

    def rescale(self, factor: Tensor) -> None:
        """Sources have no gradient."""


class MetaPiece(KeptTensor):
    """The piece of a sharded tensor without memory."""

    def __init__(self, given: PieceInput):
        super().__init__(given.box)
        self.wanted, self.values = given.wanted, without_memory(given.region).detach()


@dataclass
class PredictedStep:
    """A streamed step as it is predicted: the program, its needs, and what it is given, without memory."""

    program: StreamProgram
    needs: Needs
    inputs: Mapping[str, TileInput]
    there: Sequence[Tensor]
    """Inputs that are on the device as a whole."""
    held: Mapping[str, Tensor]
    lower: torch.dtype | None
    hardware: Hardware | None
    channels_last: bool
    more: int = 0
    """Other bytes on the device: gradients of earlier steps, and what torch's libraries hold."""
    blocks: Mapping[int, str] = field(default_factory=dict[int, str])
    """The block of each call that backward computes again."""

    @cached_property
    def peak(self) -> StreamPeak:
        """The peak of each sweep."""
        return stream_peak(
            self.program.passes, self.needs, self.inputs, self.held, lower=self.lower, there=self.there,
            hosted=self.program.kept.host, more=self.more, blocks=self.blocks, bands=self.program.kept.bands,
        )  # fmt: skip

    @cached_property
    def cost(self) -> StreamCost:
        """The work of each sweep."""
        return stream_cost(
            self.program.passes, self.needs, self.peak, lower=self.lower, hosted=self.program.kept.host,
            hardware=self.hardware, channels_last=self.channels_last, blocks=self.blocks,
            bands=self.program.kept.bands,
        )  # fmt: skip

    def describe(self) -> str:
        """The passes as text, with what each takes."""
        return describe_step(self.program.passes, self.cost, self.program.kept.host)

    def report(self, seconds: float | None = None, limit: int | None = None) -> dict[str, Any]:
        """What is predicted, next to the measured seconds; with a warning where the peak exceeds a limit.

        `unsettled` tiles took longer than in later steps: they were noted, or became graphs.
        """
        passes, hosted = self.program.passes, self.program.kept.host
        names = site_names(passes)
        found: dict[str, Any] = {
            "passes": len(passes.passes),
            "sweeps": len(self.cost.sweeps),
            "tiles": max((one.tiles for one in self.cost.sweeps), default=0),
            "halo": self.cost.halo,
            "predicted_peak": self.peak.bytes,
            "predicted_seconds": self.cost.seconds(),
            "predicted_bytes": round(self.cost.link_bytes),
            "predicted_flops": self.cost.flops,
            "predicted_pixels": self.cost.pixels,
            "seconds": seconds,
            "unsettled": self.program.recorded.unsettled,
            "kept": {
                names.get(p, str(p[0])): "host" if p in hosted else "device" for p in sorted(passes.kept, key=str)
            },
        }
        if limit is not None and self.peak.bytes > limit:
            found["warning"] = (
                f"the step is predicted to take {self.peak.bytes:,} bytes, but there are {limit:,}: make stream smaller"
            )
        return found


def predicted_step(batch: StreamedBatch) -> PredictedStep | None:
    """The prediction of the step that a batch takes; it holds no memory but that of the model.

    None where ranks share passes on whole tensors, which exchange parts of them.
    """
    passes, ranks = batch.program.passes, batch.needs.grid.ranks.values()
    if any(one.whole for one in passes.passes) and any(len(parts) > 1 for parts in ranks):
        return None
    held, hardware = batch.streamer.held, hardware_of(batch.device)
    form = memory_format(batch.held.plain)
    inputs: dict[str, TileInput] = {}
    there: list[Tensor] = []
    for name, given in batch.inputs.items():
        dtype = batch.program.tiles.values[name, 0].dtype
        inputs[name], whole = input_without_memory(given, dtype, batch.device, form)
        there += whole
    lower = torch.bfloat16 if batch.way.plan.precision == "bfloat16" else None
    grads = sum(t.grad.numel() * t.grad.element_size() for t in batch.parameters.values() if t.grad is not None)
    more = grads + (0 if hardware is None else hardware.rates.workspace)
    return PredictedStep(
        batch.program, batch.needs, inputs, there, held, lower, hardware, form != torch.contiguous_format, more,
        batch.streamer.blocks,
    )  # fmt: skip


def input_without_memory(
    given: Any, dtype: torch.dtype, device: torch.device, form: torch.memory_format
) -> tuple[TileInput, list[Tensor]]:
    """An input without memory, and what of it is on the device as a whole."""
    if isinstance(given, PieceInput):
        piece = MetaPiece(given)
        return piece, [] if piece.values is None else [piece.values]
    if isinstance(given, SourceInput):
        raw: Any = getattr(given.sources[0] if given.sources else None, "dtype", dtype)
        return MetaSource(dtype, raw if isinstance(raw, torch.dtype) else dtype, form), []
    tensor = without_memory(given.tensor.detach()).requires_grad_(given.wanted)
    if given.tensor.device.type != device.type:
        return MetaSource(dtype, dtype, form), []
    made = TensorInput(tensor, META, form)
    return made, [tensor] if made.grad is None else [tensor, made.grad]


def hardware_of(device: torch.device) -> Hardware | None:
    """What is known of a device; None for one that is not known."""
    if device.type != "cuda" or "H200" not in torch.cuda.get_device_name(device):
        return None
    return Hardware.named("h200")

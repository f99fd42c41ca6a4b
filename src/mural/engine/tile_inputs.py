"""The inputs of a streamed model, read by windows: tensors, sources, and the pieces of sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn

from mural.comm import stack
from mural.comm.exchange import CHANNELS_LAST, order_of
from mural.geometry import Box, Interval, slices
from mural.memory.decoded_cache import DecodedCache
from mural.memory.host_memory import HostMemory
from mural.memory.host_tensor import HostTensor, united
from mural.memory.kept_tensors import KeptTensor
from mural.memory.pinned import Buffers
from mural.memory.read_plan import Read
from mural.memory.readable import Converted, Readable
from mural.memory.window_reads import WindowReads
from mural.ranks import SPATIAL, Mesh
from mural.shard import ShardedTensor
from mural.shard.gradient_scale import raw_gradient


class TensorInput:
    """A whole tensor, wherever it is: windows of it go to the computing device."""

    def __init__(self, tensor: Tensor, device: torch.device, form: torch.memory_format):
        self.tensor, self.device, self.form = tensor, device, form
        self.wanted = tensor.requires_grad
        self.grad = torch.zeros_like(tensor) if self.wanted else None

    def plan(self, boxes: Sequence[Box]) -> None:
        """Windows are slices: nothing to prepare."""

    def read(self, box: Box) -> Tensor:
        """A window on the computing device."""
        return formed(self.tensor.detach()[slices(box)].to(self.device, non_blocking=True), self.form)

    def at_once(self, box: Box) -> Tensor:
        """A window that was not planned."""
        return self.read(box)

    def add_gradient(self, box: Box, grad: Tensor) -> None:
        """Add the gradient of a window."""
        if self.grad is not None:
            self.grad[slices(box)] += grad.to(self.grad.device)

    def rescale(self, factor: Tensor) -> None:
        """Scale the gradient."""
        if self.grad is not None:
            self.grad *= factor.to(self.grad.device)

    def finish(self, mesh: Mesh) -> None:
        """Give the tensor its gradient, that of all ranks. Collective."""
        if self.grad is not None:
            whole = stack(self.grad, mesh.everyone, mesh.rank, mesh.transport, "gradient of the image").sum(0)
            self.tensor.grad = whole if self.tensor.grad is None else self.tensor.grad + whole


class PieceInput(KeptTensor):
    """The piece of a sharded tensor, with the margin that this rank's tiles read; its gradient goes home in the end."""

    def __init__(self, tensor: ShardedTensor, margin: Callable[[], Tensor], box: Box):
        super().__init__(box)
        self.tensor, self.wanted = tensor, tensor.requires_grad
        with torch.enable_grad():
            self.region = margin()
        self.values = self.region.detach()

    def at_once(self, box: Box) -> Tensor:
        """A window that was not planned."""
        return self.read(box)

    def finish(self, mesh: Mesh) -> None:
        """Give the sharded tensor its gradient. Collective."""
        if self.wanted:
            grad = torch.zeros_like(self.region) if self.grads is None else self.grads
            grad = grad if self.scale is None else grad * self.scale
            self.region.backward(raw_gradient(grad, self.tensor.placement))


class SourceInput:
    """Images that are read from sources, by threads and ahead of their use; `first` is the number of the first one.

    Bytes that were decoded are kept for other passes, within the budget of `cache`. A rank may have no image at all.

    Where values are kept on the host by rows, so is what was read (`keep_in`): later sweeps then need no thread.
    """

    wanted = False

    def __init__(
        self, sources: Sequence[Readable], first: int, device: torch.device, convert: Callable[[Tensor], Tensor],
        cache: DecodedCache, buffers: Buffers, lead: int, channels: int,
    ):  # fmt: skip
        self.sources, self.first, self.device, self.convert = list(sources), first, device, convert
        self.cache, self.buffers, self.lead, self.channels = cache, buffers, lead, channels
        self.reads: WindowReads | None = None
        self.next = 0
        self.kept: HostTensor | None = None
        """What was read, as it is stored."""
        self.covered: dict[int, tuple[Interval, ...]] = {}
        """Its rows, of each image."""

    def keep_in(self, memory: HostMemory, most: int) -> None:
        """Keep what is read on the host, if it is of one type and takes no more than so many bytes."""
        kinds = [getattr(source, "dtype", None) for source in self.sources]
        kind = kinds[0] if len(set(kinds)) == 1 else None
        if not isinstance(kind, torch.dtype) or prod(self.sources[0].shape) * len(self.sources) * kind.itemsize > most:
            return
        images = Interval(self.first, self.first + len(self.sources))
        dims = len(self.sources[0].shape) - 1
        box = (images, *(Interval(0, extent) for extent in self.sources[0].shape))
        self.kept = HostTensor(box, ("data", None, *SPATIAL[:dims]), memory, 0)

    def _stored(self, box: Box) -> Box:
        """A window in the dims of what is stored: image, channels, and those of the image."""
        return (box[0], Interval(0, self.channels), *box[self.lead :])

    def _is_kept(self, box: Box) -> bool:
        """Whether the rows of a window were read before."""
        return any(held.contains(box[self.lead]) for held in self.covered.get(box[0].start, ()))

    def plan(self, boxes: Sequence[Box]) -> None:
        """Begin to read the windows of a pass."""
        self.close()
        boxes, self.next = [box for box in boxes if box[0].size], 0
        if self.kept is not None and all(map(self._is_kept, boxes)):
            self.kept.plan(list(map(self._stored, boxes)))
            return
        windows = [(box[0].start - self.first, box[self.lead :]) for box in boxes]
        self.reads = WindowReads(
            self.sources, windows, device=self.device, cache=self.cache, buffers=self.buffers,
            once=self.kept is not None,
        )  # fmt: skip

    def reads_ahead(self, boxes: Sequence[Box | None], adds: bool) -> list[list[Read]]:
        """What is read for windows in order of what was kept; nothing, unless all of them were."""
        found = [None if box is None or not box[0].size else box for box in boxes]
        if self.kept is None or not all(box is None or self._is_kept(box) for box in found):
            return [[] for _ in boxes]
        return self.kept.reads_ahead([None if box is None else self._stored(box) for box in found], adds)

    def read(self, box: Box) -> Tensor:
        """The next window."""
        if not box[0].size:
            return self._nothing(box)
        if self.reads is None:
            if self.kept is None:
                raise RuntimeError("windows are read after they were planned")
            return self.convert(self.kept.read(self._stored(box)))
        self.next += 1
        window = self.reads[self.next - 1]
        # Rows are held whole.
        if self.kept is not None and self._stored(box)[3:] == self.kept.box[3:] and not self._is_kept(box):
            self.kept.write(self._stored(box), window)
            number = box[0].start
            self.covered[number] = united(self.covered.get(number, ()), box[self.lead])
        return self.convert(window)

    def at_once(self, box: Box) -> Tensor:
        """A window that was not planned, read now."""
        if not box[0].size:
            return self._nothing(box)
        parts = [self.sources[i - self.first] for i in range(*box[0])]
        read = (s.read([(0, s.shape[0]), *map(tuple, box[self.lead :])]) for s in parts)
        return torch.cat([self.convert(one[None].to(self.device)) for one in read])

    def _nothing(self, box: Box) -> Tensor:
        """A window of no image."""
        extents = [i.size for i in box[self.lead :]]
        return self.convert(torch.empty(0, self.channels, *extents, device=self.device))

    def add_gradient(self, box: Box, grad: Tensor) -> None:
        """Files have no gradient."""

    def rescale(self, factor: Tensor) -> None:
        """Files have no gradient."""

    def finish(self, mesh: Mesh) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """End the threads."""
        if self.reads is not None:
            self.reads.close()
            self.reads = None

    def release(self) -> None:
        """End the threads, and give all memory back."""
        self.close()
        if self.kept is not None:
            self.kept.drop()
            self.kept, self.covered = None, {}


def as_stored(sources: Sequence[Readable]) -> tuple[list[Readable], Callable[[Tensor], Tensor]]:
    """Sources as they are stored, and what makes of a window (1, C, …) what they give; of no image, nothing."""
    one = sources[0] if sources else None
    if not isinstance(one, Converted) or not all(one.same_values(other) for other in sources):
        return list(sources), lambda window: window
    stored = [source.stored for source in sources if isinstance(source, Converted)]
    return stored, lambda window: one.values_of(window[0])[None] if len(window) else window


def formed(tensor: Tensor, form: torch.memory_format) -> Tensor:
    """A window in the memory format of the model's convolutions.

    The stride of a single image may be any; but it decides to which format torch brings the gradients of convolutions.
    """
    if CHANNELS_LAST.get(tensor.ndim) != form:
        return tensor
    dense = tensor.contiguous(memory_format=form)
    strides = torch.empty(dense.shape, device="meta", memory_format=form).stride()
    return dense if dense.stride() == strides else dense.as_strided(dense.shape, strides)


def memory_format(model: nn.Module) -> torch.memory_format:
    """The memory format of a model's convolutions."""
    for weight in model.parameters():
        if weight.ndim in CHANNELS_LAST and prod(weight.shape[2:]) > 1 and weight.shape[1] > 1:
            return order_of(weight)
    return torch.contiguous_format

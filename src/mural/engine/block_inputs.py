"""What a block takes, as it was before the block's forward: the tensors, or copies if forward writes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from mural.memory.offload.moments import UNWATCHED, unwatched
from mural.shard import ShardedTensor
from mural.shard.halo.margin import Margin
from mural.shard.tensor import local_of


class FirstWrites:
    """What is done before the first operation that writes to the memory of a tensor, as `Operations` tells of it."""

    def __init__(self) -> None:
        self.waiting: dict[int, list[Callable[[], None]]] = {}

    def before(self, tensor: Tensor, done: Callable[[], None]) -> None:
        """Have a function called before the first write."""
        memory = memory_of(tensor)
        if memory is not None:
            self.waiting.setdefault(memory, []).append(done)

    def written(self, tensors: Iterable[Tensor]) -> None:
        """An operation is about to write to tensors: one of the model, not what offload has come back."""
        if unwatched():
            return
        for memory in filter(None, map(memory_of, tensors)):
            for done in self.waiting.pop(memory, ()):
                done()

    def used_now(self, tensors: Iterable[Tensor]) -> None:
        """An operation uses tensors."""

    def make_room(self) -> int:
        """No memory is here that others could have."""
        return 0


class TakenTensors:
    """The tensors that a block takes, and how to tell whether its forward wrote to them.

    A write to a tensor with a margin drops the margin, or lets it die: the extended piece is what it was. An assignment
    to the `data` of a tensor gives it other memory: the piece that is held here has the former.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tensors
        self.margins = [*map(live_margin, tensors)]
        self.pieces = [*map(own_piece, tensors)]
        self.versions = [*map(version_of, self.pieces)]
        self.memory = [*map(memory_of, self.pieces)]
        self.copies: list[Tensor] | None = None

    def copy(self) -> None:
        """Copy them, unless that was done."""
        if self.copies is None:
            with torch.inference_mode(False), torch.no_grad():
                self.copies = copies_of(self.tensors, self.pieces)

    def watch(self, writes: FirstWrites) -> None:
        """Copy them before the first write to one of them."""
        for piece in self.pieces:
            writes.before(piece, self.copy)

    def written(self) -> bool:
        """Whether the forward, which is over, may have written to one of them; copies are there if that was seen."""
        if self.copies is None and any(map(int.__ne__, map(version_of, self.pieces), self.versions)):
            return True
        if any(map(self._moved, self.tensors, self.margins, self.memory)):
            self.copy()
        return self.copies is not None

    @staticmethod
    def _moved(tensor: Tensor, margin: Margin | None, memory: int | None) -> bool:
        """Whether a tensor has lost its margin, or has other memory than it had."""
        return live_margin(tensor) is not margin if margin is not None else memory_of(local_of(tensor)) != memory


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, as far as torch counts; nobody who watches calls sees the question."""
    with UNWATCHED():
        return 0 if tensor.is_inference() else tensor._version


def memory_of(tensor: Tensor) -> int | None:
    """The memory of a tensor, by number; None for one that has none of its own, as one that wraps others."""
    if tensor.layout != torch.strided or isinstance(tensor, ShardedTensor):
        return None
    with UNWATCHED():
        try:
            return tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return None


def carrier(tensor: Tensor) -> Tensor:
    """The plain tensor that has the memory of a tensor."""
    return tensor.carrier if isinstance(tensor, ShardedTensor) else tensor


def live_margin(tensor: Tensor) -> Margin | None:
    """The margin that a tensor has, if operations may read it."""
    margin = tensor.margin if isinstance(tensor, ShardedTensor) else None
    return margin if margin is not None and margin.live else None


def own_piece(tensor: Tensor) -> Tensor:
    """This rank's piece of a tensor: what was cut out, of which there may be views, or a part of the extended piece."""
    margin = live_margin(tensor)
    piece = local_of(tensor) if margin is None or margin.piece is not None else margin.extended
    if type(piece) not in (Tensor, nn.Parameter):
        return piece  # its class would be lost
    with UNWATCHED():
        return piece.detach()[margin.crop] if margin is not None and margin.piece is None else piece.detach()


def copies_of(tensors: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, of which this rank has those pieces, that share memory where the tensors do.

    y, y[:, :2]  ->  copy, copy[:, :2]: what is written to one is in the other.
    """
    copies = dict[int, Tensor]()
    for numbers in by_memory(pieces):
        copies |= zip(numbers, copied_together([pieces[number] for number in numbers]), strict=True)
    copies = {number: of_class(copy, pieces[number]) for number, copy in copies.items()}
    for number, x in enumerate(tensors):
        if x.requires_grad and not copies[number].requires_grad:
            copies[number].requires_grad_()  # pieces are copied without their history
    return [
        ShardedTensor(copies[number], x.placement, x.aliased, x.folds)
        if isinstance(x, ShardedTensor)
        else copies[number]
        for number, x in enumerate(tensors)
    ]


def of_class(copy: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a tensor, of its class: inside of another operation, torch copies all classes as plain tensors."""
    if type(copy) is type(tensor) or type(tensor) in (Tensor, nn.Parameter):
        return copy
    copy = copy.as_subclass(type(tensor))
    vars(copy).update(vars(tensor))
    return copy


def by_memory(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of tensors, those of one memory together.

    >>> x = torch.zeros(4)
    >>> by_memory([x, torch.zeros(4), x[:2]])
    [[0, 2], [1]]
    """
    found: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        found.setdefault(memory_of(tensor) or -1 - number, []).append(number)
    return [*found.values()]


def form_of(tensor: Tensor) -> tuple[type[Tensor], torch.dtype]:
    """How a tensor reads its memory: of a copy of it, tensors of one form can be views."""
    return Tensor if type(tensor) is nn.Parameter else type(tensor), tensor.dtype


def as_stored(tensor: Tensor) -> Tensor:
    """The numbers in the memory of a tensor, which may be conjugated or negated when they are read."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch.ops.aten._neg_view(tensor) if tensor.is_neg() else tensor


def read_like(stored: Tensor, tensor: Tensor) -> Tensor:
    """Numbers in memory, read as a tensor reads its own."""
    stored = stored.conj() if tensor.is_conj() else stored
    return torch.ops.aten._neg_view(stored) if tensor.is_neg() else stored


def copied_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors in one memory: views of a copy of it."""
    first = next((x for x in tensors if x.requires_grad), tensors[0])
    if len(tensors) == 1 or len({form_of(x) for x in tensors}) > 1:
        return [x.clone() for x in tensors]
    extent = first.untyped_storage().nbytes() // first.element_size()
    whole = as_stored(first).as_strided((extent,), (1,), 0).clone()
    views = [read_like(whole.as_strided(x.shape, x.stride(), x.storage_offset()), x) for x in tensors]
    if not whole.requires_grad:
        return views  # what needs a gradient may be written to one
    return [view if x.requires_grad else view.detach() for view, x in zip(views, tensors, strict=True)]


def again_of(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """How a tensor is made of its carrier again."""
    if not isinstance(tensor, ShardedTensor):
        return lambda piece: piece
    margin, placement, aliased, folds = live_margin(tensor), tensor.placement, tensor.aliased, tensor.folds
    if margin is not None:
        spans, layout = margin.spans, margin.placement
        return lambda piece: ShardedTensor.with_margin(Margin(piece, spans, layout))
    return lambda piece: ShardedTensor(piece, placement, aliased, folds)

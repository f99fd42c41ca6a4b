"""Dense blocks: tensors that leave together, in one block of memory, so that few large copies move them.

before   ┤ weight ├   ┤ bias ├      ┤ weight ├   ┤ bias ├
after    ┤ weight │ bias │ weight │ bias ├
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mural.memory.offload.swapped_memory import ONE_TENSOR, references

ALIGNED = 512
"""Tensors begin at multiples of so many bytes, as torch's allocator has them."""


def make_dense(tensors: Iterable[Tensor], most: int) -> None:
    """Move tensors that follow each other into blocks of about `most` bytes.

    Larger ones stay where they are, and so do those whose memory others use, too.
    """
    alone = [t for t in tensors if t.nbytes and t.nbytes == t.untyped_storage().nbytes() and is_alone(t)]
    for group in groups(alone, most):
        block = torch.empty(sum(map(room_of, group)), dtype=torch.uint8, device=group[0].device)
        at = 0
        for tensor in group:
            place = block[at : at + tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            with torch.no_grad():
                place.copy_(tensor)
            tensor.data = place
            at += room_of(tensor)


def is_alone(tensor: Tensor) -> bool:
    """Whether nothing else uses a tensor's memory."""
    storage = tensor.untyped_storage()
    return references(storage._cdata) <= ONE_TENSOR


def room_of(tensor: Tensor) -> int:
    """The bytes that a tensor takes in a block."""
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def groups(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Tensors of one device, of at most so many bytes together; none that would be alone."""
    group: list[Tensor] = []
    for tensor in tensors:
        device = group[0].device if group else tensor.device
        if tensor.device != device or sum(map(room_of, (*group, tensor))) > most:
            if len(group) > 1:
                yield group
            group = []
        if room_of(tensor) < most:
            group.append(tensor)
    if len(group) > 1:
        yield group

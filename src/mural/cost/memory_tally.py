"""The tally: which memory is alive while torch runs, and how much at most, counted on tensors with memory or without.

It sees each operation where kernels are called, so temporaries count too; what a kernel takes inside does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mural.graph.meta_results import result_of


class Tally(TorchDispatchMode):
    """Counts the bytes of all storages that were made while it is active: now (`live`) and at most (`peak`).

    `rounded` is how the device rounds sizes. Storages that were there before count once they are `entered`.
    """

    def __init__(self, rounded: Callable[[int], int]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.rounded = rounded
        self._known: dict[int, int] = {}

    def enter(self, tensor: Tensor) -> None:
        """Count the memory of a tensor that was there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = self._known[key] = self.rounded(storage.nbytes())
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, key).atexit = False

    def _leave(self, key: int) -> None:
        self.live -= self._known.pop(key)

    def forget(self) -> None:
        """Let the peak be what is alive now."""
        self.peak = self.live

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Let tensors that were there before not count, whatever returns them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known[storage._cdata] = 0
                weakref.finalize(storage, self._leave, storage._cdata).atexit = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.counted(func, args, kwargs or {})

    def counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives, once its memory is counted.

        Kinds of tallies differ in this one alone: each `__torch_dispatch__` costs torch a detour.
        """
        result = result_of(func, args, kwargs)
        if isinstance(result, Tensor):
            self.enter(result)
            return result
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.enter(leaf)
        return result


def rounded_cuda(size: int) -> int:
    """What CUDA's caching allocator takes for a tensor: multiples of 512 bytes.

    >>> rounded_cuda(1), rounded_cuda(1024), rounded_cuda(0)
    (512, 1024, 0)
    """
    return -(-size // 512) * 512


def exact(size: int) -> int:
    """The size itself."""
    return size


ROUNDED: dict[str, Callable[[int], int]] = {"cuda": rounded_cuda, "cpu": exact}

"""numpy's types of pixels and torch's, one for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

NAMES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES} | {"bfloat16": torch.bfloat16}
NUMPY: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH.items()}


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """The type of torch for pixels of that type in any order of bytes; None where torch has none.

    >>> torch_dtype(np.dtype(">u2"))
    torch.uint16
    """
    return TORCH.get(dtype.newbyteorder("=").name)


def numpy_dtype(dtype: torch.dtype | np.dtype[Any] | type | str) -> np.dtype[Any]:
    """The type of numpy for torch's, or for whatever numpy itself takes for one.

    >>> numpy_dtype(torch.uint16), numpy_dtype("float32")
    (dtype('uint16'), dtype('float32'))
    """
    return np.dtype(NUMPY[dtype] if isinstance(dtype, torch.dtype) else dtype)


def to_tensor(array: Array) -> torch.Tensor:
    """The array as a tensor that shares its memory; the array is contiguous, writable and in native order."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(tensor: torch.Tensor) -> Array:
    """The tensor's values in numpy, without its history, in host memory."""
    return tensor.detach().cpu().contiguous().numpy()

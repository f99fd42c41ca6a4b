"""Buffers: the memory that MPI sends a tensor from, and receives one into.

MPI moves contiguous bytes. If a tensor has gaps, or is on a GPU and the MPI has no CUDA support, a buffer in host
memory travels instead. For sums, the buffer also has a type that MPI knows:

    float16, bfloat16  →  float32   added in float32 and rounded once, at the end
    bool               →  uint8     sum as «or», product as «and»
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm.mpi.installation import library
from mural.errors import UnsupportedOp

CHUNK_BYTES = 2**30
"""MPI counts in 32 bits: larger messages are sent in parts."""

TYPES: dict[torch.dtype, str] = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint64: "UINT64_T",
    torch.uint32: "UINT32_T",
    torch.uint16: "UINT16_T",
    torch.uint8: "UINT8_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
WIDER: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.uint8,
}
OPERATIONS: dict[Any, str] = {
    dist.ReduceOp.SUM: "SUM",
    dist.ReduceOp.AVG: "SUM",
    dist.ReduceOp.PRODUCT: "PROD",
    dist.ReduceOp.MIN: "MIN",
    dist.ReduceOp.MAX: "MAX",
    dist.ReduceOp.BAND: "BAND",
    dist.ReduceOp.BOR: "BOR",
    dist.ReduceOp.BXOR: "BXOR",
}
ON_BOOL = {"SUM": "MAX", "PROD": "MIN"}


def plain(tensor: Tensor) -> Tensor:
    """The tensor as stored values, without autograd history."""
    if tensor.layout is not torch.strided:
        raise UnsupportedOp(f"messages over MPI carry dense tensors, not {tensor.layout}: send its values and indices")
    bare: Any = tensor.detach()
    return bare.resolve_conj().resolve_neg()


def host(like: Tensor, dtype: torch.dtype) -> Tensor:
    """New host memory for a tensor's values; pinned where they come from a GPU."""
    return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=like.is_cuda)


def outgoing(tensor: Tensor, direct: bool) -> Tensor:
    """Memory that MPI can send the values from; a copy from a GPU may still be under way on the current stream.

    `direct` says that MPI takes pointers to GPU memory.
    """
    tensor = plain(tensor)
    if not tensor.is_cuda or direct:
        return tensor.contiguous()
    return host(tensor, tensor.dtype).copy_(tensor, non_blocking=True)


def incoming(tensor: Tensor, direct: bool) -> Tensor:
    """Memory that MPI can receive the values into: the tensor's own if possible."""
    bare = plain(tensor)
    own = bare.data_ptr() == tensor.data_ptr() and bare.is_contiguous()
    return bare if own and (not tensor.is_cuda or direct) else host(bare, tensor.dtype)


def summand(tensor: Tensor) -> Tensor:
    """Host memory with the values, in a type that MPI can add: the tensor's own if possible.

    MPI's non-blocking reductions take no GPU memory, even where its messages do.
    """
    tensor = plain(tensor)
    dtype = WIDER.get(tensor.dtype, tensor.dtype)
    if dtype not in TYPES:
        raise UnsupportedOp(f"MPI cannot add up values of {tensor.dtype}: convert them to float32 first")
    if tensor.dtype == dtype and not tensor.is_cuda and tensor.is_contiguous():
        return tensor
    return host(tensor, dtype).copy_(tensor, non_blocking=True)


def arrive(tensor: Tensor, wire: Tensor) -> None:
    """Copy what MPI received into the tensor, on the current stream."""
    if wire.data_ptr() != tensor.data_ptr() or wire.dtype != tensor.dtype:
        with torch.no_grad():
            tensor.detach().copy_(wire, non_blocking=True)
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def averaged(total: Tensor, operation: Any, count: int) -> Tensor:
    """The mean if the operation is a mean; for integers, its integer part."""
    if operation != dist.ReduceOp.AVG:
        return total
    whole = None if total.is_floating_point() or total.is_complex() else "trunc"
    return total.div_(count, rounding_mode=whole)


def operation_name(operation: Any, dtype: torch.dtype) -> str:
    """MPI's name for an operation on values of a dtype."""
    for known, name in OPERATIONS.items():
        if operation == known:
            return ON_BOOL.get(name, name) if dtype == torch.bool else name
    raise UnsupportedOp(f"{operation} over MPI: use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")


def operation_on(operation: Any, dtype: torch.dtype) -> Any:
    """MPI's operation for values of a dtype, which may have been widened."""
    name = operation_name(operation, dtype)
    if name.startswith("B") and (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedOp(f"{operation} of {dtype}: bits are combined in whole numbers alone")
    if dtype.is_complex and name in ("MIN", "MAX"):
        raise UnsupportedOp(f"{operation} of {dtype}: complex numbers have no order")
    return getattr(library(), name)


def combine(rows: list[Tensor], operation: Any, dtype: torch.dtype) -> Tensor:
    """The rows combined in order, in the first of them; `dtype` is their type before it was widened."""
    total, function = rows[0], operation_on(operation, dtype)
    for row in rows[1:]:
        for part, whole in zip(typed_parts(row), typed_parts(total), strict=True):
            function.Reduce_local(part, whole)
    return averaged(total, operation, len(rows))


def parts(wire: Tensor) -> list[tuple[Any, int, Any]]:
    """The memory of a message as MPI takes it: address and bytes, in parts of limited size; one part if it is empty."""
    found: list[tuple[Any, int, Any]] = []
    for start in range(0, max(wire.nbytes, 1), CHUNK_BYTES):
        size = min(CHUNK_BYTES, wire.nbytes - start)
        found.append((memory(wire, start, size), size, library().BYTE))
    return found


def typed_parts(wire: Tensor) -> list[tuple[Any, int, Any]]:
    """The memory of a summand as MPI takes it: address, number and type of the values, in parts of limited size."""
    kind, width = getattr(library(), TYPES[wire.dtype]), wire.element_size()
    step, found = CHUNK_BYTES // width, list[tuple[Any, int, Any]]()
    for start in range(0, wire.numel(), step):
        count = min(step, wire.numel() - start)
        found.append((memory(wire, start * width, count * width), count, kind))
    return found


def memory(wire: Tensor, start: int, size: int) -> Any:
    """Some bytes of a tensor, by address: on the GPU too."""
    return library().buffer.fromaddress(wire.data_ptr() + start if size else 0, size)

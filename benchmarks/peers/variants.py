"""The variants: how each library takes a rank's piece of the image, and gives back plain tensors.

A loader does the imports and returns a function that opens the variant, once the process group exists. So each
process imports the library of its own variant alone, and the memory of the imports can be told from the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from job import CHANNELS, Job
from torch import Tensor, nn


def unchanged(value: Any) -> Any:
    """What was given."""
    return value


@dataclass(frozen=True)
class Variant:
    """One library's part in the step that all variants share."""

    place: Callable[[Tensor, int], Any] = lambda piece, size: piece
    local: Callable[[Any], Tensor] = unchanged
    full: Callable[[Any], Tensor] = unchanged
    model: Callable[[nn.Module], nn.Module] = unchanged
    average: Callable[[nn.Module], Any] = unchanged


Opener = Callable[[Job], Variant]


def load_plain() -> Opener:
    """Plain torch: the rank's rows (or the whole image, with one rank), and no exchange."""
    return lambda job: Variant()


def load_mural() -> Opener:
    """mural: the rank's rows as a sharded tensor."""
    import mural  # noqa: PLC0415

    def opened(job: Job) -> Variant:
        mesh = mural.init(spatial=(job.ranks, 1))

        def place(piece: Tensor, size: int) -> Any:
            start = size * job.rank // job.ranks
            box = ((0, 1), (0, CHANNELS), (start, start + piece.shape[2]), (0, size))
            return mural.shard(piece, mesh, box=box)

        return Variant(
            place=place,
            local=lambda y: y.local,
            average=lambda net: mural.reduce_gradients(net, mesh),
        )

    return opened


def load_dtensor() -> Opener:
    """The DTensor of torch: input cut along the rows, parameters replicated."""
    from torch.distributed import device_mesh, tensor  # noqa: PLC0415

    def opened(job: Job) -> Variant:
        mesh = device_mesh.init_device_mesh("cpu", (job.ranks,))
        return Variant(
            place=lambda piece, size: tensor.DTensor.from_local(piece, mesh, [tensor.Shard(2)]),
            local=lambda y: y.to_local(),
            full=full_tensor,
            model=lambda net: tensor.distribute_module(net, mesh),
        )

    return opened


def load_shardtensor() -> Opener:
    """PhysicsNeMo's ShardTensor: input cut along the rows, parameters plain."""
    from torch.distributed import device_mesh, tensor  # noqa: PLC0415

    # torchvision's wheel needs these two beside a CPU build of torch; without CUDA, the operators of ShardTensor
    # are not registered by its import.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from physicsnemo import domain_parallel  # noqa: PLC0415

    domain_parallel.register_custom_ops()

    def opened(job: Job) -> Variant:
        mesh = device_mesh.init_device_mesh("cpu", (job.ranks,))

        def place(piece: Tensor, size: int) -> Any:
            return domain_parallel.ShardTensor.from_local(
                piece, mesh, [tensor.Shard(2)], sharding_shapes="chunk", global_shape=(1, CHANNELS, size, size)
            )

        return Variant(place=place, local=lambda y: y.to_local(), full=full_tensor)

    return opened


def full_tensor(value: Any) -> Tensor:
    """The whole value of a distributed tensor; a plain one as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


LOADERS: dict[str, Callable[[], Opener]] = {
    "plain": load_plain,
    "single": load_plain,
    "mural": load_mural,
    "dtensor": load_dtensor,
    "shardtensor": load_shardtensor,
}

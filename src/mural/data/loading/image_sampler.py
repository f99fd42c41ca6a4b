"""The image sampler: for loaders of torch, which samples each rank takes, so that ranks of one image take the same."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import DistributedSampler

from mural.errors import DataError
from mural.ranks import Mesh


class ImageSampler(DistributedSampler[int]):
    """The samples of this rank's place on the data axis, in an order that follows from (seed, epoch) alone.

    For `DataLoader(…, sampler=…)`, next to `mural.shard(…, batch="own")`. Call `set_epoch` before each epoch, as for
    every `DistributedSampler` (Lightning does). With a `batch_size` of b per rank, step k of an epoch has b × data
    images, the same ones for the same b × data. Samples that cannot be divided evenly are refused, or left out with
    `drop_last`; never repeated.

    >>> list(ImageSampler(range(4), Mesh.of_one(), shuffle=False))
    [0, 1, 2, 3]
    """

    def __init__(self, dataset: Sized, mesh: Mesh, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False):
        mesh = mesh.folded
        count, parts = len(dataset), mesh.size("data")
        if count < parts or (count % parts and not drop_last):
            left = f"drop_last=True leaves {count % parts} out of each epoch"
            fix = left if count > parts else "use fewer data ranks"
            raise DataError(
                f"{count} samples cannot be divided evenly over {parts} places on the data axis: {fix}, or use "
                f"mural.data.Loader, which divides any number"
            )
        given: Any = dataset  # torch asks for no more than a length
        super().__init__(given, parts, mesh.coordinates["data"], shuffle=shuffle, seed=seed, drop_last=drop_last)

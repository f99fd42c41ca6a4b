"""Ranks of one image take the same samples from torch's loaders; DDP then trains as one device; others raise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mural
from law import TOLERANCE, Grid
from mural.comm.messages import Transport
from mural.data import ImageSampler
from mural.errors import DataError
from ranks import run_on
from sampled_training import BATCH, EPOCHS, IMAGES, Trained, made, optimizer_of, plainly_trained


def mesh_of(data: int, spatial: int, rank: int) -> mural.Mesh:
    """A mesh as a rank sees it, without processes."""
    return mural.Mesh((data, 1, 1, 1, spatial, 1, 1), rank, 1, Transport(None, 0.0))


def global_batches(data: int, spatial: int, epoch: int) -> list[set[int]]:
    """The samples of each step, of all ranks."""
    steps: list[set[int]] = [set() for _ in range(IMAGES // BATCH)]
    for rank in range(data * spatial):
        sampler = ImageSampler(range(IMAGES), mesh_of(data, spatial, rank))
        sampler.set_epoch(epoch)
        for step, batch in enumerate(DataLoader(range(IMAGES), BATCH // data, sampler=sampler)):
            steps[step] |= set(batch.tolist())
    return steps


def test_the_batches_of_an_epoch_do_not_depend_on_the_plan() -> None:
    for epoch in range(3):
        one = global_batches(1, 1, epoch)
        assert [len(batch) for batch in one] == [BATCH, BATCH]
        assert global_batches(2, 2, epoch) == global_batches(4, 1, epoch) == global_batches(1, 4, epoch) == one
    assert global_batches(1, 1, 0) != global_batches(1, 1, 1)


def test_ranks_of_one_image_take_the_same_samples() -> None:
    taken = [list(ImageSampler(range(IMAGES), mesh_of(2, 2, rank))) for rank in range(4)]
    assert taken[0] == taken[1]
    assert taken[2] == taken[3]
    assert sorted(taken[0] + taken[2]) == list(range(IMAGES))


def test_samples_that_do_not_divide_are_refused_or_left_out() -> None:
    with pytest.raises(DataError, match=r"9 samples .* over 2 places .* drop_last=True leaves 1 out of each epoch"):
        ImageSampler(range(9), mesh_of(2, 1, 0))
    with pytest.raises(DataError, match=r"1 samples .* over 2 places .* use fewer data ranks"):
        ImageSampler(range(1), mesh_of(2, 1, 0), drop_last=True)
    assert [len(ImageSampler(range(9), mesh_of(2, 1, rank), drop_last=True)) for rank in (0, 1)] == [4, 4]


def trained(
    model: nn.Module, dataset: TensorDataset, mesh: mural.Mesh, sampler: DistributedSampler[Any]
) -> list[float]:
    """The losses of a loop in which each rank loads its own images, and the model averages gradients."""
    optimizer, losses = optimizer_of(model), list[float]()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for image, mask in DataLoader(dataset, BATCH // mesh.size("data"), sampler=sampler):
            x, target = mural.shard(image, mesh, batch="own"), mural.shard(mask, mesh, dims=(1, 2), batch="own")
            loss = F.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def train_with_ddp(grid: Grid) -> Trained:
    (model, dataset), mesh = made(), grid.mesh()
    return trained(DistributedDataParallel(model), dataset, mesh, ImageSampler(dataset, mesh)), model.state_dict()


@pytest.mark.parametrize("grid", [Grid((2,)), Grid((1, 2), data=2), Grid((), data=2)], ids=str)
def test_ddp_with_an_image_sampler_trains_as_one_device(grid: Grid) -> None:
    losses, state = plainly_trained()
    for found, weights in run_on(grid.world, train_with_ddp, grid):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def said(function: Any, *args: Any) -> str:
    """The `LayoutError` that a call raises."""
    with pytest.raises(mural.LayoutError) as caught:
        function(*args)
    return str(caught.value)


def train_with_the_usual_sampler() -> str:
    (model, dataset), mesh = made(), Grid((2,), data=2).mesh()
    return said(trained, model, dataset, mesh, DistributedSampler(dataset, 4, mesh.rank))


def test_the_usual_sampler_is_refused_on_every_rank() -> None:
    """Each rank of four has images of its own, and every two share an image's place."""
    for text in run_on(4, train_with_the_usual_sampler):
        assert 'batch="own"): ranks [1] brought other images than rank 0, which shares them' in text
        assert "sampler=mural.data.ImageSampler(dataset, mesh)" in text


def own(count: int, value: float = 0.0, **more: Any) -> mural.ShardedTensor:
    mesh = Grid((2,), data=2).mesh()
    return mural.shard(torch.full((count, 2, 8, 5), value), mesh, batch="own", **more)


def uneven() -> tuple[Any, ...]:
    part = Grid((2,), data=2).mesh().coordinates["data"]
    x = own(1 + part, float(part))
    return tuple(x.shape), tuple(x.box[0]), tuple(x.box[2]), x.full()[:, 0, 0, 0].tolist()


def test_places_may_bring_different_numbers_of_images() -> None:
    values = [0.0, 1.0, 1.0]
    first, second = ((3, 2, 8, 5), (0, 1)), ((3, 2, 8, 5), (1, 3))
    assert run_on(4, uneven) == [(*place, rows, values) for place in (first, second) for rows in ((0, 4), (4, 8))]


def misused() -> list[str]:
    rank = Grid((2,), data=2).mesh().rank
    return [
        said(own, 1 + rank % 2),
        said(lambda: own(1, box=((0, 1), (0, 2), (0, 8), (0, 5)))),
        said(lambda: own(1, cuts={0: (1, 1)})),
        said(lambda: mural.shard(torch.zeros(2, 2, 8), Grid((2,), data=2).mesh(), batch="mine")),
    ]


def test_what_does_not_go_with_own_images_raises() -> None:
    for count, box, cuts, name in run_on(4, misused):
        assert "ranks [1] brought other images than rank 0, which shares them (1 and 2 of shape (2, 8, 5))" in count
        assert box == cuts
        assert "leave out box=" in box
        assert "batch='mine': choose one of ('whole', 'own')" in name


def without_a_sampler() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own(2, 7.0)
    return [f"{Path(w.filename).name}: {w.message}" for w in caught]


def test_the_same_images_everywhere_are_noticed() -> None:
    for (text,) in run_on(4, without_a_sampler):
        assert text.startswith('test_image_sampler.py: shard(…, batch="own"): all 2 parts of the batch are the same')

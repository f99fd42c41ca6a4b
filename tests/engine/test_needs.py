"""What ranks take of a batch, by their stages, in training and in evaluation; the rest is not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from torch import Tensor, nn

import mural
from mural.data import Loader, Sample
from mural.engine.inputs import Needs
from mural.engine.same_inputs import compare, parts_of
from mural.errors import LayoutError
from mural.shard.unread import Unread
from ranks import run_on

SIDE = 32


class Skipping(nn.Module):
    """A model whose last layer takes the input again, where `again` is set."""

    def __init__(self, again: bool = True):
        super().__init__()
        self.again = again
        self.first, self.middle = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.later, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(7 if again else 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.later(self.middle(self.first(x).relu()).relu()).relu()
        return self.last(torch.cat([x, y], 1) if self.again else y)


def parallel(again: bool, plan: mural.Plan) -> Any:
    torch.manual_seed(0)
    return mural.parallelize(Skipping(again), plan, image=(3, SIDE, SIDE))


def needs_of(again: bool, plan: mural.Plan) -> tuple[bool, ...]:
    found = [parallel(again, plan).needs(training) for training in (True, False)]
    return found[0].image, found[0].target, found[1].image, found[1].target


IMAGE, TARGET, BOTH, NEITHER = (True, False), (False, True), (True, True), (False, False)
INTERLEAVED = {"stage": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 2}


@pytest.mark.parametrize(
    ("again", "plan", "training", "evaluation"),
    [
        (False, {"stage": 2}, [IMAGE, TARGET], [IMAGE, TARGET]),
        (True, {"stage": 2}, [IMAGE, BOTH], [IMAGE, BOTH]),
        (False, {"stage": 2, "schedule": "gems", "microbatches": 2}, [BOTH, BOTH], [IMAGE, TARGET]),
        (False, INTERLEAVED, [IMAGE, TARGET], [IMAGE, TARGET]),
        (False, {"stage": 2, "seats": (0, 1, 0)}, [BOTH, NEITHER], [BOTH, NEITHER]),
        (False, {"data": 2}, [BOTH, BOTH], [BOTH, BOTH]),
        (False, {"data": 2, "microbatches": 2}, [BOTH, BOTH], [BOTH, BOTH]),
    ],
)
def test_a_rank_needs_what_its_stages_take(again: bool, plan: dict[str, Any], training: Any, evaluation: Any) -> None:
    found = run_on(2, needs_of, again, mural.Plan(**plan))
    assert found == [(*a, *b) for a, b in zip(training, evaluation, strict=True)]


def read_in_steps(folder: Path, plan: mural.Plan) -> list[int]:
    """The bytes of images and of masks that a rank decodes in a step, then in an evaluation."""
    pm, found = parallel(False, plan), list[int]()
    for call in (pm.step, pm.evaluate):
        images = [mural.open(folder / f"image{i}.tif", scale="range") for i in range(2)]
        masks = [mural.open(folder / f"mask{i}.tif") for i in range(2)]
        call(images, masks)
        found += [sum(source.counter.bytes_decoded for source in sources) for sources in (images, masks)]
    return found


def test_sources_given_to_a_step_are_read_where_they_are_taken(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for i in range(2):
        tifffile.imwrite(tmp_path / f"image{i}.tif", draw.integers(0, 255, (SIDE, SIDE, 3)).astype(np.uint8))
        tifffile.imwrite(tmp_path / f"mask{i}.tif", draw.integers(0, 2, (SIDE, SIDE)).astype(np.uint8))
    found = run_on(2, read_in_steps, tmp_path, mural.Plan(stage=2))
    image, mask = 2 * 3 * SIDE * SIDE, 2 * SIDE * SIDE
    assert found == [[image, 0, image, 0], [0, mask, 0, mask]]


def loaded(plan: mural.Plan, needed: bool) -> tuple[float, ...]:
    """The losses of a step and an evaluation; without `needed`, of batches of which every rank has read nothing."""
    pm = parallel(True, plan)
    draw = torch.Generator().manual_seed(1)
    samples = [
        Sample(f"{i}", torch.rand(3, SIDE, SIDE, generator=draw), (torch.rand(SIDE, SIDE, generator=draw) > 0.5).int())
        for i in range(3)
    ]
    needs = pm.needs(training=True) if needed else Needs(pm.world_mesh, image=False, target=False)
    (batch,) = Loader(samples, pm.world_mesh, batch=3, needs=needs).epoch(0)
    assert isinstance(batch.image, Unread) is not needs.image
    assert isinstance(batch.target, Unread) is not needs.target
    loss = pm.step(batch.image, batch.target)
    norm = pm.clip_grad_norm_(1e9)
    return float(loss), float(norm), float(pm.evaluate(batch.image, batch.target)[2])


@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize(
    "plan",
    [
        mural.Plan(stage=2, schedule="1f1b", microbatches=2),
        pytest.param(mural.Plan(stage=2, data=2, microbatches=2), marks=pytest.mark.slow),
        pytest.param(mural.Plan(stage=2, grids=((1, 1), (2, 1)), microbatches=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_was_not_read_changes_no_loss(plan: mural.Plan, needed: bool) -> None:
    one = run_on(1, loaded, mural.Plan(), True)[0]
    for found in run_on(plan.devices, loaded, plan, needed):
        assert found == pytest.approx(one, rel=1e-5)


def test_ranks_that_have_not_read_a_part_agree_with_the_others() -> None:
    read, other = torch.zeros(2, 3), torch.ones(2, 3)
    unread = Unread((2, 3), torch.float32, lambda: pytest.fail("it was read"))
    compare("step", {rank: list(parts_of("image", x)) for rank, x in enumerate((unread, read, read))})
    compare("step", {rank: list(parts_of("image", x)) for rank, x in enumerate((unread, unread))})
    with pytest.raises(LayoutError, match="image has other values on rank 2 than on rank 1"):
        compare("step", {rank: list(parts_of("image", x)) for rank, x in enumerate((unread, read, other))})

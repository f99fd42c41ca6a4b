"""Steps at the edges: ranks that own no image, odd extents, stride 3, values used twice, and what must not leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference, image
from ranks import run_on


class Twice(nn.Module):
    """A value used twice, and a stride of 3 at odd extents."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, stride=3, padding=2), nn.BatchNorm2d(4)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        return F.interpolate(self.last(torch.cat([y, y.relu() * y], 1)), size=x.shape[2:], mode="bilinear")


class Pixels:
    """A source in memory."""

    def __init__(self, values: Tensor):
        self.values, self.shape = values, tuple(values.shape)

    def read(self, box: Any) -> Tensor:
        return self.values[tuple(slice(*i) for i in box)]


def made() -> nn.Module:
    torch.manual_seed(0)
    return Twice().double()


def one_source(plan: mural.Plan) -> float:
    plain, pm = made(), mural.parallelize(made(), plan, loss=F.mse_loss)
    x, target = image(1, 2, 37, 29), image(1, 1, 37, 29, seed=1)
    expected = F.mse_loss(plain(x), target)
    expected.backward()
    loss = pm.step([Pixels(x[0])], target)
    pairs = [*zip(plain.parameters(), pm.parameters(), strict=True)]
    return max(difference(loss, expected.detach()), *(difference(q.grad, p.grad) for p, q in pairs))


def test_one_image_for_two_data_ranks() -> None:
    assert max(run_on(4, one_source, mural.Plan(data=2, spatial=(2, 1)))) < 1e-10


def value_mask(plan: mural.Plan) -> float:
    """A mask of values, of which the rank without an image cannot see that it holds no classes."""
    pm = mural.parallelize(made(), plan, loss=F.mse_loss)
    x, target = image(1, 2, 37, 29), image(1, 1, 37, 29, seed=1)
    expected = F.mse_loss(made()(x), target).detach()
    return difference(pm.step([Pixels(x[0])], [Pixels(target[0])]), expected)


def test_a_mask_of_values_for_a_rank_without_images() -> None:
    assert max(run_on(2, value_mask, mural.Plan(data=2))) < 1e-10


def dropped(looks: int) -> list[float]:
    """Losses with dropout, with some inference between the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(4, 3, 1)).double()
    pm = mural.parallelize(model, mural.Plan(), seed=1)
    x, target = image(2, 2, 9, 9), torch.zeros(2, 9, 9).long()
    losses = []
    for _ in range(3):
        losses.append(float(pm.step(x, target)))
        for _ in range(looks):
            pm(x)
            pm.evaluate(x, target)
    return losses


def test_inference_between_steps_changes_no_dropout() -> None:
    """A validation has fewer batches on more data ranks: it must not move what the next step draws."""
    assert dropped(0) == dropped(3)


def running(plan: mural.Plan) -> float:
    """BatchNorm by rank where two of four ranks own nothing: buffers move by the mean of the pieces there are."""
    norm = mural.parallelize(nn.BatchNorm2d(2).double(), plan, loss=lambda y, t: (y * t).sum())
    x = image(2, 2, 5, 7)
    norm.step(x, image(2, 2, 5, 7, seed=2))
    parts = [nn.BatchNorm2d(2).double() for _ in range(2)]
    for part, one in zip(parts, x, strict=True):
        part(one[None])
    mean = torch.stack([p.running_var for p in parts]).mean(0)  # type: ignore[misc]
    return difference(dict(norm.named_buffers())["running_var"], mean)


def test_buffers_of_ranks_without_images() -> None:
    assert max(run_on(4, running, mural.Plan(data=4, batchnorm="rank"))) < 1e-10


def without_images(options: dict[str, Any], call: str, brought: tuple[int, int]) -> list[str]:
    """What a batch of no images gives, on all ranks or on one, and the step behind it."""
    pm = mural.parallelize(made_flat(), mural.Plan(**options))
    counts, texts = (brought[0] if dist.get_rank() == 0 else brought[1], 2), list[str]()
    for images in counts:
        x, target = image(images, 3, 12, 10), torch.zeros(images, 12, 10).long()
        run = {"step": lambda: pm.step(x, target), "evaluate": lambda: pm.evaluate(x, target)[2]}[call]  # noqa: B023
        try:
            texts.append(f"{float(run()):.3f}")
        except mural.MuralError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def made_flat() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)
    return nn.Sequential(*layers).double()


PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "data": {"data": 2},
    "spatial": {"spatial": (2, 1)},
    "channel": {"channel": 2, "channel_layers": "all"},
    "average": {"data": 2, "average": 2},
    "micro-batches": {"schedule": "gpipe", "microbatches": 2},
    "sequential": {"stage": 2},
    "1f1b": {"stage": 2, "schedule": "1f1b", "microbatches": 2},
    "gpipe": {"stage": 2, "schedule": "gpipe", "microbatches": 2},
    "gems": {"stage": 2, "schedule": "gems", "microbatches": 2},
}


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize("name", PLANS)
def test_a_batch_without_images_is_refused_in_words_and_the_next_step_works(name: str, call: str) -> None:
    """Under stages it was an IndexError, elsewhere a loss that is no number."""
    world = mural.Plan(**PLANS[name]).devices
    for empty, full in run_on(world, without_images, PLANS[name], call, (0, 0)):
        assert empty.startswith("LayoutError: "), empty
        assert "leave such batches out" in empty or "each needs an image" in empty, empty
        assert full[0] == "0", full


@pytest.mark.parametrize("name", ["data", "spatial", "1f1b"])
def test_a_batch_without_images_on_one_rank_is_refused_on_all(name: str) -> None:
    for texts in run_on(2, without_images, PLANS[name], "step", (2, 0)):
        assert "Error: " in texts[0], texts


class Counting(nn.Module):
    """Its result grows with the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(x).relu()) * (1 + 0.1 * self.calls)


@pytest.mark.parametrize("blocks", [("0",), "all", "stages"], ids=str)
def test_what_a_recomputed_block_counts_counts_once(blocks: Any) -> None:
    found: list[tuple[list[float], int]] = []
    for plan in (mural.Plan(), mural.Plan(recompute=blocks)):
        torch.manual_seed(0)
        model = nn.Sequential(Counting(), nn.Conv2d(3, 2, 1)).double()
        pm = mural.parallelize(model, plan)
        optimizer = torch.optim.SGD(list(pm.parameters()), lr=0.1)
        losses: list[float] = []
        for _ in range(3):
            losses.append(float(pm.step(torch.ones(2, 3, 8, 8).double(), torch.zeros(2, 8, 8).long())))
            optimizer.step()
            pm.zero_grad()
        found.append((losses, model[0].calls))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert found[0][1] == found[1][1] == 3

"""Losses of streamed steps over positions in one list, by class numbers scattered into channels, and with values that
Python reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from streamed_law import check_steps, images

EXTENTS = {1: (33,), 2: (20, 23), 3: (8, 9, 10)}
TILES = {1: (12,), 2: (8, 9), 3: (5, 5, 6)}
FLAT = [
    "F.cross_entropy(last(y).reshape(-1, 3), t.reshape(-1))",
    "F.cross_entropy(y.flatten(2), t.flatten(1))",
    "F.cross_entropy(last(y).contiguous().view(-1, 3), t.view(-1), weights, ignore_index=1)",
    "F.cross_entropy(y.flatten(2).transpose(1, 2).flatten(0, 1), t.flatten(), reduction='none').square().mean()",
    "F.cross_entropy(y.view(len(y), 3, -1), t.view(len(y), -1), reduction='none').mean(1).square().sum()",
    "F.nll_loss(last(y).reshape(-1, 3).log_softmax(-1), t.flatten())",
    "F.cross_entropy(last(y).reshape(-1, 3), last(truth).reshape(-1, 3), label_smoothing=0.1)",
    "F.binary_cross_entropy_with_logits(last(y).reshape(-1, 3), last(truth).reshape(-1, 3), pos_weight=weights)",
    "F.mse_loss(y.flatten(1), truth.flatten(1), reduction='none').mean(1).sqrt().sum()",
    "F.kl_div(y.log_softmax(1).flatten(2), truth.flatten(2), reduction='batchmean')",
    "F.cross_entropy(y, t, 1 / (truth.sum((0, *range(2, y.ndim))) + 1))",
]


def loss_of(code: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss from an expression of scores `y` and a mask `t`."""
    compiled = compile(code, "<loss>", "eval")

    def loss(y: Tensor, t: Tensor) -> Tensor:
        names: dict[str, Any] = {"F": F, "y": y, "t": t, "last": lambda x: x.movedim(1, -1)}
        names["truth"] = F.one_hot(t, 3).movedim(-1, 1).to(y.dtype)
        names["weights"] = torch.tensor([0.5, 1.0, 2.0], dtype=y.dtype, device=y.device)
        return eval(compiled, names)

    return loss


@pytest.mark.parametrize(("number", "code"), [*enumerate(FLAT)])
def test_positions_in_one_list(number: int, code: str) -> None:
    """Dims of the image that were merged cut nothing that the loss could see, and it was refused."""
    dims, count = (2, 3, 1)[number % 3], 1 + number % 2
    check(loss_of(code), dims, count)


def check(loss: Any, dims: int, count: int, channel: bool = False) -> None:
    """Check two steps."""
    generator = torch.Generator().manual_seed(4)
    shape = (count, 1, *EXTENTS[dims]) if channel else (count, *EXTENTS[dims])
    target = torch.randint(0, 3, shape, generator=generator)
    torch.manual_seed(1)
    model = nn.Sequential((nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 3, 3, padding=1), nn.Tanh()).double()
    given = [(x, target) for x in images(count, EXTENTS[dims])]
    check_steps(model, loss, given, mural.Plan(stream=TILES[dims]))


class Scattering(nn.Module):
    """Dice over channels made by `scatter_`, as MONAI makes them, its dims from a tensor, its weights looked at."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([0.2, 1.0, 0.5], dtype=torch.float64))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        shape = (y.shape[0], 3, *y.shape[2:])
        truth = torch.zeros(size=shape, dtype=y.dtype, device=y.device).scatter_(1, target.long(), 1)
        dims: list[int] = torch.arange(2, y.ndim).tolist()
        if self.weights.min() < 0:
            raise ValueError("no weights")
        y = y.softmax(1)
        shared, both = (y * truth).sum(dims), (y + truth).sum(dims)
        return (self.weights * (1 - (2 * shared + 1) / (both + 1))).mean()


@pytest.mark.parametrize(("dims", "count"), [(2, 2), (3, 1)])
def test_classes_scattered_into_channels(dims: int, count: int) -> None:
    """Each tile wrote to a tensor of the whole image; and values that no image reaches were not known."""
    check(Scattering(), dims, count, channel=True)


def test_values_that_change_between_steps() -> None:
    """A branch on a parameter is that of its value in each step."""

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.02, dtype=torch.float64))

        def forward(self, y: Tensor, target: Tensor) -> Tensor:
            loss = F.cross_entropy(y, target) * (3 + self.scale * 5)
            return loss if self.scale > 0 else loss + y.square().mean()

    check(Turning(), 2, 1)


def test_values_of_the_image() -> None:
    """Python cannot read them."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return y.mean() if y.max() > 0 else y.sum()

    with pytest.raises(mural.UnsupportedOp, match="__bool__ needs the values"):
        check(loss, 2, 1)


def test_memory_that_tiles_copy() -> None:
    """A view of what each tile writes to in a copy of its own would not see it."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        truth = torch.zeros(y.shape, dtype=y.dtype, device=y.device)
        first = truth[:, :1]
        truth.scatter_(1, target[:, None], 1)
        return (y * first).mean()

    with pytest.raises(mural.UnsupportedOp, match="reads, through another tensor, memory that scatter_"):
        check(loss, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DiceLoss", {"softmax": True}),
        ("DiceLoss", {"sigmoid": True, "include_background": False, "reduction": "sum"}),
        ("DiceLoss", {"softmax": True, "squared_pred": True, "batch": True}),
        ("DiceCELoss", {"softmax": True, "batch": True}),
        ("DiceCELoss", {"softmax": True, "include_background": False, "lambda_ce": 0.5}),
        ("TverskyLoss", {"softmax": True, "alpha": 0.3, "beta": 0.7}),
        ("FocalLoss", {"use_softmax": True}),
        ("FocalLoss", {"gamma": 3.0, "alpha": 0.25, "reduction": "sum"}),
        ("DiceFocalLoss", {"softmax": True}),
        ("GeneralizedDiceLoss", {"softmax": True}),
    ],
)
def test_monai(monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], dims: int) -> None:
    """Their dims come from `torch.arange(2, n).tolist()`, their channels from `scatter_`."""
    losses = pytest.importorskip("monai.losses")
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # or else they round
    one_hot = losses.dice.one_hot
    for module in (losses.dice, losses.tversky, losses.focal_loss):
        monkeypatch.setattr(module, "one_hot", lambda *given, **more: one_hot(*given, dtype=torch.double, **more))
    check(getattr(losses, name)(to_onehot_y=True, **options), dims, 2, channel=True)


def test_a_loss_of_no_module() -> None:
    """A function that `exec` made has no module, and its name was looked at."""
    made: dict[str, Any] = {"F": F}
    exec("def loss(y, target):\n    return F.cross_entropy(y, target)", made)
    check(made["loss"], 2, 1)

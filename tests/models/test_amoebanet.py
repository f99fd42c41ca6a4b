"""AmoebaNet-D and the U-Net of torchgpipe have the published sizes, the published wiring, and train."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mural
import mural.models as models
from mural.models.amoebanet import Cell, Halve


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("layers", "filters", "published"),
    # Table 1 of GPipe as torchgpipe reproduces it, in millions.
    [(18, 208, 81.5), (18, 416, 319.0), (18, 544, 542.7)],
)
def test_amoebanet_has_the_published_number_of_parameters(layers: int, filters: int, published: float) -> None:
    with torch.device("meta"):
        assert round(count(models.amoebanetd(layers, filters)) / 1e6, 1) == published


@pytest.mark.parametrize(("layers", "filters", "published"), [(36, 544, 1.06), (72, 512, 1.84)])
def test_large_amoebanets_have_the_published_number_of_parameters(layers: int, filters: int, published: float) -> None:
    with torch.device("meta"):
        assert round(count(models.amoebanetd(layers, filters)) / 1e9, 2) == published


def test_amoebanet_trains_a_step() -> None:
    torch.manual_seed(0)
    model = models.amoebanetd(layers=3, filters=16, classes=5).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    image, target = torch.randn(4, 3, 64, 64, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    losses: list[float] = []
    for _ in range(2):
        scores = model(image)
        assert scores.shape == (4, 5)
        loss = nn.functional.cross_entropy(scores, target)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("extents", [(224, 224), (65, 33), (7, 250), (1, 1)])
def test_the_cells_of_amoebanet_halve_any_extents_rounding_up(extents: tuple[int, int]) -> None:
    graph = mural.capture(models.amoebanetd(layers=3, filters=16, classes=5).eval(), (1, 3, *extents))
    halved = list(extents)
    for name in ("stem1.2", "stem2/cat:1", "stem3/cat:1", "cell2_reduction/cat:1", "cell4_reduction/cat:1"):
        halved = [(extent + 1) // 2 for extent in halved]
        assert list(graph[name].output_shapes[0][2:]) == halved
    assert graph.outputs[0].shape == (1, 5)
    assert not graph.unsupported()


def test_a_normal_cell_is_wired_as_in_the_reference() -> None:
    torch.manual_seed(0)
    cell = Cell(before=8, last=12, channels=8, reduction=False, halve=False).double().eval()
    last, before = (torch.randn(2, width, 9, 7, dtype=torch.float64) for width in (12, 8))
    op: Any = cell.operations
    h0, h1 = cell.fit_last(last), before
    h2 = op[0](h1) + nn.functional.max_pool2d(h1, 3, 1, 1)
    h3 = h1 + op[3](h0)
    h4 = op[4](h0) + op[5](h0)
    h5 = nn.functional.max_pool2d(h2, 3, 1, 1) + h2
    h6 = nn.functional.avg_pool2d(h1, 3, 1, 1, count_include_pad=False) + op[9](h5)
    torch.testing.assert_close(cell(last, before), torch.cat([h0, h3, h4, h6], 1))


def test_halving_reads_even_and_odd_positions() -> None:
    halve = Halve(1, 2).eval()
    with torch.no_grad():
        for conv in (halve.even, halve.odd):
            conv.weight.fill_(1)
    found = halve(torch.arange(25.0).view(1, 1, 5, 5))[0] * (1 + 1e-5) ** 0.5
    even = torch.tensor([[0.0, 2, 4], [10, 12, 14], [20, 22, 24]])
    odd = torch.tensor([[6.0, 8, 0], [16, 18, 0], [0, 0, 0]])
    torch.testing.assert_close(found, torch.stack([even, odd]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((4, 16), "layers=4.*multiple of 3: set layers=6"), ((3, 7), "filters=7.*at least 8"), ((0, 16), "layers=0")],
)
def test_sizes_that_make_no_amoebanet_are_refused(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.amoebanetd(*arguments)


# --- U-Net ------------------------------------------------------------------------------------------------

GPIPE_UNET = partial(models.UNet, classes=1, depth=5, norm="instance", upsample="repeat")


@pytest.mark.parametrize(
    ("convs", "width", "published"),
    # torchgpipe's benchmark unet-memory, in millions.
    [(6, 72, 362.2), (11, 128, 2210), (24, 128, 4990), (24, 160, 7800), (48, 160, 15820)],
)
def test_unet_has_the_number_of_parameters_of_torchgpipe(convs: int, width: int, published: float) -> None:
    with torch.device("meta"):
        millions = count(GPIPE_UNET(convs=convs, width=width)) / 1e6
    assert round(millions, 1 if published < 1000 else -1) == published


def test_unet_of_torchgpipe_captures_and_trains() -> None:
    graph = mural.capture(GPIPE_UNET(convs=5, width=64), (1, 3, 192, 192))
    assert graph.outputs[0].shape == (1, 1, 192, 192)
    assert sum(node.op.startswith("conv") for node in graph) == 5 * 11 + 1
    model = GPIPE_UNET(convs=3, width=4).double()
    model(torch.randn(1, 3, 67, 64, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_width_that_repeat_cannot_halve_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width=5.*set width=6"):
        models.UNet(width=5, upsample="repeat")


def test_the_classic_unet_has_its_blocks_of_two_convolutions() -> None:
    classic = models.UNet(width=8, depth=2)
    assert [name for name, _ in classic.stem.named_children()] == ["0", "1", "2", "3", "4", "5"]
    assert count(models.UNet(width=8, depth=2, convs=3)) > count(classic)

"""Batches by window: sources whose windows hold the bits of the batch in memory, in the same order, drawn once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_loader import CASES, EVERYTHING, damaged, pictures
from torch import Tensor

import mural
from mural.data.image_sample import Sample
from mural.data.loading.label_range import LabelRange
from mural.data.loading.loader import Loader
from mural.data.loading.sample_source import SampleSource
from mural.engine.inputs import Needs, all_readable
from mural.errors import DataError
from mural.models import UNet
from ranks import run_on


def loaders(samples: Any, options: dict[str, Any]) -> tuple[Loader, Loader]:
    """The same batches in memory and by window."""
    mesh = mural.init()
    return Loader(samples, mesh, **options), Loader(samples, mesh, needs=Needs(mesh, by_window=True), **options)


def windows(shape: Sequence[int], side: int = 7) -> list[list[tuple[int, int]]]:
    """Windows that cover the spatial dims of an image, and some that do not lie in a grid."""
    found: list[list[tuple[int, int]]] = [[(0, shape[0])]]
    for n in shape[1:]:
        found = [[*box, (k, min(k + side, n))] for box in found for k in range(0, n, side)]
    draw = random.Random(4)
    for _ in range(6):
        found.append([(a, draw.randint(a, n)) for n in shape for a in [draw.randrange(n)]])
    return found


def same_bits(source: SampleSource, whole: Tensor) -> None:
    """Compare all windows of a source with the image or mask in memory, some of them twice."""
    assert (source.shape, source.dtype) == (tuple(whole.shape), whole.dtype)
    boxes = windows(source.shape)
    random.Random(5).shuffle(boxes)
    for box in [*boxes, *boxes[:3]]:
        assert torch.equal(source.read(box), whole[tuple(slice(*pair) for pair in box)])
    assert torch.equal(source.read(), whole)


@pytest.mark.parametrize("case", CASES)
def test_windows_hold_the_bits_of_the_batch_in_memory(case: str) -> None:
    samples, options = CASES[case]
    in_memory, by_window = loaders(samples, options)
    for tensors, sources in zip(in_memory.epoch(1), by_window.epoch(1), strict=True):
        fields = ("names", "step", "indices", "shape")
        assert [getattr(tensors, f) for f in fields] == [getattr(sources, f) for f in fields]
        assert all_readable(sources.image)
        for source, whole in zip(sources.image, tensors.image.local, strict=True):
            same_bits(source, whole)
        if not isinstance(sources.target, list):
            assert type(sources.target) is (type(None) if tensors.target is None else Tensor)
            assert tensors.target is None or torch.equal(sources.target, tensors.target.local)
            continue
        for source, whole in zip(sources.target, tensors.target.local, strict=True):
            assert source.flat == (options.get("mask") != "channels")
            same_bits(source, whole[None] if source.flat else whole)
        assert torch.equal(sources.whole()[1], tensors.whole()[1])


def test_nothing_is_read_before_a_window_is_asked_for() -> None:
    _, loader = loaders(samples := pictures(4), {"batch": 2, "augment": EVERYTHING})
    samples[:] = [Sample(s.name, mural.data.ArraySource(s.image, s.name), s.target) for s in samples]
    *_, batch = loader.epoch(0)
    read = [s.image.counter.reads for s in samples]
    batch.image[1].read([(0, 3), (2, 5), (4, 9)])
    after = [s.image.counter.reads for s in samples]
    assert (sum(read), sum(after)) == (0, 1)
    assert samples[batch.indices[1]].image.counter.bytes_decoded == 3 * 3 * 5


def test_an_epoch_resumes_by_window_where_it_was_left_in_memory() -> None:
    in_memory, by_window = loaders(pictures(7), {"batch": 2, "augment": EVERYTHING})
    rest = list(in_memory.epoch(3))[2:]
    for tensors, sources in zip(rest, by_window.epoch(3, start=2), strict=True):
        assert torch.equal(torch.stack([s.read() for s in sources.image]), tensors.image.local)


def test_a_window_that_cannot_be_read_names_the_file_and_the_box() -> None:
    _, loader = loaders(damaged(1, [0], row=15), {"skip_bad": True})
    (batch,) = loader.epoch(0)
    source = batch.image[0]
    source.read([(0, 3), (0, 15), (0, 24)])
    with pytest.raises(DataError, match=r"picture 0, box \(\(8, 20\), \(0, 24\)\): .* row 15 is damaged") as raised:
        source.read([(0, 3), (8, 20), (0, 24)])
    assert raised.value.name == "picture 0"


def test_a_mask_with_wrong_labels_is_an_error_where_they_are() -> None:
    sample = pictures(1)[0]
    sample.target[3, 4] = 9
    _, loader = loaders([sample], {"label_range": LabelRange(4)})
    (batch,) = loader.epoch(0)
    batch.target[0].read([(0, 1), (4, 20), (0, 24)])
    with pytest.raises(DataError, match=r"picture 0.*the mask holds the value 9"):
        batch.target[0].read([(0, 1), (0, 4), (0, 24)])


def test_an_error_of_the_memory_is_not_blamed_on_the_file() -> None:
    def compute(box: Any) -> Tensor:
        raise MemoryError("too much")

    _, loader = loaders([Sample("a", mural.data.ComputedSource(compute, (1, 8, 8), torch.uint8))], {})
    (batch,) = loader.epoch(0)
    with pytest.raises(MemoryError):
        batch.image[0].read()


def losses(samples: Any, data: int, spatial: Sequence[int], by_window: bool, options: dict[str, Any]) -> list[float]:
    """The losses of the batches of an epoch."""
    mesh = mural.init(spatial=spatial, data=data)
    torch.manual_seed(0)
    plan = mural.Plan(data=data, spatial=tuple(spatial))
    mask = options.get("mask", "classes")
    loss = F.cross_entropy if mask == "classes" else lambda y, t: F.mse_loss(y if mask == "channels" else y[:, 0], t)
    pm = mural.parallelize(UNet(classes=4 if mask == "classes" else 1, width=4, depth=1), plan, loss=loss, mesh=mesh)
    loader = Loader(samples, mesh, needs=Needs(mesh, by_window=by_window), **options)
    return [float(pm.step(batch.image, batch.target)) for batch in loader.epoch(0)]


@pytest.mark.parametrize(
    "options", [{}, {"mask": "values"}, {"mask": "channels"}], ids=["classes", "values", "channels"]
)
def test_a_model_takes_both_kinds_of_batches(options: dict[str, Any]) -> None:
    given = {"batch": 2, "augment": EVERYTHING, **options}
    assert losses(pictures(3), 1, (), True, given) == losses(pictures(3), 1, (), False, given)


class Unopened:
    """Samples of which one cannot be opened."""

    def __init__(self, count: int, bad: int):
        self.samples, self.bad = pictures(count), bad

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples[index].name

    def __getitem__(self, index: int) -> Sample:
        if index == self.bad:
            raise DataError(f"{self.name(index)}: cannot be opened", self.name(index))
        return self.samples[index]


@pytest.mark.parametrize(("data", "spatial"), [(2, ()), (1, (2, 1))])
def test_ranks_leave_out_what_cannot_be_opened(data: int, spatial: tuple[int, ...]) -> None:
    options = {"batch": 4, "augment": EVERYTHING, "skip_bad": True}
    expected = losses(Unopened(7, 2), 1, (), False, options)
    for found in run_on(2, losses, Unopened(7, 2), data, spatial, True, options):
        assert found == pytest.approx(expected, rel=1e-5)


def labels(data: int) -> list[list[int]]:
    mesh = mural.init(data=data)
    samples = [Sample(s.name, s.image, i) for i, s in enumerate(pictures(5))]
    loader = Loader(samples, mesh, batch=3, shuffle=False, needs=Needs(mesh, by_window=True))
    return [batch.target.tolist() for batch in loader.epoch(0)]


def test_every_rank_has_all_labels() -> None:
    assert run_on(2, labels, 2) == [[[0, 1, 2], [3, 4]]] * 2

"""The loader gives the same batches on every plan, bit for bit, and the same errors on every rank."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mural
from mural.data.image_sample import Sample
from mural.data.loading.augment import Augment
from mural.data.loading.label_range import LabelRange
from mural.data.loading.loader import Batch, Loader
from mural.data.sets.dataset import Dataset
from mural.data.sets.memory_sources import ArraySource, ComputedSource
from mural.errors import DataError
from mural.geometry import Box
from ranks import run_on

PLANS = [((2, 1), 1), ((1, 2), 1), ((), 2), ((2, 2), 1), ((2, 1), 2), ((), 4), ((1, 4), 1)]
EVERYTHING = Augment(brightness=0.2, contrast=0.3, gamma=0.4, channel_scale=0.2, channel_shift=0.1, noise=0.05)


def world(spatial: Sequence[int], data: int) -> int:
    return data * int(np.prod(spatial, dtype=int))


def pictures(
    count: int, size: tuple[int, ...] = (20, 24), channels: int = 3, dtype: torch.dtype = torch.uint8
) -> list[Sample]:
    """Random images with masks, the same in every process."""
    draw = torch.Generator().manual_seed(9)
    found: list[Sample] = []
    for i in range(count):
        image = torch.randint(0, 120, (channels, *size), generator=draw).to(dtype)
        found.append(Sample(f"picture {i}", image, torch.randint(0, 4, size, generator=draw).to(torch.uint8)))
    return found


class Broken(ArraySource):
    """A source of which one row cannot be read."""

    def __init__(self, array: Tensor, name: str, row: int):
        super().__init__(array, name)
        self.row = row

    def read(self, box: Any = None, level: int = 0) -> Tensor:
        if box is not None and box[1][0] <= self.row < box[1][1]:
            raise DataError(f"{self.name}: the tile of row {self.row} is damaged: write the file again", self.name, box)
        return super().read(box, level)


def damaged(count: int, bad: Sequence[int], row: int = 15) -> list[Sample]:
    return [
        Sample(s.name, Broken(s.image, s.name, row), s.target) if i in bad else s for i, s in enumerate(pictures(count))
    ]


def digest(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    shown = f"{tuple(tensor.shape)} {tensor.dtype} "
    return shown + hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def digests(batch: Batch) -> tuple[Any, ...]:
    target = None if batch.target is None else batch.target.full()
    return digest(batch.image.full()), digest(target), batch.names, batch.step


def load(samples: Any, spatial: Sequence[int], data: int, options: dict[str, Any], epoch: int = 1) -> Any:
    """What a rank gets of an epoch: every batch gathered, as digests; or the error."""
    mesh = mural.init(spatial=spatial, data=data)
    loader = Loader(samples, mesh, **options)
    try:
        batches = [digests(batch) for batch in loader.epoch(epoch)]
    except DataError as error:
        return str(error), error.name
    return batches, [(b.index, b.name) for b in loader.bad]


def alone(samples: Any, options: dict[str, Any], epoch: int = 1) -> Any:
    return load(samples, (), 1, options, epoch)


CASES: dict[str, tuple[list[Sample], dict[str, Any]]] = {
    "masks": (pictures(7), {"batch": 3, "augment": EVERYTHING, "mean": (0.2, 0.3, 0.4), "std": (0.5, 0.6, 0.7)}),
    "aligned": (pictures(3, (40, 40)), {"batch": 2, "augment": EVERYTHING, "align": 8, "prefetch": 0}),
    "volumes": (pictures(3, (6, 10, 10), 1, torch.int16), {"batch": 2, "augment": EVERYTHING, "dtype": torch.float64}),
    "sizes": (
        pictures(2) + pictures(2, (30, 18)),
        {"augment": Augment(swap=True, noise=0.1), "pad_to": 8, "pad_target": -100, "workers": 3},
    ),
    "crops": (pictures(2, (18, 40)) + pictures(2, (40, 18)), {"batch": 4, "crop": (24, 24), "augment": EVERYTHING}),
    "labels": ([Sample(s.name, s.image, i) for i, s in enumerate(pictures(5))], {"batch": 4}),
    "values": ([Sample(s.name, s.image, 0.5 * i) for i, s in enumerate(pictures(3))], {"batch": 2}),
    "vectors": ([Sample(s.name, s.image, torch.tensor([i, 1])) for i, s in enumerate(pictures(3))], {"batch": 2}),
    "alone": ([Sample(s.name, s.image) for s in pictures(3)], {"batch": 2, "shuffle": False}),
    "channel masks": (
        [Sample(s.name, s.image, s.image[:2] // 100) for s in pictures(3)],
        {"batch": 2, "mask": "channels", "augment": Augment()},
    ),
    "float masks": (pictures(3), {"batch": 2, "mask": "values", "scale": (10, 20), "labels": {3: 7}}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_plan_gives_the_same_bits(case: str, ranks: int) -> None:
    samples, options = CASES[case]
    expected = alone(samples, options)
    assert len(expected[0]) == -(-len(samples) // options.get("batch", 1))
    for spatial, data in PLANS:
        if world(spatial, data) == ranks:
            for found in run_on(ranks, load, samples, spatial, data, options):
                assert found == expected, (spatial, data)


def test_batches_are_the_whole_images_scaled_turned_and_normalised() -> None:
    samples = pictures(5)
    loader = Loader(samples, mural.init(), batch=2, seed=3, augment=Augment(contrast=0.5), mean=(0.5,), std=(2.0,))
    order = [int(name.split()[1]) for batch in loader.epoch(4) for name in batch.names]
    assert sorted(order) == list(range(5))
    assert order == list(loader.order(4)) != list(loader.order(5))
    for k, batch in enumerate(loader.epoch(4)):
        for place, index in enumerate(order[2 * k : 2 * k + 2]):
            drawn = Augment(contrast=0.5).draw(3, 4, index, 3, (20, 24))
            image = drawn.turn.apply(samples[index].image.float() / 255)
            image = image * torch.tensor(drawn.gain)[:, None, None] + torch.tensor(drawn.offset)[:, None, None]
            assert torch.allclose(batch.image.local[place], (image - 0.5) / 2.0, atol=1e-6)
            assert torch.equal(batch.target.local[place], drawn.turn.apply(samples[index].target.long()))


def test_a_resumed_epoch_reads_nothing_of_the_earlier_steps() -> None:
    samples = pictures(7)
    read: list[str] = []

    class Watched:
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, index: int) -> Sample:
            read.append(samples[index].name)
            return samples[index]

    loader = Loader(Watched(), mural.init(), batch=2, augment=EVERYTHING)
    whole = [digests(b) for b in loader.epoch(2)]
    read.clear()
    assert [digests(b) for b in loader.epoch(2, start=2)] == whole[2:]
    assert sorted(read) == sorted(name for _, _, names, _ in whole[2:] for name in names)
    assert list(loader.epoch(2, start=4)) == []
    with pytest.raises(DataError, match="steps 0 to 3"):
        loader.epoch(2, start=5)


def pieces(samples: Any, spatial: Sequence[int], data: int, options: dict[str, Any]) -> list[Any]:
    """Placement and counted bytes of a rank's pieces; the same as `mural.shard` would cut."""
    mesh = mural.init(spatial=spatial, data=data)
    found: list[Any] = []
    for batch in Loader(samples, mesh, shuffle=False, **options).epoch(0):
        image = mural.shard(batch.image.full(), mesh, align=options.get("align", 1))
        target = mural.shard(batch.target.full(), mesh, dims=(1, 2), align=options.get("align", 1))
        assert batch.image.placement == image.placement
        assert batch.target.placement == target.placement
        found.append(tuple(batch.image.local.shape))
    return [*found, sum(s.image.counter.bytes_decoded for s in samples)]


def test_placement_is_that_of_shard_and_each_rank_reads_only_its_box() -> None:
    samples = [Sample(s.name, ArraySource(s.image, s.name), s.target) for s in pictures(3, (32, 16))]
    found = run_on(4, pieces, samples, (2, 1), 2, {"batch": 2, "align": 8})
    assert [f[:-1] for f in found] == [
        [(1, 3, 16, 16), (1, 3, 16, 16)],
        [(1, 3, 16, 16), (1, 3, 16, 16)],
        [(1, 3, 16, 16), (0, 3, 16, 16)],
        [(1, 3, 16, 16), (0, 3, 16, 16)],
    ]
    assert [f[-1] for f in found] == [2 * 3 * 16 * 16] * 2 + [3 * 16 * 16] * 2


def labels_lie_as_shard_puts_them(data: int, spatial: Sequence[int]) -> bool:
    mesh = mural.init(data=data, spatial=spatial)
    samples = [Sample(s.name, s.image, i) for i, s in enumerate(pictures(3))]
    (batch,) = Loader(samples, mesh, batch=3).epoch(0)
    expected = mural.shard(batch.target.full(), mesh, dims=())
    return expected.placement == batch.target.placement and torch.equal(expected.local, batch.target.local)


def test_labels_lie_as_shard_puts_them() -> None:
    assert all(run_on(4, labels_lie_as_shard_puts_them, 2, (2, 1)))


def train(samples: Any, spatial: Sequence[int], data: int, batch: int) -> list[float]:
    """Losses of a few steps of a small model on what the loader gives."""
    mesh = mural.init(spatial=spatial, data=data)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3, padding=1),
        torch.nn.BatchNorm2d(6),
        torch.nn.ReLU(),
        torch.nn.Conv2d(6, 4, 3, padding=1),
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for step in Loader(samples, mesh, batch=batch, augment=EVERYTHING, dtype=torch.float64).epoch(0):
        loss = F.cross_entropy(model(step.image), step.target)
        optimizer.zero_grad()
        loss.backward()
        mural.reduce_gradients(model, mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_with_an_uneven_last_batch_is_that_of_one_rank() -> None:
    """The last batch has one image: on two data ranks, one of them holds an empty piece."""
    samples = pictures(5)
    expected = train(samples, (), 1, 2)
    for spatial, data in (((), 2), ((2, 1), 2)):
        for found in run_on(world(spatial, data), train, samples, spatial, data, 2):
            assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("spatial", "data"), [((2, 1), 1), ((2, 1), 2), ((), 2)])
def test_a_bad_read_raises_the_same_error_on_every_rank(spatial: tuple[int, ...], data: int) -> None:
    ranks = world(spatial, data)
    found = run_on(ranks, load, damaged(6, [2]), spatial, data, {"batch": 2, "shuffle": False})
    assert len(set(found)) == 1
    text, name = found[0]
    assert name == "picture 2"
    bottom = "((10, 20), (0, 24))" if spatial else "((0, 20), (0, 24))"
    rank = 1 if spatial else 0
    for part in (f"rank {rank} could not read picture 2, box {bottom}", "damaged: write the file again", "skip_bad"):
        assert part in text


@pytest.mark.parametrize(("spatial", "data"), [((), 1), ((2, 1), 1), ((), 2), ((2, 1), 2), ((2, 2), 1)])
def test_bad_samples_are_left_out_alike_under_every_plan(spatial: tuple[int, ...], data: int) -> None:
    """Sample 1 is bad in a full batch, 4 and 5 are a whole batch, and 6 is the last, uneven one."""
    samples, options = damaged(7, [1, 4, 5]), {"batch": 2, "shuffle": False, "skip_bad": True}
    good = alone(pictures(7), {"batch": 2, "shuffle": False})[0]
    found = [load(samples, spatial, data, options)] if not spatial and data == 1 else []
    for batches, bad in found or run_on(world(spatial, data), load, samples, spatial, data, options):
        assert [(names, step) for _, _, names, step in batches] == [
            (("picture 0",), 0),
            (("picture 2", "picture 3"), 1),
            (("picture 6",), 3),
        ]
        assert [batches[1], batches[2]] == [good[1], good[3]]
        assert bad == [(1, "picture 1"), (4, "picture 4"), (5, "picture 5")]


def skipped_twice(samples: Any) -> tuple[list[list[int]], list[str], str]:
    mesh = mural.init(spatial=(2, 1))
    loader = Loader(samples, mesh, batch=2, skip_bad=True)
    epochs = [[batch.image.shape[0] for batch in loader.epoch(e)] for e in (0, 1)]
    return epochs, [bad.reason for bad in loader.bad], loader.summary()


def test_a_bad_sample_is_listed_once_and_not_read_again() -> None:
    for epochs, reasons, summary in run_on(2, skipped_twice, damaged(5, [3])):
        assert [sum(counts) for counts in epochs] == [4, 4]
        assert len(reasons) == 1
        assert "rank 1" in reasons[0]
        assert "row 15 is damaged" in reasons[0]
        assert "1 of 5 samples were left out" in summary
        assert "picture 3" in summary


def test_an_epoch_without_a_good_sample_is_an_error() -> None:
    for text, _ in run_on(2, load, damaged(3, [0, 1, 2]), (2, 1), 1, {"skip_bad": True}):
        assert "no sample could be read" in text
        assert "picture 1" in text


class Failing:
    """A dataset of the user's own that fails in its own code, or is a plain list of pairs."""

    def __init__(self, error: type[BaseException] | None):
        self.error, self.samples = error, pictures(4)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == 3 and self.error is not None:
            raise self.error("of my own")
        return (self.samples[index].image, self.samples[index].target)


def test_a_dataset_of_the_users_own() -> None:
    expected = alone(Failing(None), {"batch": 2, "shuffle": False})
    assert [names for *_, names, _ in expected[0]] == [("sample 0", "sample 1"), ("sample 2", "sample 3")]
    for found in run_on(4, load, Failing(None), (2, 1), 2, {"batch": 2, "shuffle": False}):
        assert found == expected
    for text, _ in run_on(4, load, Failing(KeyError), (2, 1), 2, {"batch": 2, "shuffle": False}):
        assert "rank 2 could not read sample 3: KeyError: 'of my own'" in text
    for text, _ in run_on(4, load, Failing(MemoryError), (2, 1), 2, {"batch": 2, "skip_bad": True}):
        assert "MemoryError" in text  # says nothing about the sample: not to be skipped


def test_names_travel_where_only_their_rank_knows_them() -> None:
    plain = list(pictures(4))  # a list has no method `name`
    for found, _ in run_on(2, load, plain, (), 2, {"batch": 4, "shuffle": False}):
        assert found[0][2] == ("picture 0", "picture 1", "picture 2", "picture 3")


def test_images_of_two_sizes_in_one_batch_are_named() -> None:
    samples = [
        *pictures(1),
        Sample("other", *(v[..., :20, :15] for v in (pictures(1)[0].image, pictures(1)[0].target))),
    ]
    options = {"batch": 2, "shuffle": False}
    texts = {alone(samples, options)[0], *(text for text, _ in run_on(2, load, samples, (), 2, options))}
    (text,) = texts
    assert "picture 0 is (3, 20, 24)" in text
    assert "other is (3, 20, 15)" in text
    assert "batch=1" in text
    assert "crop=(20, 15)" in text


def different(options: Sequence[dict[str, Any]], counts: Sequence[int]) -> str:
    mesh = mural.init(spatial=(2, 1))
    with pytest.raises(DataError) as caught:
        list(Loader(Dataset.of(pictures(counts[mesh.rank])), mesh, **options[mesh.rank]).epoch(0))
    return str(caught.value)


def test_ranks_that_see_different_files_are_told() -> None:
    for text in run_on(2, different, ({"batch": 4}, {"batch": 4}), (5, 6)):
        assert "the most are 6, the fewest 5" in text
    for text in run_on(2, different, ({"batch": 4}, {"batch": 3}), (5, 5)):
        assert "the ranks have different datasets or settings" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"workers": 0}, "workers=0"),
        ({"dtype": torch.int64}, "floating"),
        ({"mask": "labels"}, "'classes', 'values', 'channels'"),
        ({"std": (1.0, 0.0, 1.0)}, "above 0"),
        ({"mean": (0.5, 0.5)}, "has 2 numbers, but the image 3 channels"),
        ({"crop": (8, 8, 8)}, "crop=(8, 8, 8)"),
        ({"level": 1}, "level 1"),
        ({"scale": "unit"}, "'range'"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        list(Loader(pictures(1), mural.init(), **options).epoch(0))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.zeros(10, 24), "spatial extents (10, 24), but its image"),
        (torch.zeros(3, 20, 24), "3 channels"),
        (torch.full((20, 24), 0.5), "fractions"),
        (["a", "list"], "is not a path"),
        (Path("nowhere.png"), "nowhere.png"),
    ],
)
def test_masks_that_do_not_fit_are_named(target: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        list(Loader([Sample("picture", pictures(1)[0].image, target)], mural.init()).epoch(0))
    assert words in str(caught.value)


def test_integer_images_are_scaled_by_the_range_of_their_type() -> None:
    for dtype, values, expected in (
        (torch.uint8, (0, 255), (0, 1)),
        (torch.uint16, (0, 65535), (0, 1)),
        (torch.int16, (-32768, 32767), (0, 1)),
        (torch.float32, (-2.5, 7), (-2.5, 7)),
        (torch.bool, (0, 1), (0, 1)),
    ):
        image = torch.tensor(values).to(dtype).view(1, 1, 2)
        (batch,) = Loader([Sample("two", image)], mural.init()).epoch(0)
        assert batch.image.local.flatten().tolist() == list(expected)
        assert batch.target is None


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.int16])
def test_images_and_masks_of_16_and_more_bits_are_flipped_and_their_labels_checked(dtype: torch.dtype) -> None:
    """Torch neither flips unsigned types of more than 8 bits nor finds their largest value."""
    image = torch.arange(64).view(1, 8, 8)
    samples = [Sample("many bits", image.to(dtype), (image % 3).to(dtype))]
    flips = Augment(flips=True, rotations=False)
    labels = [LabelRange(3), LabelRange(2)]
    fine, wrong = (Loader(samples, mural.init(), scale=None, augment=flips, label_range=each) for each in labels)
    batches = [batch for epoch in range(4) for batch in fine.epoch(epoch)]
    assert len({tuple(batch.image.local.flatten().tolist()) for batch in batches}) > 1
    assert all(torch.equal(batch.target.local[0], batch.image.local[0, 0].long() % 3) for batch in batches)
    with pytest.raises(DataError, match="the mask holds the value 2"):
        list(wrong.epoch(0))


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("mural-reader")]


def interrupted(loader: Loader) -> None:
    for _ in loader.epoch(0):
        raise KeyboardInterrupt


def test_threads_end_when_the_loop_is_left() -> None:
    loader = Loader(pictures(20), mural.init(), prefetch=4, workers=3)
    cores = torch.get_num_threads()
    for _ in loader.epoch(0):
        assert len(readers()) == 3
        break
    assert not readers()
    with pytest.raises(KeyboardInterrupt):
        interrupted(loader)
    gc.collect()
    assert not readers()
    running = loader.epoch(0)
    next(running)
    running.close()
    assert not readers()
    assert torch.get_num_threads() == cores
    assert len(list(loader.epoch(0))) == 20


def test_closing_does_not_wait_for_what_is_queued() -> None:
    def slow(box: Box) -> Tensor:
        time.sleep(0.2)
        return torch.zeros([i.size for i in box])

    samples = [Sample(str(i), ComputedSource(slow, (1, 8, 8), torch.float32)) for i in range(50)]
    running = Loader(samples, mural.init(), prefetch=40, workers=1).epoch(0)
    next(running)
    start = time.perf_counter()
    running.close()
    assert time.perf_counter() - start < 2
    assert not readers()


LEFT_OPEN = """
import sys, time, torch, mural
from mural.data import ComputedSource, Loader, Sample

def slow(box):
    time.sleep(0.2)
    return torch.zeros([i.size for i in box])

samples = [Sample(str(i), ComputedSource(slow, (1, 8, 8), torch.float32)) for i in range(50)]
running = Loader(samples, mural.init(), prefetch=40, workers=1).epoch(0)
sys.running = running  # still there when the interpreter ends
next(running)
print(time.time())
"""


def test_a_program_that_ends_in_an_epoch_does_not_wait_for_what_is_queued() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.time() - float(done.stdout) < 6  # what is queued takes 8 s


def test_reading_runs_ahead_and_stops_at_the_prefetch() -> None:
    begun: list[int] = []

    class Counting:
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Sample:
            begun.append(index)
            return Sample(str(index), torch.zeros(1, 4, 4))

    running = Loader(Counting(), mural.init(), shuffle=False, prefetch=3).epoch(0)
    for k in range(5):
        next(running)
        deadline = time.perf_counter() + 10
        while len(begun) < k + 4 and time.perf_counter() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert sorted(begun) == list(range(k + 4))
    running.close()


def test_waiting_is_measured() -> None:
    finished: list[float] = []

    def slow(box: Box) -> Tensor:
        time.sleep(0.2)
        finished.append(time.perf_counter())
        return torch.zeros([i.size for i in box])

    samples = [Sample(str(i), ComputedSource(slow, (1, 8, 8), torch.float32)) for i in range(3)]
    waits = [batch.waited for batch in Loader(samples, mural.init(), prefetch=0).epoch(0)]
    assert all(wait > 0.19 for wait in waits)
    finished.clear()
    for k, batch in enumerate(Loader(samples, mural.init(), prefetch=2).epoch(0)):
        assert k == 0 or batch.waited < 0.19
        while len(finished) < 3:  # the training computes meanwhile
            time.sleep(0.01)


def test_several_workers_read_parts_of_one_image() -> None:
    seen: dict[int, list[Box]] = {}

    def compute(box: Box) -> Tensor:
        seen.setdefault(threading.get_ident(), []).append(box)
        time.sleep(0.05)
        return torch.zeros([i.size for i in box], dtype=torch.uint8)

    image = ComputedSource(compute, (1, 1024, 1024), torch.uint8)
    list(Loader([Sample("large", image)], mural.init(), workers=3).epoch(0))
    assert len(seen) == 3
    parts = sorted(box[1] for found in seen.values() for box in found)
    assert [a.stop for a in parts[:-1]] == [b.start for b in parts[1:]]
    assert len(parts) == 3


def test_the_number_of_workers_changes_no_bit() -> None:
    samples = pictures(2, (1100, 1000), 1)
    found = [alone(samples, {"workers": n, "augment": EVERYTHING, "prefetch": n - 1}) for n in (1, 3)]
    assert found[0] == found[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_the_middle_of_an_epoch_hangs_nobody() -> None:
    running = Loader(pictures(9), mural.init(), prefetch=2).epoch(0)
    next(running)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        running.close()
        os._exit(7 if not readers() else 8)
    for _ in range(200):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 7
    assert len(list(running)) == 8


def test_levels_are_read_with_the_mask_that_fits() -> None:
    class Pyramid(ArraySource):
        def __init__(self, array: Tensor, name: str):
            super().__init__(array, name)
            small = self.values[:, ::2, ::2]
            self.below = ArraySource(small, name)
            self.levels = (*self.levels, *(level for level in self.below.levels))

        def read(self, box: Any = None, level: int = 0) -> Tensor:
            return self.below.read(box) if level else super().read(box)

    sample = pictures(1)[0]
    for mask in (Pyramid(sample.target, "mask"), sample.target[::2, ::2]):
        (batch,) = Loader([Sample("p", Pyramid(sample.image, "p"), mask)], mural.init(), level=1).epoch(0)
        assert torch.equal(batch.image.local[0], sample.image[:, ::2, ::2].float() / 255)
        assert torch.equal(batch.target.local[0], sample.target[::2, ::2].long())

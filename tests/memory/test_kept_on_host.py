"""Values kept on the host: bands of rows that leave and come back, and gradients whose windows overlap."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_copies import LateMemory
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.engine.streamed import Streamed
from mural.geometry import Interval
from mural.memory.choice import Room, Speeds
from mural.memory.host_memory import HostMemory
from mural.memory.host_tensor import HostTensor
from mural.memory.joined_passes import joined_passes
from mural.memory.read_plan import Read
from mural.models import UNet
from streamed_law import check_steps, differences, images, streamed, wrong
from streamed_losses import both

CPU = torch.device("cpu")
AXES = ("data", None, "spatial0", "spatial1")


def box(images: tuple[int, int], rows: tuple[int, int]) -> tuple[Interval, ...]:
    return Interval(*images), Interval(0, 3), Interval(*rows), Interval(0, 5)


@given(
    rows=st.integers(1, 24), band=st.integers(1, 9), halo=st.integers(0, 4), passes=st.integers(1, 3),
    room=st.sampled_from([0, 600, 2000, 8000, 10**6]), late=st.none() | st.integers(0, 99), data=st.data(),
)  # fmt: skip
def test_windows_and_their_gradients(
    rows: int, band: int, halo: int, passes: int, room: int, late: int | None, data: st.DataObject
) -> None:
    """What is read is what was written, and gradients of overlapping windows add up, also over several passes: down
    the image and up, with bands that stay on the device and without, and however late copies are.
    """
    whole = torch.rand(2, 3, rows, 5, dtype=torch.float64)
    memory = HostMemory(CPU) if late is None else LateMemory(late)
    memory.begin(room)
    kept = HostTensor(box((0, 2), (0, rows)), AXES, memory, passes)

    def bands_of(size: int) -> list[tuple[int, int, int]]:
        found = [(n, a, min(rows, a + size)) for n in range(2) for a in range(0, rows, size)]
        return found[::-1] if memory.bands.sweeps % 2 else found

    bands = bands_of(band)
    memory.begin_sweep([])
    for n, a, b in bands:
        kept.write(box((n, n + 1), (a, b)), whole[n : n + 1, :, a:b])
        memory.end_tile()
    true = torch.zeros_like(whole)
    for _ in range(passes):
        sizes = bands_of(data.draw(st.integers(1, 9)))
        windows = [(n, max(0, a - halo), min(rows, b + halo)) for n, a, b in sizes]
        boxes = [box((n, n + 1), (a, b)) for n, a, b in windows]
        kept.plan(boxes)
        memory.begin_sweep(kept.reads_ahead(boxes, adds=True))
        for (n, a, b), place in zip(windows, boxes, strict=True):
            assert kept.read(place).equal(whole[n : n + 1, :, a:b])
            grad = torch.rand(1, 3, b - a, 5, dtype=torch.float64)
            true[n : n + 1, :, a:b] += grad
            kept.add_gradient(place, grad)
            memory.end_tile()
            memory.look_ahead()
        kept.end_pass()
        assert sum(0 if held.part is None else held.part.size for held in memory.bands.bands) <= room
    bands = bands_of(band)
    boxes = [box((n, n + 1), (a, b)) for n, a, b in bands]
    memory.begin_sweep(kept.gradients_ahead(boxes))
    for (n, a, b), place in zip(bands, boxes, strict=True):
        found = kept.gradient(place)
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, true[n : n + 1, :, a:b])
        memory.end_tile()
        memory.look_ahead()
    kept.drop()
    assert not memory.bands.bands
    assert sum(gap.stop - gap.start for gap in memory.bands.gaps) == memory.bands.room
    assert len(memory.bands.gaps) <= 1


def bands_of(owner: HostTensor, sizes: int = 2) -> list[list[Read]]:
    """The reads of a sweep down 16 rows."""
    return owner.reads_ahead([box((0, 1), (a, a + sizes)) for a in range(0, 16, sizes)], adds=False)


def test_what_was_written_last_need_not_come_back() -> None:
    """A sweep up the image finds the newest bands; those that it has read make room for its own."""
    memory = HostMemory(CPU)
    memory.begin(4 * 512)
    first, second = (HostTensor(box((0, 1), (0, 16)), AXES, memory, 2) for _ in range(2))
    for number, kept in enumerate((first, second)):
        places = [box((0, 1), (a, a + 2)) for a in range(0, 16, 2)]
        order = places[::-1] if number else places
        memory.begin_sweep([*bands_of(first)[::-1], *bands_of(second)] if number else [[]] * 8 + bands_of(first)[::-1])
        for place in order:
            if number:
                assert first.read(place).eq(place[2].start).all()
            kept.write(place, torch.full((1, 3, 2, 5), float(place[2].start), dtype=torch.float64))
            memory.end_tile()
        there = [(held.owner is first.values, held.at.start) for held in memory.bands.bands]
        # The band that the last tile reads stays until it has ended.
        last = [(False, 4), (False, 2), (True, 0), (False, 0)]
        assert there == (last if number else [(True, a) for a in (8, 10, 12, 14)])


def here(memory: HostMemory) -> list[int]:
    """The first rows of the bands on the device."""
    return sorted(held.at.start for held in memory.bands.bands)


def test_what_was_read_last_is_read_first_by_the_next_sweep() -> None:
    """A sweep down and one up read the same value: the bands that the first one has read last stay for the second."""
    memory = HostMemory(CPU)
    kept = HostTensor(box((0, 1), (0, 16)), AXES, memory, 2)
    kept.write(box((0, 1), (0, 16)), torch.arange(16.0).double()[:, None].expand(1, 3, 16, 5))
    memory.begin(4 * 512)
    down = bands_of(kept)
    memory.begin_sweep([*down, *down[::-1]])
    assert here(memory) == [0, 2, 4, 6]  # as far as there is room
    for (read,) in down:
        assert read.rows.read(0, read.at)[0, 0, 0] == read.at.start
        memory.end_tile()
        memory.look_ahead()
    assert here(memory) == [8, 10, 12, 14]


def test_the_next_sweep_begins_with_what_came_before() -> None:
    """What the next sweep reads is brought when this one has all that it needs, the first rows first; not what this one
    writes; and what is needed sooner stays.
    """
    memory = HostMemory(CPU)
    first, second = (HostTensor(box((0, 1), (0, 16)), AXES, memory, 1) for _ in range(2))
    for kept in (first, second):
        kept.write(box((0, 1), (0, 16)), torch.zeros(1, 3, 16, 5, dtype=torch.float64))
    memory.begin(4 * 512)
    this, after = bands_of(first)[4:], bands_of(second)
    memory.begin_sweep([*this, *([read._replace(settled=read.at.start > 2) for read in tile] for tile in after)])
    brought = [(held.owner is first.values, held.at.start) for held in memory.bands.bands]
    assert brought == [(True, a) for a in (8, 10, 12, 14)]
    for (read,) in this:
        read.rows.read(0, read.at)
        memory.end_tile()
        memory.look_ahead()
    assert [(held.owner is first.values, held.at.start) for held in memory.bands.bands] == [
        (False, a) for a in (4, 6, 8, 10)
    ]
    memory.begin_sweep(after)
    assert here(memory) == [0, 2, 4, 6]  # now they are settled, and come first


def test_room_for_what_a_tile_writes_is_left() -> None:
    """What was brought ahead would have to make room for it, and come again."""
    memory = HostMemory(CPU)
    kept, made = (HostTensor(box((0, 1), (0, 16)), AXES, memory, 1) for _ in range(2))
    kept.write(box((0, 1), (0, 16)), torch.zeros(1, 3, 16, 5, dtype=torch.float64))
    memory.begin(4 * 512)
    memory.begin_sweep([[], *bands_of(kept)])
    made.write(box((0, 1), (0, 2)), torch.zeros(1, 3, 2, 5, dtype=torch.float64))
    memory.end_tile()
    memory.look_ahead()
    assert [held.at.start for held in memory.bands.bands if held.owner is kept.values] == [0, 2, 4]


@pytest.mark.parametrize("room", [0, 60_000])
def test_steps_with_values_on_the_host(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law holds where all kept values are on the host, or those for which the device has no room."""
    fast = Speeds(link=1e15, memory=1e10, flops=1e10)
    monkeypatch.setattr(Streamed, "_room", lambda *_: Room(room, 10**12, 8, fast, bands=3000))
    model = UNet(in_channels=2, width=2, depth=2, classes=3).double()
    target = torch.randint(0, 3, (2, 40, 36), generator=torch.Generator().manual_seed(3))
    check_steps(model, both, [(x, target) for x in images(2, (40, 36))], mural.Plan(stream=(12, 10)))
    pm = mural.parallelize(model, mural.Plan(stream=(12, 10)), both)
    pm.step(images(2, (40, 36), 1)[0], target)
    (program,) = pm.way.programs.values()  # type: ignore[union-attr]
    assert bool(program.kept.host)
    assert (room > 0) == bool(program.kept.values - program.kept.host)


LATE = [(40_000, 33, 1), *(pytest.param(*case, marks=pytest.mark.slow)
                           for case in ((0, 40, 1), (20_000, 52, 2), (200_000, 40, 2)))]  # fmt: skip


@pytest.mark.parametrize(("bands", "rows", "count"), LATE)
def test_late_copies_change_no_bit(bands: int, rows: int, count: int) -> None:
    """A step has the same gradients, bit by bit, however late copies are: with little room for bands and much, odd
    numbers of tiles, several images, and passes that go back together.
    """
    model = UNet(in_channels=2, width=4, depth=2, classes=3).double()
    x, target = images(count, (rows, 36), 1)[0], torch.randint(3, (count, rows, 36))
    found: list[list[Tensor]] = []
    for late in (None, 1, 2, 3):
        pm = streamed(model, F.cross_entropy, mural.Plan(stream=(12, 12)), "host")
        pm.way._room = lambda: Room(0, 2**40, 8, Speeds(link=3e9, memory=1e11, flops=1e12), bands=bands)
        pm.way.hosted = HostMemory(CPU) if late is None else LateMemory(late)
        loss = pm.step(x, target)
        (program,) = pm.way.programs.values()
        assert joined_passes(program.passes).found
        found.append([loss, *(p.grad for p in pm.parameters())])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@given(rows=st.integers(8, 30), step=st.integers(2, 5), passes=st.integers(1, 2), data=st.data())
def test_rows_that_no_window_reads_have_no_gradient(rows: int, step: int, passes: int, data: st.DataObject) -> None:
    """They had whatever was in the memory before: between windows of a strided layer, and where tiles are left out."""
    memory = HostMemory(CPU)
    for _ in range(2):  # the second takes the memory of the first
        kept = HostTensor(box((0, 1), (0, rows)), AXES, memory, passes)
        true = torch.zeros(1, 3, rows, 5, dtype=torch.float64)
        for _ in range(passes):
            starts = [a for a in range(0, rows - 1, step) if data.draw(st.booleans())]
            boxes = [box((0, 1), (a, a + 1 + a % 2)) for a in starts]
            kept.plan(boxes)
            for place in boxes:
                grad = torch.rand(1, 3, place[2].size, 5, dtype=torch.float64)
                true[:, :, place[2].start : place[2].stop] += grad
                kept.add_gradient(place, grad)
            kept.end_pass()
        found = kept.gradient(box((0, 1), (0, rows)))
        assert found is None or found.allclose(true)
        assert found is not None or not true.any()
        if kept.grads.there:
            kept.grads.rows.fill_(torch.nan)
        kept.drop()


class Strided(nn.Module):
    """Every third row is read, by a convolution and a norm that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 1, stride=3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.first(x))
        return self.norms[1](self.second(x)) + self.norms[1](self.second(x)).square()


@pytest.mark.parametrize("left_out", [False, True])
def test_steps_that_do_not_read_all_rows(left_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients were not numbers, or wrong by 17,000 times: rows between windows, and tiles of an ignored class."""
    fast = Speeds(link=1e15, memory=1e10, flops=1e10)
    monkeypatch.setattr(Streamed, "_room", lambda *_: Room(0, 10**12, 8, fast))
    model: nn.Module = UNet(in_channels=2, width=2, depth=1, classes=3) if left_out else Strided()
    target = torch.randint(0, 3, (2, 41, 38) if left_out else (2, 14, 13), generator=torch.Generator().manual_seed(4))
    if left_out:
        target[0, 10:30], target[1, :20], target[1, 33:] = 7, 7, 7
    batches = [(x, target) for x in images(2, (41, 38))]
    loss = partial(F.cross_entropy, ignore_index=7)
    check_steps(model.double(), loss, batches, mural.Plan(stream=(4, 38) if left_out else (7, 5)))


def test_hooks_see_the_gradient_of_the_whole_step() -> None:
    """They saw that of each tile before, so one that clips gave other gradients."""
    model, calls = nn.Conv2d(3, 3, 3, padding=1), list[str]()
    model.weight.register_hook(lambda grad: calls.append("hook") or grad.clamp(max=1e-4))
    model.weight.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    pm = mural.parallelize(model, mural.Plan(stream=(8, 8)))
    pm.step(torch.rand(1, 3, 24, 24), torch.randint(0, 3, (1, 24, 24)))
    assert calls == ["hook", "after"]
    assert model.weight.grad is not None
    assert float(model.weight.grad.max()) <= 1e-4


class Switched(nn.Module):
    """A model that makes other calls once it is switched."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(n, 3, 3, padding=1) for n in (2, 3, 3))
        self.norms, self.more = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3)), False

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).sin() if self.more else norm(conv(x))
        return x


def test_a_model_that_changes_is_found_before_it_has_an_effect() -> None:
    """With values on the host, that is found while the step goes on: norms learn once, and gradients are those of the
    model as it is.
    """
    torch.manual_seed(0)
    plain = Switched().double()
    pm = streamed(plain, F.cross_entropy, mural.Plan(stream=(8, 8)), "host")
    x, target = images(1, (32, 32), 1)[0], torch.randint(3, (1, 32, 32))
    for more in (False, False, True, True):
        plain.more = pm.way.held.plain.more = more
        F.cross_entropy(plain(x), target).backward()
        pm.step(x, target)
        assert not wrong(differences(pm, plain, F.cross_entropy, []))

"""Writing piece by piece: exact whatever the pieces, from one process and from several ranks, complete or not there."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import mural
import mural.data
from mural.data.writing.rims import Rims
from mural.errors import DataError, MuralError
from mural.geometry import Interval
from ranks import restart, run_on

NAMES = ("out.ome.zarr", "out.tif")
Pieces = Sequence[tuple[tuple[int, int], ...]]


def pixels(shape: Sequence[int], dtype: str) -> np.ndarray:
    return np.random.default_rng(prod(shape)).integers(0, 250, tuple(shape)).astype(dtype)


def pieces(shape: Sequence[int], draw: random.Random, count: int) -> list[tuple[tuple[int, int], ...]]:
    """Boxes that divide an image, none of them where a chunk would like it."""
    found = [tuple((0, n) for n in shape)]
    while len(found) < count:
        box = found.pop(draw.randrange(len(found)))
        dim = draw.choice([d for d, (a, b) in enumerate(box) if b - a > 1] or [0])
        at = draw.randint(box[dim][0], box[dim][1])
        found += [(*box[:dim], (box[dim][0], at), *box[dim + 1 :]), (*box[:dim], (at, box[dim][1]), *box[dim + 1 :])]
    draw.shuffle(found)
    return found


def write(writer: mural.data.Writer, data: np.ndarray, boxes: Pieces) -> None:
    for box in boxes:
        writer.write(box, torch.from_numpy(data[tuple(slice(*pair) for pair in box)]))


def read(path: Path) -> np.ndarray:
    with mural.data.open(path, axes=None) as source:
        return source.read().numpy()


@given(st.data())
@settings(max_examples=25)
def test_any_pieces_of_one_process(drawn: Any) -> None:
    depth = drawn.draw(st.sampled_from(((), (5,))))
    shape = (drawn.draw(st.integers(1, 4)), *depth, drawn.draw(st.integers(2, 80)), drawn.draw(st.integers(2, 80)))
    dtype = drawn.draw(st.sampled_from(("uint8", "uint16", "float32", "int32")))
    data, seed = pixels(shape, dtype), drawn.draw(st.integers(0, 1000))
    name = drawn.draw(st.sampled_from(NAMES))
    sizes = [st.integers(1, 3), *[st.integers(7, 40)] * (len(shape) - 1)]
    chunks = tuple(drawn.draw(size) for size in sizes) if name.endswith("zarr") else (16, 32)
    shard = None
    if name.endswith("zarr") and drawn.draw(st.booleans()):
        shard = tuple(min(c, n) * drawn.draw(st.integers(1, 2)) for c, n in zip(chunks, shape, strict=True))
    boxes = pieces(shape, random.Random(seed), drawn.draw(st.integers(1, 12)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        with mural.data.create(path, shape, dtype, chunks=chunks, shard=shard) as writer:
            write(writer, data, boxes)
            assert not path.exists()
        found = read(path)
        assert np.array_equal(found.reshape(shape), data)
        assert [p.name for p in Path(folder).iterdir()] == [name]


@pytest.mark.parametrize("name", NAMES)
def test_later_pieces_of_a_process_count_and_the_rest_is_zero(tmp_path: Path, name: str) -> None:
    expected = np.zeros((1, 64, 70), np.uint8)
    with mural.data.create(tmp_path / name, expected.shape, torch.uint8, chunks=(1, 16, 16)) as writer:
        for value, box in enumerate(
            [((0, 1), (0, 40), (0, 40)), ((0, 1), (10, 50), (7, 33)), ((0, 1), (12, 14), (8, 9))], 1
        ):
            part = np.full([b - a for a, b in box], value, np.uint8)
            expected[tuple(slice(*pair) for pair in box)] = value
            writer.write(box, torch.from_numpy(part))
    assert np.array_equal(read(tmp_path / name), expected)


def test_others_read_what_is_written(tmp_path: Path) -> None:
    data = pixels((3, 50, 70), "uint8")
    for name in NAMES:
        with mural.data.create(tmp_path / name, data.shape, "uint8", chunks=(3, 16, 32)) as writer:
            write(writer, data, pieces(data.shape, random.Random(0), 5))
    assert np.array_equal(zarr.open_group(tmp_path / NAMES[0], mode="r")["0"][...], data)
    assert np.array_equal(tifffile.imread(tmp_path / NAMES[1]), np.moveaxis(data, 0, -1))


def test_rims_go_to_files_beyond_a_limit(tmp_path: Path) -> None:
    rims = Rims(np.dtype(np.uint8), tmp_path, ".rims-", limit=200)
    boxes = {(n,): (Interval(100 * n, 100 * n + 100),) for n in range(4)}
    for index, box in boxes.items():
        rim = rims.take(index, box)
        rim.paste((Interval(box[0].start, box[0].start + 10),), np.full(10, index[0] + 1, np.uint8))
        rims.keep(index, rim)
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 2
    for index, box in boxes.items():
        rim = rims.take(index, box)
        assert rim.pixels[:10].tolist() == [index[0] + 1] * 10
        assert rim.missing == ((Interval(box[0].start + 10, box[0].stop),),)
        assert rim.parts == ((Interval(box[0].start, box[0].start + 10),),)
    rims.close()
    assert not list(tmp_path.iterdir())


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.zarr"
    for shape, dtype, match in (
        ((3, 4), "uint8", "is not"),
        ((3, 0, 4), "uint8", "extents of at least 1"),
        ((3, 4, 4), torch.bfloat16, "bfloat16"),
    ):
        with pytest.raises(DataError, match=match):
            mural.data.create(path, shape, dtype)
    with mural.data.create(path, (3, 40, 50), "uint8") as writer:
        box = ((0, 3), (0, 4), (0, 5))
        for tensor in (torch.zeros(3, 4, 4, dtype=torch.uint8), torch.zeros(3, 4, 5)):
            with pytest.raises(DataError, match=r"does not fill box .*its shape must be \(3, 4, 5\)") as caught:
                writer.write(box, tensor)
            assert caught.value.box == box
        with pytest.raises(DataError, match="is not within the shape"):
            writer.write(((0, 3), (0, 41), (0, 5)), torch.zeros(3, 41, 5, dtype=torch.uint8))
    with pytest.raises(DataError, match="it was closed"):
        writer.write(box, torch.zeros(3, 4, 5, dtype=torch.uint8))
    with pytest.raises(DataError, match="it exists: choose another name, or pass overwrite=True"):
        mural.data.create(path, (3, 40, 50), "uint8")
    mural.data.create(path, (1, 4, 4), "uint8", overwrite=True).close()
    assert read(path).shape == (1, 4, 4)


@pytest.mark.parametrize("name", NAMES)
def test_an_error_inside_leaves_nothing(tmp_path: Path, name: str) -> None:
    def leave() -> None:
        with mural.data.create(tmp_path / name, (1, 64, 64), "uint8") as writer:
            writer.write(((0, 1), (0, 3), (0, 3)), torch.ones(1, 3, 3, dtype=torch.uint8))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        leave()
    assert not list(tmp_path.iterdir())
    forgotten = mural.data.create(tmp_path / name, (1, 64, 64), "uint8")
    del forgotten
    assert not list(tmp_path.iterdir())


def cases() -> Iterator[tuple[str, tuple[int, ...], str, Any, Any]]:
    """Images and chunks for ranks, of which no cut falls on a chunk's."""
    yield "out.ome.zarr", (3, 90, 110), "uint8", (3, 16, 32), None
    yield "out.ome.zarr", (2, 90, 110), "float32", (1, 16, 16), (2, 48, 32)
    yield "out.ome.zarr", (1, 9, 40, 50), "int16", (1, 4, 16, 16), None
    yield "out.ome.zarr", (1, 30, 30), "int64", (1, 100, 100), None
    yield "out.tif", (3, 90, 110), "uint8", (16, 32), None
    yield "out.tif", (2, 3, 90, 110), "float32", (16, 32), None


def by_ranks(path: str, shape: tuple[int, ...], dtype: str, chunks: Any, shard: Any, seed: int) -> bool:
    """Every rank writes its own boxes of a random division, in an order of its own; some write none."""
    mesh = mural.init(data=torch.distributed.get_world_size())
    data, draw = pixels(shape, dtype), random.Random(seed)
    every = pieces(shape, draw, 14)
    owners = [draw.randrange(mesh.world) for _ in every]
    mine = [box for box, owner in zip(every, owners, strict=True) if owner == mesh.rank]
    with mural.data.create(path, shape, dtype, mesh=mesh, chunks=chunks, shard=shard) as writer:
        write(writer, data, mine)
    return np.array_equal(read(Path(path)).reshape(shape), data)


@pytest.mark.parametrize("world", [2, 4])
def test_any_pieces_of_several_ranks(tmp_path: Path, world: int) -> None:
    for number, (name, *case) in enumerate(cases()):
        for seed in range(2):
            assert all(run_on(world, by_ranks, str(tmp_path / f"{number}-{seed}-{name}"), *case, seed))
    assert len(list(tmp_path.iterdir())) == 2 * len(list(cases()))


def refusal(path: str, boxes: list[Any], fails: int | None) -> tuple[str, str]:
    """What a rank raises when it writes that box; rank `fails` raises by itself instead."""
    mesh = mural.init(data=torch.distributed.get_world_size())
    try:
        with mural.data.create(path, (1, 64, 64), "uint8", mesh=mesh, chunks=(1, 16, 16)) as writer:
            if mesh.rank == fails:
                raise RuntimeError("mine")
            box = boxes[mesh.rank]
            writer.write(box, torch.ones([b - a for a, b in box], dtype=torch.uint8))
    except (MuralError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(("boxes", "match"), [
    ([((0, 1), (0, 33), (0, 64)), ((0, 1), (32, 64), (0, 64))], "ranks 0 and 1 both wrote unit"),
    ([((0, 1), (0, 36), (0, 64)), ((0, 1), (35, 64), (0, 64))], "both wrote box ((0, 1), (35, 36), (0, 16)) of unit"),
])  # fmt: skip
def test_ranks_that_write_the_same_pixels(tmp_path: Path, boxes: list[Any], match: str) -> None:
    for kind, text in run_on(2, refusal, str(tmp_path / "out.zarr"), boxes, None):
        assert kind == "DataError"
        assert match in text
    assert not list(tmp_path.iterdir())
    # All ranks raised together, so they go on together.
    assert all(run_on(2, by_ranks, str(tmp_path / "next.zarr"), (1, 20, 20), "uint8", (1, 8, 8), None, 0))


def test_a_rank_that_raises_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    boxes = [((0, 1), (0, 30), (0, 64)), ((0, 1), (30, 64), (0, 64))]
    first, second = run_on(2, refusal, str(tmp_path / "out.zarr"), boxes, 1)
    restart(2)
    assert first[0] == "PeerError"
    assert second == ("RuntimeError", "mine")
    assert not (tmp_path / "out.zarr").exists()


def test_what_is_there_is_refused_on_every_rank(tmp_path: Path) -> None:
    mural.data.create(tmp_path / "out.zarr", (1, 8, 8), "uint8").close()
    boxes = [((0, 1), (0, 30), (0, 64)), ((0, 1), (30, 64), (0, 64))]
    for kind, text in run_on(2, refusal, str(tmp_path / "out.zarr"), boxes, None):
        assert kind == "DataError"
        assert "it exists: choose another name, or pass overwrite=True" in text
    assert read(tmp_path / "out.zarr").shape == (1, 8, 8)

"""Sinks: boxes in any order give the image, in a tensor, in a file mapped to memory and in files of `mural.data`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mural.data
from mural.errors import LayoutError
from mural.memory.sinks import Sink, TensorSink

Pairs = tuple[tuple[int, int], ...]


def tiles(shape: Sequence[int], side: int, seed: int) -> list[Pairs]:
    """Tiles of an image, all channels each, in a random order."""
    channels, height, width = shape
    found = [
        ((0, channels), (a, min(a + side, height)), (b, min(b + side, width)))
        for a in range(0, height, side)
        for b in range(0, width, side)
    ]
    random.Random(seed).shuffle(found)
    return found


def stream(sink: Sink, values: torch.Tensor, boxes: Sequence[Pairs]) -> None:
    for box in boxes:
        sink.write(box, values[tuple(slice(*pair) for pair in box)])


@given(st.integers(1, 3), st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.integers(0, 9))
def test_tiles_in_any_order_give_the_image(channels: int, height: int, width: int, side: int, seed: int) -> None:
    values = torch.rand(channels, height, width)
    sink = TensorSink(torch.zeros_like(values))
    assert isinstance(sink, Sink)
    stream(sink, values, tiles(values.shape, side, seed))
    assert torch.equal(sink.tensor, values)


def test_a_file_that_is_mapped_to_memory(tmp_path: Path) -> None:
    values = torch.rand(2, 50, 60)
    mapped = np.memmap(tmp_path / "out.bin", np.float32, "w+", shape=(2, 50, 60))
    stream(TensorSink(torch.from_numpy(mapped)), values, tiles(values.shape, 16, 1))
    mapped.flush()
    assert np.array_equal(np.fromfile(tmp_path / "out.bin", np.float32).reshape(2, 50, 60), values.numpy())


@pytest.mark.parametrize("name", ["out.ome.zarr", "out.tif"])
def test_a_writer_is_a_sink(tmp_path: Path, name: str) -> None:
    values = torch.rand(2, 150, 200)
    with mural.data.create(tmp_path / name, values.shape, values.dtype, chunks=(1, 64, 64)) as writer:
        assert isinstance(writer, Sink)
        stream(writer, values, tiles(values.shape, 50, 2))
        assert not (tmp_path / name).exists()
    with mural.data.open(tmp_path / name) as source:
        assert torch.equal(source.read(), values)


@pytest.mark.parametrize("name", ["out.ome.zarr", "out.tif"])
def test_a_stream_that_fails_leaves_no_file(tmp_path: Path, name: str) -> None:
    values = torch.rand(1, 150, 200)

    def fails() -> None:
        with mural.data.create(tmp_path / name, values.shape, values.dtype, chunks=(1, 64, 64)) as writer:
            stream(writer, values, tiles(values.shape, 50, 2)[:-1])
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fails()
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_refused() -> None:
    sink = TensorSink(torch.zeros(1, 4, 4))
    for box, tensor in (
        ([(0, 1), (0, 5), (0, 4)], torch.zeros(1, 5, 4)),
        ([(0, 1), (-1, 1), (0, 4)], torch.zeros(1, 2, 4)),
        ([(0, 1), (0, 4)], torch.zeros(1, 4)),
        ([(0, 1), (0, 2), (0, 2)], torch.zeros(1, 2, 1)),
        ([(0, 1), (0, 2), (0, 2)], torch.zeros(1, 2, 2, dtype=torch.float64)),
    ):
        with pytest.raises(LayoutError, match="a box is within the sink"):
            sink.write(box, tensor)

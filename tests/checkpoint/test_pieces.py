"""Who writes what: every position once, balanced, and nothing that does not fit together."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mural.checkpoint.pieces import Offer, Piece, as_piece, divide, offer, split
from mural.errors import CheckpointError, LayoutError
from mural.geometry import Cuts, Interval, overlap, volume, whole


def offered(name: str, shape: tuple[int, ...], box: object = None, width: int = 4) -> Offer:
    place = whole(shape) if box is None else tuple(Interval(*i) for i in box)  # type: ignore[attr-defined]
    return Offer(name, "float32", width, shape, place)


@given(
    st.lists(st.integers(0, 9), max_size=4),
    st.integers(1, 8),
    st.integers(1, 300),
)
def test_split_covers_a_box_once_in_blocks_of_the_limit(shape: list[int], width: int, limit: int) -> None:
    box = tuple(Interval(2, 2 + n) for n in shape)
    parts = split(box, width, limit)
    assert sum(map(volume, parts)) == volume(box)
    assert all(i.contains(p) for part in parts for i, p in zip(box, part, strict=True))
    assert not any(volume(overlap(a, b)) for k, a in enumerate(parts) for b in parts[:k])
    assert all(volume(part) * width <= limit or volume(part) == 1 for part in parts) or prod(shape) == 0


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 300)), min_size=1, max_size=30), st.integers(1, 6))
def test_replicated_tensors_are_written_once_and_in_balance(shapes: list[tuple[int, int]], world: int) -> None:
    own = [offered(f"t{k}", shape) for k, shape in enumerate(shapes)]
    parts = divide([own] * world)
    for k, shape in enumerate(shapes):
        assert sum(volume(p.box) for rank in parts for p in rank if p.name == f"t{k}") == prod(shape)
    loads = [sum(p.bytes for p in rank) for rank in parts]
    largest = max(p.bytes for rank in parts for p in rank)
    assert max(loads) - min(loads) <= largest
    assert largest <= max(2**20, -(-sum(loads) // world))


def test_pieces_stay_where_they_are_and_replicated_tensors_fill_up() -> None:
    cuts = Cuts.weighted(10, (1, 3))
    first = [offered("w", (10, 2**18), ((0, 2), (0, 2**18))), offered("r", (2**20,))]
    second = [offered("w", (10, 2**18), ((2, 10), (0, 2**18))), offered("r", (2**20,))]
    assert cuts.bounds == (0, 3, 10)
    parts = divide([first, second])
    assert [p.name for p in parts[0]] == ["w", "r"]
    assert {p.name for p in parts[1]} == {"w"}


def test_empty_and_scalar_tensors_are_written_once() -> None:
    own = [offered("empty", (0, 3)), offered("scalar", ())]
    parts = divide([own, own])
    assert sorted(p.name for rank in parts for p in rank) == ["empty", "scalar"]


def test_a_rank_may_hold_nothing_of_a_tensor() -> None:
    parts = divide([[offered("w", (4,), ((0, 0),))], [offered("w", (4,), ((0, 4),))]])
    assert [len(rank) for rank in parts] == [0, 1]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([[offered("w", (4,))], [offered("w", (5,))]], r"different tensors as w: rank 0 has float32 \(4,\), rank 1"),
        ([[offered("w", (4,), ((0, 3),))], [offered("w", (4,), ((2, 4),))]], "overlap"),
        ([[offered("w", (4,), ((0, 2),))], [offered("w", (4,), ((3, 4),))]], "do not cover"),
    ],
)
def test_what_does_not_fit_together_is_refused(ranks: list[list[Offer]], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        divide(ranks)


def test_a_piece_fits_its_box() -> None:
    with pytest.raises(LayoutError, match="one \\(start, stop\\) inside the shape"):
        Piece(torch.zeros(2, 2), (4, 4), ((0, 2), (3, 5)))
    with pytest.raises(LayoutError, match="one \\(start, stop\\)"):
        Piece(torch.zeros(2), (4, 4), ((0, 2),))


@pytest.mark.parametrize("bad", [torch.zeros(3, device="meta"), torch.eye(3).to_sparse()])
def test_tensors_without_dense_values_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"w is .*dense tensors"):
        as_piece("w", bad)


def test_a_full_tensor_is_all_of_itself() -> None:
    assert offer("w", as_piece("w", torch.zeros(2, 3))) == offered("w", (2, 3))

"""Recurrent layers under the law: batches may be cut, sequences and features may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import mural
from law import Grid, holds, image, raises
from ranks import run_on

KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
BATCHES = [Grid((1,), data=2), Grid((1,), data=3), Grid((1,), data=4)]


class Sequences(nn.Module):
    """A recurrent layer over the last dim of (N, C, L), or over columns of images, each row a sequence."""

    def __init__(self, kind: str, of: str = "columns", state: str = "none", **options: Any):
        super().__init__()
        self.of, self.state = of, state
        self.layer = KINDS[kind](4, 5, **options).double()

    def first_state(self, layer: Any, batch: int, like: Tensor) -> Any:
        """No state, a plain one, or one that depends on the input."""
        if self.state == "none":
            return None
        several = layer.num_layers * (2 if layer.bidirectional else 1)
        sizes = [getattr(layer, "proj_size", 0) or layer.hidden_size, layer.hidden_size]
        states = [image(several, batch, n, seed=n) for n in sizes]
        if self.state == "sharded":
            means = like.mean(tuple(d for d in range(like.ndim) if d != (0 if layer.batch_first else 1)))
            states = [s * means[:, None] for s in states]
        return tuple(states) if isinstance(layer, nn.LSTM) else states[0]

    def forward(self, x: Tensor) -> Any:
        # Every row of an image is a sequence: a batch of N · H.
        x = x.permute(0, 2, 3, 1).flatten(0, 1) if self.of == "rows" else x.movedim(1, -1)
        x = x if self.layer.batch_first else x.transpose(0, 1)
        batch = x.shape[0 if self.layer.batch_first else 1]
        out, last = self.layer(x, self.first_state(self.layer, batch, x))
        return (out, *last) if isinstance(last, tuple) else (out, last)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {"num_layers": 2, "bidirectional": True, "state": "plain"},
        {"batch_first": True, "bias": False, "bidirectional": True, "state": "sharded"},
    ],
    ids=str,
)
def test_batches_that_are_cut(kind: str, options: dict[str, Any]) -> None:
    for grid in BATCHES[:2]:
        holds(Sequences(kind, **options), image(3, 4, 7), grid)


def test_more_ranks_than_sequences() -> None:
    for kind in KINDS:
        holds(Sequences(kind, batch_first=True, num_layers=2, state="plain"), image(3, 4, 6), BATCHES[2])


def test_an_lstm_with_projections() -> None:
    holds(Sequences("LSTM", proj_size=3, num_layers=2, state="plain"), image(3, 4, 7), BATCHES[0])


def test_a_rectified_rnn() -> None:
    holds(Sequences("RNN", nonlinearity="relu", batch_first=True), image(3, 4, 7), BATCHES[0])


@pytest.mark.parametrize("grid", [Grid((2, 1)), Grid((2, 1), data=2), Grid((3, 1), cuts=((0, 9, 4),))], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_of_an_image_is_a_sequence(kind: str, grid: Grid) -> None:
    holds(Sequences(kind, "rows", "plain", batch_first=True, bidirectional=True), image(2, 4, 13, 6), grid)


class Cells(nn.Module):
    """Three steps of a cell, from no state, over the features of (N, C, L)."""

    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell = cell.double()

    def forward(self, x: Tensor) -> Any:
        state = None
        for step in range(3):
            state = self.cell(x[:, :, step], state)
        return state


@pytest.mark.parametrize(
    "cell", [nn.LSTMCell(4, 5), nn.GRUCell(4, 5), nn.RNNCell(4, 5, bias=False), nn.RNNCell(4, 5, nonlinearity="relu")],
    ids=repr,
)  # fmt: skip
def test_cells(cell: nn.Module) -> None:
    for grid in (*BATCHES, Grid((2,))):
        holds(Cells(cell), image(3, 4, 7), grid)


def dropped(data: int) -> tuple[Tensor, Tensor]:
    """Output and weight gradient of a layer with dropout between its parts."""
    torch.manual_seed(3)
    layer = nn.GRU(4, 5, num_layers=3, dropout=0.4, batch_first=True, bidirectional=True).double()
    grid = Grid((1,), data=data)
    torch.manual_seed(4)
    out, last = layer(grid.shard(image(4, 4, 7)).movedim(1, -1))
    (out.square().sum() + last.square().sum()).backward()
    mural.reduce_gradients(layer, grid.mesh())
    return out.full().detach(), layer.weight_hh_l1.grad


def test_dropout_between_layers_is_the_same_on_any_number_of_ranks() -> None:
    one, two, four = (run_on(n, dropped, n) for n in (1, 2, 4))
    for out, grad in (*two, *four):
        torch.testing.assert_close(out, one[0][0], rtol=0, atol=1e-12)
        torch.testing.assert_close(grad, one[0][1], rtol=0, atol=1e-12)


def refused(what: str) -> None:
    x = Grid((2,)).shard(image(3, 4, 8)).movedim(1, -1)
    batches = Grid((1,), data=2).shard(image(4, 4, 8)).movedim(1, -1)
    layer = nn.LSTM(4, 5, batch_first=True).double()
    if what == "sequence":
        layer(x)
    elif what == "features":
        nn.GRU(8, 5).double()(x.transpose(1, 2))
    elif what == "cell features":
        nn.GRUCell(8, 5).double()(x[:, :, 0])
    elif what == "packed":
        layer(pack_padded_sequence(batches, torch.tensor([8, 8, 7, 2]), batch_first=True))
    elif what == "plain input":
        layer(image(4, 8, 4), (batches.mean(1)[None, :, :1].expand(1, 4, 5), image(1, 4, 5)))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("sequence", "lstm along dim 1 (the sequence)"),
        ("features", "gru along dim 2 (the features)"),
        ("cell features", "gru_cell along dim 1 (the features)"),
        ("packed", "PackedSequence"),
        ("plain input", "lstm takes a sharded input"),
    ],
)
def test_what_is_cut_elsewhere_is_refused(what: str, text: str) -> None:
    raises(text, mural.UnsupportedOp, refused, what)
    raises(".full()", mural.UnsupportedOp, refused, what)

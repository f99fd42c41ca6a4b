"""Parts of tensors: the same numbers and gradients as slices and pads, however they are copied."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mural.shard import parts
from mural.shard.parts import cut_out, padded, wide

SHAPES = {
    "whole positions": (2, 8, 9, 7),
    "channels that are not wide": (2, 3, 9, 7),
    "one channel": (1, 1, 9, 7),
    "one position": (1, 16, 1, 1),
    "a volume": (2, 16, 5, 6, 7),
}
TYPES = (torch.bfloat16, torch.float32, torch.float64, torch.complex128)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors are copied 16 bytes at a time, if they can be."""
    monkeypatch.setattr(parts, "worth_it", lambda tensor: True)


def tensor_of(name: str, dtype: torch.dtype, last: bool) -> Tensor:
    shape = SHAPES[name]
    form = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)] if last else torch.contiguous_format
    return torch.randn(shape, dtype=torch.float64).to(dtype).contiguous(memory_format=form).requires_grad_()


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_cut_out(name: str, dtype: torch.dtype, last: bool) -> None:
    x = tensor_of(name, dtype, last)
    for part in (
        (slice(0, 1), slice(0, x.shape[1]), *(slice(n // 3, max(n // 3 + 1, n - 1)) for n in x.shape[2:])),
        (slice(0, x.shape[0]), slice(0, -(-x.shape[1] // 2)), *(slice(0, n) for n in x.shape[2:])),
    ):
        for dense in (True, False):
            found = cut_out(x, part, dense)
            assert found.equal(x[part])
            (mine,) = torch.autograd.grad(found, x, other := torch.randn_like(found))
            (theirs,) = torch.autograd.grad(x[part], x, other)
            assert mine.equal(theirs)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_padded(name: str, dtype: torch.dtype, last: bool) -> None:
    x = tensor_of(name, dtype, last)
    amounts = [n for dim in range(x.ndim - 2) for n in (dim, 2)]
    for value in (0.0, -float("inf")):
        found, expected = padded(x, amounts, value, fast=True), F.pad(x, amounts, value=value)
        assert found.equal(expected)
        other = torch.randn_like(expected)
        assert torch.autograd.grad(found, x, other)[0].equal(torch.autograd.grad(expected, x, other)[0])


def test_wide_memory_is_the_same_memory() -> None:
    x = torch.zeros(1, 16, 4, 5, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    part = wide(x[:, 8:, 1:3, 2:])
    assert part is not None
    assert part.shape == (1, 2, 3, 1)
    part.copy_(torch.full_like(part, 1 + 1j))
    assert bool(x[:, 8:, 1:3, 2:].any())
    assert not bool(x[:, :8].any())
    assert wide(x[:, 4:, 1:3, 2:]) is None, "it begins in the middle of 16 bytes"

"""The losses of codes against their formulas, written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mural.domain import Ramp, Separation, Weights
from mural.domain.code_losses import (
    BANDWIDTHS,
    difference,
    discrepancy,
    pooled,
    reversed_gradient,
    scale_invariant_error,
)
from mural.errors import ConfigError


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_scale_invariant_error_is_that_of_the_paper() -> None:
    made, image = random(3, 2, 4, 5), random(3, 2, 4, 6)[..., :5]
    total = 0.0
    for d in (made - image).flatten(1):
        k = len(d)
        pairs = sum(float(x * y) for x in d for y in d)
        total += float((d**2).sum()) / k - pairs / k**2
    assert float(scale_invariant_error(made, image)) == pytest.approx(total / 3, abs=1e-12)
    assert float(scale_invariant_error(image + 7, image)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3, 4)], ids=["vectors", "maps"])
def test_the_difference_is_the_norm_of_the_product_of_unit_rows(shape: tuple[int, ...]) -> None:
    shared, private = random(*shape), random(*shape[:1], 3, *shape[2:])

    def rows(code: Tensor) -> Tensor:
        code = code.movedim(1, -1).reshape(-1, code.shape[1])
        code = code - code.mean(0)
        return code / code.norm(dim=1, keepdim=True)

    a, b = rows(shared), rows(private)
    assert float(difference(shared, private)) == pytest.approx(float((a.T @ b).norm() ** 2 / len(a) ** 2), abs=1e-12)


def test_orthogonal_codes_differ_and_equal_ones_do_not() -> None:
    signs = torch.tensor([[1.0, 1, -1, -1], [1, -1, 1, -1]], dtype=torch.float64)
    assert float(difference(signs[0, :, None], signs[1, :, None])) == 0
    assert float(difference(signs[0, :, None], signs[0, :, None])) == pytest.approx(1)


def test_a_reversed_gradient_leaves_the_values_as_they_are() -> None:
    x = (random(4, 3) * 1e3).requires_grad_()
    y = reversed_gradient(x, 0.3)
    assert torch.equal(y, x)
    (y * random(3)).sum().backward()
    torch.testing.assert_close(x.grad, (-0.3 * random(3)).expand(4, 3))


def test_the_discrepancy_is_a_sum_over_pairs_and_kernels() -> None:
    a, b = random(4, 3), random(2, 3)

    def mean(one: Tensor, other: Tensor) -> float:
        pairs = [float((x - y).square().sum()) for x in one for y in other]
        return sum(math.exp(-p / (2 * v)) for p in pairs for v in BANDWIDTHS) / len(pairs)

    assert float(discrepancy(a, b)) == pytest.approx(mean(a, a) + mean(b, b) - 2 * mean(a, b), abs=1e-12)
    assert float(discrepancy(a, a)) == 0


def test_a_map_is_pooled_and_a_vector_is_not() -> None:
    x = random(2, 3, 4, 5)
    torch.testing.assert_close(pooled(x), x.flatten(2).mean(2))
    assert pooled(x[:, :, 0, 0]).shape == (2, 3)


def test_the_ramp_begins_at_its_start_and_ends_at_one() -> None:
    ramp = Ramp(start=10, length=100)
    assert [ramp.at(0), ramp.at(10), ramp.at(110), ramp.at(10**6)] == [0, 0, 1, 1]
    assert ramp.at(60) == pytest.approx(2 / (1 + math.exp(-5)) - 1)
    assert Ramp().at(0) == 1


def test_weights_and_steps_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"similarity = -1.* at least 0"):
        Weights(similarity=-1)
    with pytest.raises(ConfigError, match=r"length = -5.* at least 0"):
        Ramp(length=-5)
    assert Separation().weights == Weights()

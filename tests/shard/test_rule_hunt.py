"""What the rule validator found: calls that were silently wrong, or that ended in torch's words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import mural
from law import Grid, holds, image, raises
from ranks import run_on

TWO = Grid((2,), dims=(0,))


def cut_otherwise() -> Tensor:
    """A join of tensors that are cut along different dims."""
    mesh = mural.init(spatial=(2,))
    x, y = mural.shard(image(3, 4, 5), mesh, dims=(0,)), mural.shard(image(3, 4, 5, seed=1), mesh, dims=(2,))
    return torch.cat([x, y], 2).full()


def test_tensors_cut_along_different_dims_are_joined() -> None:
    """The result was said to be cut twice along one axis of the mesh: most of it was uninitialised memory."""
    for found in run_on(2, cut_otherwise):
        assert torch.equal(found, torch.cat([image(3, 4, 5), image(3, 4, 5, seed=1)], 2))


def test_gradients_of_zero_without_memory_travel() -> None:
    """The gradient of `sgn` is a tensor without memory, which no message could carry."""
    holds(torch.sgn, image(4, 6), TWO)


def sent_before_it_was_conjugated() -> list[bool]:
    """A conjugated tensor, gathered, and the imaginary part of one, which torch negates when it is read."""
    mesh = mural.init(spatial=(2,))
    x = torch.complex(image(4, 3), image(4, 3, seed=1))
    y = mural.shard(x, mesh, dims=(0,)).conj()
    return [torch.equal(y.full(), x.conj().resolve_conj()), torch.equal(torch.imag(y).full(), -x.imag)]


def test_conjugated_tensors_travel_conjugated() -> None:
    """A message carried the memory of a lazily conjugated tensor: the other ranks' parts came unconjugated."""
    assert all(all(found) for found in run_on(2, sent_before_it_was_conjugated))


def pooled(x: Tensor) -> Tensor:
    """Averages whose windows do not all have one size."""
    return F.adaptive_avg_pool2d(x, (4, 3))


def not_a_number() -> bool:
    """Adaptive averages of an image with one position that is not a number."""
    x = image(1, 2, 11, 7)
    x[0, 0, 4, 3] = float("nan")
    found = pooled(mural.shard(x, mural.init(spatial=(2,)))).full()
    return torch.allclose(found, pooled(x), 1e-10, 1e-12, equal_nan=True)


def test_adaptive_averages_keep_what_is_no_number_in_its_window() -> None:
    """It was multiplied by a weight of zero in all other windows, which made these NaN too."""
    assert all(run_on(2, not_a_number))


def infinite() -> Tensor:
    """Logits with an infinite one."""
    x = image(3, 8)
    x[1, 6] = float("inf")
    return x


def softmaxes_of_infinity() -> list[bool]:
    """Softmaxes and logsumexp along a cut dim."""
    x, mesh = infinite(), mural.init(spatial=(2,))
    y = mural.shard(x, mesh, dims=(1,))
    calls = (torch.softmax, torch.log_softmax, torch.logsumexp)
    return [torch.allclose(f(y, 1).full(), f(x, 1), 1e-10, equal_nan=True) for f in calls]


def test_softmaxes_of_an_infinite_logit_are_torchs() -> None:
    """Along a cut dim all other values became 0, where torch makes NaN."""
    assert all(all(found) for found in run_on(2, softmaxes_of_infinity))


def refused_calls() -> list[str]:
    """What calls that torch refuses come to."""
    x, found = mural.shard(image(4, 0, 6), mural.init(spatial=(2,)), dims=(0,)), []
    y = mural.shard(image(4, 6), mural.init(spatial=(2,)), dims=(0,))
    for call in (
        lambda: torch.aminmax(x, dim=1), lambda: x.amax(1), lambda: x.max(1), lambda: x.argmin(1),
        lambda: y.roll((1, 2), 0), lambda: y.narrow(0, torch.tensor([1]), 2),
    ):  # fmt: skip
        try:
            call()
            found.append("returned")
        except (IndexError, RuntimeError):
            found.append("raised")
    return found


def test_what_torch_refuses_is_refused() -> None:
    """Extremes of no positions were the types' limits; of two shifts for one dim, the first one was taken."""
    assert all(set(found) == {"raised"} for found in run_on(2, refused_calls))


ONES = torch.ones(2, 4, 5, dtype=torch.long)


def added_product(x: Tensor) -> Tensor:
    """A product of whole numbers, with factors that are not."""
    return torch.addbmm(ONES[0, :3], x, ONES, beta=1.9, alpha=2.5)


def sharded_product() -> Tensor:
    """The same, of a sharded tensor."""
    x = mural.shard(torch.arange(24).view(2, 3, 4), mural.init(spatial=(2,)), dims=(1,))
    return added_product(x).full()  # type: ignore[attr-defined]


def test_products_of_whole_numbers_are_whole() -> None:
    """The factors made them floating point numbers."""
    for found in run_on(2, sharded_product):
        assert torch.equal(found, added_product(torch.arange(24).view(2, 3, 4)))


def running_logarithms() -> Tensor:
    """A scan of complex numbers along a cut dim."""
    x = torch.complex(image(4, 6), image(4, 6, seed=1))
    return mural.shard(x, mural.init(spatial=(2,)), dims=(1,)).logcumsumexp(1).full()  # type: ignore[attr-defined]


def test_scans_of_complex_logarithms_are_refused() -> None:
    """Their angles differed from torch's by full turns."""
    raises("logcumsumexp of complex numbers", mural.UnsupportedOp, running_logarithms)


def normed_whole_numbers() -> torch.dtype:
    """Whole numbers over the energy of their neighbours, where one rank has none."""
    x = mural.shard(torch.arange(36).view(2, 3, 6), mural.init(spatial=(2,)), cuts=(0, 0, 6))
    return F.local_response_norm(x, 2).dtype


def test_an_empty_piece_has_the_type_of_the_others() -> None:
    """Of nothing, torch returned whole numbers as they were: ranks disagreed about the type."""
    assert set(run_on(2, normed_whole_numbers)) == {torch.float32}

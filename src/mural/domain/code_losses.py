"""The losses of codes and images as formulas: scale-invariant error, difference, reversed gradient, discrepancy.

A code is (N, C), a vector for each image, or (N, C, H, W) and its like, a map. All are written in torch calls that have
rules for cut tensors: they give the value of the whole batch and image wherever the pieces are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BANDWIDTHS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 5, 10, 15, 20, 25, 30, 35, 100, 1e3, 1e4, 1e5, 1e6)
"""The variances of the kernels of `discrepancy`: those of the paper of domain separation networks."""


def scale_invariant_error(made: Tensor, image: Tensor) -> Tensor:
    """The mean over images of mean(d²) - mean(d)², for their differences d: a shift of a whole image costs nothing.

    >>> float(scale_invariant_error(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)))
    0.0
    """
    apart = made - image
    dims = tuple(range(1, apart.ndim))
    return (apart.square().mean(dims) - apart.mean(dims).square()).mean()


def difference(shared: Tensor, private: Tensor) -> Tensor:
    """How far two codes are from orthogonal: ‖AᵀB‖² / R², where A and B have a row for each of R images or positions.

    Rows are the code's channels less their mean over all rows, scaled to length 1. It lies between 0 and 1, whatever
    the numbers of images, positions and channels.
    """
    a, b = rows_of(shared), rows_of(private)
    return torch.einsum("ncp,ndp->cd", a, b).square().sum() / (a.shape[0] * a.shape[2]) ** 2


def rows_of(code: Tensor) -> Tensor:
    """A code as (N, C, positions), centred over images and positions, of length 1 along its channels."""
    code = code.flatten(2) if code.ndim > 2 else code.unsqueeze(2)
    return F.normalize(code - code.mean((0, 2), keepdim=True), dim=1)


def reversed_gradient(x: Tensor, strength: float) -> Tensor:
    """The same values, whose gradient comes back with the other sign, times `strength`.

    >>> x = torch.ones(2, requires_grad=True)
    >>> reversed_gradient(x, 0.5).sum().backward()
    >>> x.grad
    tensor([-0.5000, -0.5000])
    """
    held = x.detach()
    return held + strength * (held - x)  # of the same values, so their difference is exactly 0


def pooled(code: Tensor) -> Tensor:
    """A vector (N, C) for each image: the code itself, or the mean of a map over its positions."""
    return code.mean(tuple(range(2, code.ndim))) if code.ndim > 2 else code


def discrepancy(a: Tensor, b: Tensor) -> Tensor:
    """The squared maximum mean discrepancy of two sets of vectors, under a sum of Gaussian kernels.

    It is mean k(a, a') + mean k(b, b') - 2 mean k(a, b) over all pairs, those of a vector with itself included; it is
    0 for equal sets, and never negative.
    """
    return kernel_mean(a, a) + kernel_mean(b, b) - 2 * kernel_mean(a, b)


def kernel_mean(a: Tensor, b: Tensor) -> Tensor:
    """The mean over all pairs of vectors of Σ exp(-‖a - b‖² / 2σ²) over the bandwidths σ²."""
    # Not by ‖a‖² + ‖b‖² - 2 a·b, whose rounding the narrowest kernel would magnify a million times.
    squares = (a.unsqueeze(1) - b.unsqueeze(0)).square().sum(2)
    scales = torch.tensor([-0.5 / variance for variance in BANDWIDTHS], dtype=a.dtype, device=a.device)
    return torch.exp(squares.unsqueeze(2) * scales).mean() * len(BANDWIDTHS)

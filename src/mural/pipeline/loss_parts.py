"""The loss of a batch that comes in micro-batches: exactly the loss of the whole batch, or an error.

Where all results are there before the first backward begins (GPipe), the loss is computed from all of them at once,
whatever it is. Where backward begins earlier (1F1B, GEMS, …) each micro-batch has a loss of its own, and the loss of
the batch has to be a sum of these with weights that depend on the targets alone:

    loss(all) = w₀ loss(0) + w₁ loss(1) + …        a mean over pixels: wᵢ is the part of the pixels; a sum: wᵢ is 1

The weights are found before the first backward of each step, from the gradients that the loss has for random results
with the targets of that step: what the whole has in a micro-batch's part is wᵢ times what that micro-batch has alone.
Where no weights fit (Dice over the batch, contrastive losses), or other random results have other weights (a mean over
what the model itself selects), that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.comm import stack
from mural.errors import PlanError
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.shard.gradient_scale import true_gradient
from mural.shard.layout import Layout

SPREADS = 0.618, 0.414
"""What multiples of these have behind the point says how far the random results of each micro-batch are spread."""
Loss = Callable[[Any, Any], Tensor]
Dims = tuple[int | None, ...]
"""For each leaf of a result the dim along which micro-batches follow each other; None for what has no images."""


def loss_weights(
    loss: Loss, results: Sequence[Any], targets: Sequence[Any], whole: Any, mesh: Mesh, dims: Dims
) -> list[float]:
    """The weight of each micro-batch's loss in that of the batch, for random results like these. Collective."""
    trials = trial_results(results, dims)
    joined = loss(joined_results(trials, dims), whole)
    every = gradients(joined, trials, mesh)
    pairs = zip(pytree.tree_leaves(trials[0]), dims, strict=True)
    of_images = [dim is not None for leaf, dim in pairs if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    alone: list[Tensor] = []
    own: list[list[Tensor]] = []
    for trial, target in zip(trials, targets, strict=True):
        value = loss(trial, target)
        alone.append(value.detach())
        own += gradients(value, [trial], mesh)
    others = other_values(loss, results, targets, whole, dims)
    shares = [[list(compress(grads, of_images)) for grads in both] for both in zip(every, own, strict=True)]
    numbers = torch.stack([products(*both) for both in shares])
    values, second, numbers = on_host(torch.stack([*alone, joined.detach()]), torch.stack(others), numbers)
    sums = stack(numbers, mesh.peers(mesh.coordinates), mesh.rank, mesh.transport, "loss").sum(0).tolist()
    weights = [fitted(both, twice, whole, tolerance(trials)) for both, twice, whole in sums]
    for *parts, value in (values.tolist(), second.tolist()):
        total = sum(weight * part for weight, part in zip(weights, parts, strict=True) if weight)
        if abs(total - value) > tolerance(trials) * max(abs(value), 1e-6):
            raise undivided(f"it is {value:.6g}, its parts add up to {total:.6g}")
    for at in (i for i, images in enumerate(of_images) if not images):
        apart = every[0][at] - sum(weight * grads[at] for weight, grads in zip(weights, own, strict=True))
        if float(apart.abs().max()) > tolerance(trials) * max(float(every[0][at].abs().max()), 1e-6):
            raise undivided("its gradients for results without images do not add up")
    return weights


@torch.no_grad()
def other_values(loss: Loss, results: Sequence[Any], targets: Sequence[Any], whole: Any, dims: Dims) -> list[Tensor]:
    """The losses of micro-batches, and that of the batch, for other random results: the weights have to fit these."""
    trials = trial_results(results, dims, spread=SPREADS[1])
    parts = [loss(trial, target) for trial, target in zip(trials, targets, strict=True)]
    return [*parts, loss(joined_results(trials, dims), whole)]


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Tensors of numbers in double precision on the CPU, in one copy: each copy waits for the device."""
    whole = torch.cat([tensor.double().flatten().to(tensors[0].device) for tensor in tensors]).cpu()
    parts = whole.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def trial_results(results: Sequence[Any], dims: Dims, spread: float = SPREADS[0]) -> list[Any]:
    """Random values instead of results, spread otherwise in each; what has no images is the same for all."""
    spreads = [0.25 + 0.75 * (spread * (number + 1) % 1.0) for number in range(len(results))]
    found = [
        pytree.tree_map_only(Tensor, partial(random_leaf, spread=each), result)
        for each, result in zip(spreads, results, strict=True)
    ]
    first, form = pytree.tree_flatten(found[0])
    return [
        form.unflatten([a if d is None else b for a, b, d in zip(first, pytree.tree_leaves(t), dims, strict=True)])
        for t in found
    ]


def products(share: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
    """The inner products of a part of the batch's gradient and a micro-batch's own: both, own twice, share twice."""
    pairs = [(s.double(), o.double()) for s, o in zip(share, own, strict=True)]
    found = [torch.stack([(s * o).sum(), (o * o).sum(), (s * s).sum()]) for s, o in pairs]
    return torch.stack(found).sum(0) if found else torch.zeros(3, dtype=torch.float64)


def fitted(both: float, alone: float, whole: float, rounding: float) -> float:
    """The number times which a micro-batch's own gradient is its part of the batch's; 0 where it has no part."""
    if whole == 0.0:
        return 0.0
    weight = both / alone if alone else float("nan")
    apart = max(0.0, whole - 2 * weight * both + weight**2 * alone) if weight == weight else float("inf")
    if not apart <= rounding**2 * whole:
        raise undivided(f"gradients differ by {100 * (apart / whole) ** 0.5:.3g}%")
    return weight


def tolerance(tree: Any) -> float:
    """How far apart two gradients of the same loss may be for rounding."""
    kinds = [leaf.dtype for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return max((float(torch.finfo(kind).eps) for kind in kinds if kind.is_floating_point), default=1e-7) ** 0.5 * 4


def undivided(why: str) -> PlanError:
    """The error for a loss that is not a weighted sum over micro-batches."""
    return PlanError(
        f"the loss of the batch is not a weighted sum of the losses of its micro-batches: {why}. This schedule begins "
        f'backward before all results are there; use schedule = "gpipe", or microbatches = 1'
    )


def random_leaf(value: Tensor, spread: float) -> Tensor:
    """Random values instead of a result, as the beginning of a history.

    They are between 0.1 and 0.9, where scores, probabilities and intensities all have losses with gradients. Of whole
    numbers they are the least and the largest.
    """
    if not value.is_floating_point():
        return random_numbers(value, spread)
    drawn: Any = torch.rand_like(value) * (0.8 * spread) + 0.1
    if not isinstance(value, ShardedTensor):
        return drawn.detach().requires_grad_()
    return ShardedTensor(drawn.local.detach().requires_grad_(), value.placement, "", value.folds)


def random_numbers(value: Tensor, spread: float) -> Tensor:
    """The least or the largest of some whole numbers at each position."""
    if not value.numel() or value.is_complex():
        return value
    return torch.where(torch.rand_like(value, dtype=torch.float32) < 0.8 * spread, value.max(), value.min())


def floating(tree: Any) -> list[Tensor]:
    """The results that a gradient can go to."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def carriers(tree: Any) -> list[Tensor]:
    """The plain tensors under the results that a gradient can go to."""
    return [leaf.local if isinstance(leaf, ShardedTensor) else leaf for leaf in floating(tree)]


def gradients(loss: Tensor, trees: Sequence[Any], mesh: Mesh) -> list[list[Tensor]]:
    """The true gradients of a loss, for each of several results. Collective."""
    lists = [carriers(tree) for tree in trees]
    found: Iterator[Any] = iter(torch.autograd.grad(loss, [c for part in lists for c in part], allow_unused=True))
    grads: list[list[Tensor]] = []
    for tree, part in zip(trees, lists, strict=True):
        raw = [torch.zeros_like(c) if g is None else g for c, g in ((c, next(found)) for c in part)]
        layouts = [layout_of(leaf, mesh) for leaf in floating(tree)]
        grads.append([true_gradient(g, layout) for g, layout in zip(raw, layouts, strict=True)])
    return grads


def layout_of(leaf: Tensor, mesh: Mesh) -> Layout:
    """How a result is cut over the ranks of the last stage."""
    if isinstance(leaf, ShardedTensor):
        return leaf.placement
    none = (None,) * leaf.ndim
    return Layout(mesh, tuple(leaf.shape), none, none, ())


def joined_results(results: Sequence[Any], dims: Dims) -> Any:
    """The results of micro-batches as one: what has images is put one after the other, else it is the first's."""
    if len(results) == 1:
        return results[0]
    leaves = [pytree.tree_leaves(result) for result in results]
    shape = pytree.tree_structure(results[0])
    joined = [
        parts[0] if dim is None or not isinstance(parts[0], Tensor) else torch.cat(parts, dim)
        for dim, parts in zip(dims, map(list, zip(*leaves, strict=True)), strict=True)
    ]
    return pytree.tree_unflatten(joined, shape)

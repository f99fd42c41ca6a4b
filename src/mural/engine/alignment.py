"""An image that a model would take, where an image is best cut, and which dims of a target are the image's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from torch import nn

from mural.errors import MuralError, PlanError, ShapeError
from mural.graph import Graph, capture


def alignment(model: nn.Module, shape: Sequence[int], grid: Sequence[int]) -> int:
    """What the cuts of an image should be multiples of: the total stride of the model where ranks still hold parts.

    A cut at a multiple of it falls between the windows of every strided layer. It is a matter of speed alone, so a
    model that cannot be captured is cut anywhere.
    """
    spatial = tuple(shape[2 : 2 + len(grid)])
    if len(spatial) < len(grid):
        raise PlanError(
            f"spatial = {list(grid)} cuts {len(grid)} dims, but images of shape {tuple(shape[1:])} have "
            f"{len(spatial)}: write {len(spatial)} sizes, as spatial = {[prod(grid), 1, 1][: len(spatial)]}"
        )
    if all(n == 1 for n in grid):
        return 1
    try:
        with without_hooks(model):
            graph = capture(model, tuple(shape))
    except (MuralError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        return 1
    strides = [1]
    for node in graph:
        for made in node.output_shapes if node.kind == "windowed" else ():
            strides += strides_of(spatial, made[2 : 2 + len(grid)], grid)
    room = min(extent // parts for extent, parts in zip(spatial, grid, strict=True) if parts > 1)
    return max((s for s in strides if s <= room), default=1)


@contextmanager
def without_hooks(model: nn.Module) -> Generator[None]:
    """The model without its forward hooks, which are not to see tensors without memory.

    Those that torch's own layers consist of (spectral and weight norm, pruning) stay.
    """
    kept = [(m, m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    try:
        for module, hooks, before in kept:
            module._forward_hooks, module._forward_pre_hooks = own_hooks(hooks), own_hooks(before)
        yield
    finally:
        for module, hooks, before in kept:
            module._forward_hooks, module._forward_pre_hooks = hooks, before


def own_hooks(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """The hooks that torch's own layers consist of."""
    return OrderedDict((k, h) for k, h in hooks.items() if type(h).__module__.startswith("torch.nn.utils."))


def strides_of(image: Sequence[int], made: Sequence[int], grid: Sequence[int]) -> list[int]:
    """The ratios of the image's extents to those of a layer's output, along the dims that are cut there.

    >>> strides_of((101, 64), (26, 16), (2, 2)), strides_of((64, 64), (1, 1), (2, 2))
    ([4, 4], [])
    """
    found = zip(image, made, grid, strict=False)
    return [max(1, round(whole / out)) for whole, out, parts in found if parts > 1 and out >= 2 * parts]


def target_dims(target: Sequence[int], image: Sequence[int], spatial: int) -> tuple[int, ...]:
    """The dims of a target that are cut along the spatial axes: those of a mask or a map, none of a label.

    >>> target_dims((4, 64, 64), (4, 3, 64, 64), 2), target_dims((4, 2, 32, 32), (4, 3, 64, 64), 2)
    ((1, 2), (2, 3))
    >>> target_dims((4,), (4, 3, 64, 64), 2), target_dims((4, 10), (4, 3, 64, 64), 2)
    ((), ())
    """
    lead = len(target) - (len(image) - 2)
    return tuple(range(lead, lead + spatial)) if lead >= 1 else ()


# -- an example --------------------------------------------------------------------------------------------------------


EXTENTS = (256, 224, 512, 299, 128, 64, 32, 28, 1024, 96, 48)
"""Extents that are tried, in this order."""
CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def likely_graph(model: nn.Module) -> Graph:
    """The graph of a model for the first plausible image that it takes.

    The first convolution tells channels and dims, else the first linear layer tells the features.
    """
    tried: list[str] = []
    for shape in likely_shapes(model):
        try:
            return graph_for(model, shape[1:])
        except ShapeError as error:
            tried.append(f"{shape}: {error}".splitlines()[0])
        except MuralError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError) as error:
            tried.append(f"{shape}: {error}".splitlines()[0])
    raise PlanError(
        f"no image was found that {type(model).__name__} takes, which the choice of its stages needs "
        f"({'; '.join(tried[:2]) or 'it has no convolution and no linear layer'}): give "
        f"parallelize(…, image=(C, H, W)), or a shape for each of several inputs"
    )


def graph_for(model: nn.Module, image: Sequence[int] | Sequence[Sequence[int]]) -> Graph:
    """The graph of a model for an image (C, H, W), or for several inputs of such shapes.

    It is the graph of a single image, or of two where the model takes no single one: batch norm of one value.
    """
    several = [tuple(part) for part in image if isinstance(part, Sequence)]
    single = tuple(extent for extent in image if isinstance(extent, int))
    with without_hooks(model):
        try:
            return capture(model, [(1, *shape) for shape in several] if several else (1, *single))
        except ValueError:
            return capture(model, [(2, *shape) for shape in several] if several else (2, *single))


def likely_shapes(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Shapes to try."""
    for module in model.modules():
        for kind, dims in CONVOLUTIONS.items():
            if isinstance(module, kind):
                yield from ((2, module.in_channels, *(extent,) * dims) for extent in fitting(dims))
                return
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield (2, module.in_features)
            return


def fitting(dims: int) -> tuple[int, ...]:
    """Volumes are tried smaller."""
    return EXTENTS if dims < 3 else tuple(sorted((e for e in EXTENTS if e <= 128), reverse=True))

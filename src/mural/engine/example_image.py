"""An image that a model would take, for plans that are made before the first image is seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from mural.engine.alignment import without_hooks
from mural.errors import MuralError, PlanError
from mural.graph import Graph, capture

EXTENTS = (256, 224, 512, 299, 128, 64, 32, 28, 1024, 96, 48)
"""Extents that are tried, in this order."""
CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def likely_graph(model: nn.Module) -> Graph:
    """The graph of a model for the first likely image that it takes.

    The first convolution tells channels and dims, else the first linear layer tells the features.
    """
    tried: list[str] = []
    for shape in likely_shapes(model):
        try:
            return graph_for(model, shape[1:])
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

"""Streamed equals plain: loss, gradients of all parameters and of the image, and buffers, over drawn models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from streamed_law import Case
from streamed_losses import LOSSES, PIXELS
from streamed_models import ACTS, BLOCKS, DOWNS, NORMS, UPS, Spec

FOUND = (Phase.explicit, Phase.reuse, Phase.generate)  # the first failure will do: a search for a smaller one is long
EXTENTS = {1: (24, 70), 2: (14, 33), 3: (6, 13)}
TILES = {1: (3, 80), 2: (2, 40), 3: (3, 14)}


@st.composite
def specs(draw: st.DrawFn, head: str = "pixels", dims: tuple[int, ...] = (1, 2, 2, 2, 3)) -> Spec:
    return Spec(
        dims=draw(st.sampled_from(dims)),
        width=draw(st.integers(2, 3)),
        depth=draw(st.integers(1, 2)),
        block=draw(st.sampled_from(BLOCKS)),
        norm=draw(st.sampled_from(NORMS)),
        act=draw(st.sampled_from(sorted(ACTS))),
        down=draw(st.sampled_from(sorted(DOWNS))),
        up=draw(st.sampled_from(UPS)),
        skip_first=draw(st.booleans()),
        padding=draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate"])),
        head=head,
    )


@st.composite
def cases(draw: st.DrawFn, head: str = "pixels") -> Case:
    spec = draw(specs(head))
    if spec.dims == 3 and spec.padding == "reflect":  # little is left to reflect at low resolution
        spec = replace(spec, depth=1)
    names = [n for n in sorted(LOSSES) if head == "pixels" or n not in PIXELS]
    return Case(
        spec,
        draw(st.tuples(*[st.integers(*EXTENTS[spec.dims])] * spec.dims)),
        draw(st.tuples(*[st.integers(*TILES[spec.dims])] * spec.dims)),
        draw(st.sampled_from(names)),
        draw(st.sampled_from(["some", "a tile", "an image"])),
        draw(st.integers(1, 3 if spec.dims < 3 else 2)),
        draw(st.sampled_from([None, "none", "all", "host"])),
        draw(st.sampled_from([(1.0,), (1.0, 1.0), (0.25, 2.0), (0.0, 1.0)])),
        draw(st.booleans()),
    )


def law(head: str, examples: int) -> Callable[..., Any]:
    """As many cases as said in the fixed profile, and more in the fresh one."""
    chosen = settings(max_examples=examples * settings().max_examples // 30, phases=FOUND)
    return lambda test: chosen(given(case=cases(head))(test))


@law("pixels", 18)
def test_encoder_decoders(case: Case) -> None:
    case.check()


@law("classes", 12)
def test_classifiers(case: Case) -> None:
    case.check()

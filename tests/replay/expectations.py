"""What is expected before anything runs: programs of streamed steps, balanced stages, predictions, chosen plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from textwrap import wrap

import torch
from torch import nn
from torch.nn import functional as F

import mural
from mural.cost import estimate
from mural.engine.division import Division
from mural.engine.fitting_tile import foreseen_step
from mural.engine.parallel import Parallel
from mural.engine.stage_ranks import StageRanks
from mural.engine.stage_starts import stage_starts
from mural.engine.stream_report import PredictedStep
from mural.graph.nodes import Place
from mural.memory.passes import StreamPass
from mural.models import FCN2D, UNet2D
from mural.pipeline.route import Route
from mural.plans import Plan
from mural.ranks import Mesh
from replay import models


def streamed(build: Callable[[], nn.Module], image: tuple[int, ...], tile: tuple[int, ...], memory: str) -> str:
    """The program of a streamed step on an H200 of which so much may be used, and what each sweep takes."""
    model, plan = build(), Plan(stream=tile, memory=memory)
    mesh = Mesh.of_one()
    held = Parallel(model, plan, mesh, F.cross_entropy, 0, Division.whole(model, StageRanks.of(plan, mesh)))
    (made,) = mural.capture(model, image).outputs
    target = (made.shape[0], *made.shape[2:])
    step = foreseen_step(held, [(image, torch.float32), (target, torch.int64)], tile, memory=memory, hardware="h200")
    lines = [f"an image {image} in tiles of {tile} within {memory}"]
    for one in step.program.passes.passes:
        lines += ["", *pass_lines(step, one)]
    tail = [f"{call.node.op}#{call.node.id}" for call in step.program.passes.tail]
    lines += ["", "[tail]", *wrap(", ".join(tail), 118, break_on_hyphens=False)]
    for one in step.cost.sweeps:
        lines += ["", f"[{one.sweep.kind} of pass {one.sweep.one.number}]"]
        lines.append(f"{one.tiles} tiles, {one.pixels} pixels, {one.flops:.0f} operations, peak {one.sweep.peak}")
        moved = (one.read, one.written, one.inward, one.outward)
        lines.append("bytes read {:.0f}, written {:.0f}, inward {:.0f}, outward {:.0f}".format(*moved))
    lines += ["", "[step]", f"peak {step.peak.bytes}", f"{step.cost.seconds() or 0.0:.14e} s"]
    return "\n".join(lines) + "\n"


def pass_lines(step: PredictedStep, one: StreamPass) -> Iterator[str]:
    """What a pass reads, computes, measures and keeps."""
    calls, hosted = step.program.passes.graph.calls, step.program.kept.host

    def name(place: Place) -> str:
        source, pick = place
        made = source if isinstance(source, str) else f"{calls[source].node.op}#{source}"
        return made + (f".{pick}" if pick else "") + (" (host)" if place in hosted else "")

    def total(key: tuple[int, int]) -> str:
        return f"{calls[key[0]].node.op}#{key[0]}.{key[1]}"

    yield f"[pass {one.number}{' on whole tensors' if one.whole else ''}]"
    parts: dict[str, Sequence[str]] = {
        "reads": [*map(name, one.reads)],
        "uses": [*map(total, one.uses)],
        "computes": [f"{call.node.op}#{call.node.id}" for call in one.calls],
        "measures": [*map(total, one.measures)],
        "keeps": [*map(name, one.keeps)],
    }
    for title, words in parts.items():
        yield from wrap(f"{title}: {', '.join(words) or 'nothing'}", 118, break_on_hyphens=False)


def balanced(build: Callable[[], nn.Module], image: tuple[int, ...], stages: int) -> str:
    """Where a model's stages begin by each balance, what crosses between them, and their peaks on an H200."""
    model = build()
    graph = mural.capture(model, image)
    known = estimate(graph, "h200")
    whole, step = known.peak(), known.step()
    lines = [f"{len(graph)} calls on {image}, {stages} stages", "", "[whole]"]
    lines += [f"peak {whole.bytes} in {whole.phase} of {whole.site}, state {whole.state}, kept {whole.kept}"]
    lines += [f"forward {step.forward:.14e} s, backward {step.backward:.14e} s"]
    for cuts in ("layers", "time", "memory", "both"):
        plan = Plan(stage=stages, cuts=cuts, schedule="1f1b", microbatches=2 * stages, memory="64GiB")
        route = Route.of(graph, starts := stage_starts(graph, plan, "h200"))
        lines += ["", f"[cuts = {cuts}]"]
        for number, (a, b) in enumerate(zip(starts, (*starts[1:], len(graph)), strict=True)):
            peak = known.peak(a, b)
            text = f"stage {number} from {graph.nodes[a].site}: {b - a} calls, peak {peak.bytes}, kept {peak.kept}"
            lines.append(text)
        for edge in route.edges:
            lines.append(f"{edge.bytes} bytes from {edge.producer} to {', '.join(map(str, edge.consumers))}")
    return "\n".join(lines) + "\n"


def planned(build: Callable[[], nn.Module], image: tuple[int, ...], memories: Sequence[str]) -> str:
    """The plans that are chosen for one H200 of which so much may be used, with what was considered."""
    lines = [f"an image {image} on an H200, with an optimizer that keeps two numbers"]
    for memory in memories:
        try:
            plan = mural.plan(build(), image, memory=memory, hardware="h200", optimizer=2)
            _, *rows, _ = plan.explain().splitlines()
            found = [*str(plan).splitlines(), *(row.rstrip() for row in rows)]
        except mural.PlanError:
            found = ["refused"]
        lines += ["", f"[within {memory}]", *found]
    return "\n".join(lines) + "\n"


def group_unet() -> nn.Module:
    return UNet2D(classes=3, width=16, depth=3, norm="group")


def batch_unet() -> nn.Module:
    return UNet2D(classes=3, width=16, depth=3)


def small_unet() -> nn.Module:
    return UNet2D(classes=3, width=8, depth=2)


def wide_fcn() -> nn.Module:
    return FCN2D(classes=5, width=4)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], str]] = {
    "program-plain": (models.plain_unet, (1, 3, 1024, 1024), (256, 256), "1GiB"),
    "program-batchnorm": (small_unet, (2, 3, 2048, 2048), (512, 512), "4GiB"),
    "program-batchnorm-host": (batch_unet, (1, 3, 4096, 4096), (512, 1024), "2GiB"),
    "program-groupnorm": (group_unet, (1, 3, 2000, 1500), (512, 512), "2GiB"),
    "program-fcn": (wide_fcn, (1, 3, 1024, 1024), (512, 512), "2GiB"),
    "program-resnet": (models.resnet, (1, 3, 2048, 2048), (512, 512), "1GiB"),
}
"""Shapes of images, tiles, and the memory."""
STAGES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "balance-unet": (batch_unet, (1, 3, 512, 512), 4),
    "balance-resnet": (models.resnet, (2, 3, 224, 224), 3),
    "balance-fcn": (wide_fcn, (1, 3, 512, 512), 2),
}
"""Shapes of images, and how many stages."""
PLANS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Sequence[str]]] = {
    "plan-unet": (small_unet, (3, 512, 512), ("1GiB", "220MiB", "150MiB")),
    "plan-offload": (small_unet, (3, 1024, 1024), ("400MiB",)),
    "plan-resnet": (models.resnet, (3, 512, 512), ("8GiB", "100MiB")),
}
"""The shape of an image, and memories."""
EXPECTED: dict[str, Callable[[], str]] = {
    **{name: partial(streamed, *asked) for name, asked in PROGRAMS.items()},
    **{name: partial(balanced, *asked) for name, asked in STAGES.items()},
    **{name: partial(planned, *asked) for name, asked in PLANS.items()},
}


def expectations(name: str) -> str:
    """The text of a pair."""
    torch.manual_seed(0)
    return EXPECTED[name]()

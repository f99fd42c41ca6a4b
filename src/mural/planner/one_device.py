"""`mural.plan` for one device: the fastest of what fits, with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from math import inf
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mural.cost.hardware import Hardware
from mural.engine.division import Division
from mural.engine.fitting_tile import fitting_tile, foreseen_step
from mural.engine.offloaded_updates import TENSORS
from mural.engine.parallel import Parallel
from mural.engine.stage_ranks import StageRanks
from mural.errors import PlanError, UnsupportedOp
from mural.graph.capture import capture
from mural.planner.asked import check_memory, check_model, check_numbers, check_shape
from mural.planner.memory_mix import Given, Mix, MixQuestion
from mural.plans import Plan, bytes_of, memory_for
from mural.ranks import Mesh
from mural.report.words import bytes_in_words
from mural.shard.generators import generators_kept

SHOWN = 8
"""How many mixes an explanation has."""
FURTHER = 1.02
"""How many times more memory is tried, where what was to be enough is not."""


def plan(
    model: nn.Module,
    image: Sequence[int],
    *,
    batch: int = 1,
    devices: int = 1,
    memory: str = "",
    hardware: str = "h200",
    precision: Literal["float32", "bfloat16"] = "float32",
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    target: Sequence[int] | None = None,
    target_dtype: torch.dtype = torch.int64,
    optimizer: float = 1.0,
) -> Plan:
    """The fastest plan for steps on images of that shape, (C, H, W), within a device's memory, as "16GiB".

    Nothing runs, and no GPU is needed: the step is rehearsed on tensors without memory. `target` is the shape of one
    image's target, of type `target_dtype`; unless given, a class for each position of the model's result, or one for
    the image. `optimizer` is how many numbers it keeps for each of a parameter's (Adam 2, momentum 1).
    `plan.explain()` says what was considered. Raises PlanError where nothing fits.

    >>> found = plan(nn.Conv2d(3, 2, 3, padding=1), (3, 64, 64), memory="1GiB")
    >>> found.recompute, found.offload, found.stream
    ((), (), None)
    """
    if devices != 1:
        raise PlanError(f"devices = {devices}: this version plans for one device; write plans for several by hand")
    check_model(model)
    check_shape("image", image, "as (3, 512, 512)")
    if target is not None:
        check_shape("target", target, "as (512, 512), or () for a class of an image")
    check_numbers(batch, optimizer)
    check_memory(memory)
    Plan(precision=precision)
    known = Hardware.named(hardware)
    limit = bytes_of(memory) if memory else known.memory
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    wanted = classes_of(model, (batch, *image)) if target is None else (batch, *target)
    given: list[Given] = [((batch, *image), kind), (wanted, target_dtype)]
    lower = torch.bfloat16 if precision == "bfloat16" else None
    return answered(MixQuestion(model, loss, given, known, limit, lower, optimizer), memory, hardware, precision)


def classes_of(model: nn.Module, images: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of classes for what the model makes of images: (N, K, …) scores have (N, …) classes.

    >>> classes_of(nn.Conv2d(3, 2, 3), (4, 3, 64, 64)), classes_of(nn.Linear(64, 2), (4, 64))
    ((4, 62, 62), (4,))
    """
    try:
        batch, _, *positions = capture(model, images).outputs[0].shape
    except Exception:  # whatever a model raises, the rehearsal says what is wrong
        batch, _, *positions = images
    return (batch, *positions)


def answered(question: MixQuestion, memory: str, hardware: str, precision: Literal["float32", "bfloat16"]) -> Plan:
    """The plan of the fastest mix that fits, with what was considered."""
    found = considered(question, hardware, precision)
    fitting = [mix for mix in found if mix.fits(question.room)]
    if not fitting:
        least = min(found, key=lambda mix: mix.peak)
        raise PlanError(
            f"nothing fits into {bytes_in_words(question.limit)}: the leanest way, {least}, needs "
            f"{bytes_in_words(least.peak)} for tensors, of which a device of that size has "
            f'{bytes_in_words(question.room)}; without tiles, memory="{sufficient(question, least.peak)}" would do; '
            f"or use more devices or smaller images"
        )
    best = min(fitting, key=question.late)
    made = Plan(
        memory=memory or (str(question.limit) if best.kinds else ""), stream=best.stream, recompute=best.recompute,
        offload=best.kinds, precision=precision,
    )  # fmt: skip
    return made.because(explained(found, best, question, memory or f"{question.hardware.name}'s memory"))


def sufficient(question: MixQuestion, peak: int) -> str:
    """About the least memory into which a mix without tiles fits, if the leanest one had that peak in less memory.

    What leaves depends on the room, so it is tried.
    """
    size = peak / TENSORS
    while True:
        memory = memory_for(size)
        larger = replace(question, limit=bytes_of(memory))
        if any(mix.fits(larger.room) for mix in larger.mixes()):
            return memory
        size *= FURTHER


def considered(question: MixQuestion, hardware: str, precision: Literal["float32", "bfloat16"]) -> list[Mix]:
    """All mixes that may be worth it; the streamed step is one where not everything can be kept."""
    try:
        found = list(question.mixes())
    except Exception as error:  # models raise what they like, as AssertionError for images of another size
        (batch, *image), (_, *target) = (shape for shape, _ in question.given)
        raise PlanError(
            f"one step on {batch} images of shape {tuple(image)} with targets of shape {tuple(target)} raises "
            f"{type(error).__name__}: {error}"
        ) from error
    if found[0].peak <= question.room:
        return found
    fitting = [mix for mix in found if mix.fits(question.room)]
    shown = sorted(mix.seconds for mix in fitting)[SHOWN - 1 : SHOWN]
    slowest = max(*shown, min(map(question.late, fitting))) if shown else inf
    return [*found, *streamed(question, hardware, precision, slowest)]


def streamed(
    question: MixQuestion, hardware: str, precision: Literal["float32", "bfloat16"], slowest: float = inf
) -> list[Mix]:
    """The streamed step with the largest tile that fits; nothing where the model cannot be streamed.

    Nor where it takes longer than `slowest`, so that it would neither be chosen nor be shown: to find its tile takes
    longer than all else.
    """
    image, room = question.given[0][0], int(question.room) - question.kept_numbers
    if room <= 0:
        return []
    tile = tuple(min(n, 512) for n in image[2:])
    mesh = Mesh.of_one()  # whoever plans, plans alone
    with generators_kept(torch.device("cpu")):
        asked = Plan(stream=tile, precision=precision)
        copy = deepcopy(question.model)
        held = Parallel(copy, asked, mesh, question.loss, 0, Division.whole(copy, StageRanks.of(asked, mesh)))
        if slowest < inf and least_seconds(held, question, hardware) > slowest:
            return []
        try:
            tile = fitting_tile(held, question.given, room, hardware=hardware)
            step = foreseen_step(held, question.given, tile, memory=question.limit, hardware=hardware)
            return [question.beside_numbers(Mix(step.peak.bytes, step.cost.seconds() or 0.0, stream=tile))]
        except (PlanError, UnsupportedOp):
            return []


def least_seconds(held: Parallel, question: MixQuestion, hardware: str) -> float:
    """The seconds of a streamed step with one tile, whether it fits or not; 0 if there is none.

    Smaller tiles read more of their neighbours, and start more kernels.
    """
    try:
        whole = question.given[0][0][2:]
        step = foreseen_step(held, question.given, whole, memory=question.limit, hardware=hardware)
        return step.cost.seconds() or 0.0
    except (PlanError, UnsupportedOp):
        return 0.0


def explained(found: Sequence[Mix], best: Mix, question: MixQuestion, memory: str) -> str:
    """What was considered, the fastest first, and what was chosen."""
    rows = sorted(found, key=lambda mix: (not mix.fits(question.room), mix.seconds))
    rows = [*rows[:SHOWN], *(mix for mix in rows[SHOWN:] if mix is best)]
    lines = [f"{'':2}{'peak':>10}{'step, ms':>10}  "]
    for mix in rows:
        mark = "→" if mix is best else " " if mix.fits(question.room) else "✗"
        lines.append(f"{mark:2}{bytes_in_words(mix.peak):>10}{mix.seconds * 1e3:10.1f}  {mix}")
    room, name = bytes_in_words(question.room), question.hardware.name
    why = "" if best is rows[0] else "→: the fastest if copies to the host and back come late. "
    return "\n".join([*lines, f"{why}Tensors may take {room} of {memory}. Predicted for {name}; ✗: too large."])

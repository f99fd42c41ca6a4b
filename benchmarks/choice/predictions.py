"""The prediction of a setting: what `mural.plan` chooses, and the plan, peak and seconds of every mix. Needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mural
from choice.nets import CHANNELS, built, target_of
from choice.parts import (
    AGAIN,
    BATCHES,
    CHOSEN,
    FIXED,
    HOST,
    LEAN,
    MORE_AGAIN,
    MORE_TILES,
    PLACES,
    SPARE,
    SPARED,
    STRIPS,
    TILES,
    Part,
    doing,
)
from mural.cost.hardware import Hardware
from mural.engine.fitting_tile import LEAST, fitting_tile, foreseen_step
from mural.engine.offloaded_updates import TENSORS
from mural.engine.recompute import block_names
from mural.engine.stream_report import PredictedStep
from mural.errors import PlanError, UnsupportedOp
from mural.memory.offload.step_trace import StepTrace
from mural.planner.memory_mix import Mix, MixQuestion
from mural.planner.one_device import answered
from mural.plans import bytes_of
from mural.ranks.mesh import SPATIAL

HARDWARE = {False: "h200", True: "cpu"}
"""What is predicted for. Toys are too small for a GPU: its workspaces alone take more, and it keeps small blocks."""
SHARES = {name: (share, share) for name, share in (TILES | MORE_TILES).items()} | STRIPS
"""The sides of a tile over those of the largest that fits."""
NUMBERS = 0.0
"""SGD keeps none."""
TRACES: dict[tuple[str, int, bool], dict[frozenset[str], StepTrace]] = {}
"""Steps that were rehearsed, by model, size and whether it is a toy: they do not depend on the cap."""
TOY_CAPS = 16
"""A toy's cap is in sixteenths of what can leave when all blocks are computed again: so much of it may stay."""


class Setting:
    """A model under a cap, and the mixes of it; `part` may be any of them."""

    def __init__(self, part: Part, toy: bool) -> None:
        self.part, self.toy, self.hardware = part, toy, HARDWARE[toy]
        self.model = built(part, toy)
        batch, image = BATCHES[part.model], (CHANNELS, part.size, part.size)
        self.given = [((batch, *image), torch.float32), ((batch, *target_of(part)), torch.int64)]
        traces = TRACES.setdefault((part.model, part.size, toy), {})
        uncapped = MixQuestion(
            self.model, F.cross_entropy, self.given, Hardware.named(self.hardware), 0, torch.bfloat16, NUMBERS, traces
        )
        self.memory = str(toy_limit(uncapped, part.cap)) if toy else part.memory
        self.question = replace(uncapped, limit=bytes_of(self.memory))
        # Where no block has room to be computed again, the mixes have them in the model's order.
        self.blocks = self.question.ranked_blocks(self.question.trace()) or block_names(self.model)
        self.held = streaming(self.model)
        self.steps: dict[mural.Plan, PredictedStep] = {}

    @cached_property
    def tile(self) -> tuple[int, ...]:
        """The largest tile that fits."""
        return fitting_tile(self.held, self.given, self.question.limit, hardware=self.hardware)

    def chosen(self) -> mural.Plan:
        """What a user gets."""
        return answered(self.question, self.memory, self.hardware, "bfloat16")

    def plan(self, name: str) -> mural.Plan:
        """The plan of a mix of the fixed set."""
        usual: dict[str, Any] = {"memory": self.memory, "precision": "bfloat16"}
        if name.endswith(SPARE):
            usual["memory"] = str(int(SPARED * self.question.limit))
            name = name.removesuffix(SPARE)
        if (shares := SHARES.get(name)) is not None:
            tile = (scaled(side, share) for side, share in zip(self.tile, shares, strict=True))
            return mural.Plan(stream=tuple(min(side, self.part.size) for side in tile), **usual)
        if name == "all":
            return mural.Plan(recompute="all", **usual)
        if name == LEAN:
            alone = {block: mural.Plan(recompute=(block,), offload=("activations",), **usual) for block in self.blocks}
            lean = [block for block, plan in alone.items() if self.mix(plan).peak <= self.question.room]
            return mural.Plan(recompute=tuple(lean), offload=("activations",), **usual)
        leaving = ("activations",) if name.endswith(HOST) else ()
        return mural.Plan(recompute=self.again(name.removesuffix(HOST)), offload=leaving, **usual)

    def again(self, name: str) -> tuple[str, ...]:
        """The blocks that a mix computes again: of those that free most for each second, or by their place."""
        if name in PLACES:
            ordered = [block for block in block_names(self.model) if block in self.blocks]
            half = len(ordered) // 2
            return tuple({"first": ordered[:half], "last": ordered[half:], "other": ordered[::2]}[name])
        return tuple(self.blocks[: round((AGAIN | MORE_AGAIN)[name] * len(self.blocks))])

    def named(self, plan: mural.Plan) -> list[str]:
        """The blocks that a plan computes again, by name."""
        return block_names(self.model) if isinstance(plan.recompute, str) else list(plan.recompute)

    def step(self, plan: mural.Plan) -> PredictedStep:
        """The streamed step of a plan."""
        if plan not in self.steps:
            limit = bytes_of(plan.memory)
            self.steps[plan] = foreseen_step(
                self.held, self.given, plan.stream or (), memory=limit, hardware=self.hardware
            )  # fmt: skip
        return self.steps[plan]

    def mix(self, plan: mural.Plan) -> Mix:
        """The mix of a plan, with its peak and its seconds."""
        if plan.stream is not None:
            step = self.step(plan)
            return Mix(step.peak.bytes, step.cost.seconds() or 0.0, stream=plan.stream)
        again = tuple(self.named(plan))
        question = replace(self.question, limit=bytes_of(plan.memory))
        found = list(question._of(question.trace(again), again))
        return found[-1 if plan.offload else 0]

    def described(self, name: str) -> dict[str, Any]:
        """Plan, peak and seconds of a mix; or why there is none."""
        try:
            plan = self.chosen() if name == CHOSEN else self.plan(name)
            mix = self.mix(plan)
        except (PlanError, UnsupportedOp) as error:
            return {"impossible": str(error)}
        fields = ("memory", "precision", "recompute", "offload", "stream")
        tiles = [] if plan.stream is None else tiles_of(self.step(plan))
        # Offload on a CPU counts only what backward needs, less than the cap; without a cap, all that may leave does.
        ran = replace(plan, memory="") if self.toy else plan
        return {
            "plan": {field: getattr(ran, field) for field in fields}, "peak": mix.peak, "seconds": mix.seconds,
            "moved": mix.moved, "words": words(mix, len(self.blocks), tiles), "same_as": None, "tiles": tiles,
            "again": self.named(plan),
        } | ({"explained": plan.explain()} if name == CHOSEN else {})  # fmt: skip


def toy_limit(question: MixQuestion, cap: int) -> int:
    """The bytes of a toy's cap: something has to leave even when all blocks are computed again, and then all fits."""
    trace = question.trace(block_names(question.model))
    least = question.swaps(trace).everything().peak
    return int((least + (max(trace.bytes) - least) * cap / TOY_CAPS) / TENSORS)


def streaming(model: nn.Module) -> Any:
    """A copy of a model that streams, of which steps can be foreseen."""
    plan = mural.Plan(stream=(512, 512), precision="bfloat16")
    return mural.parallelize(deepcopy(model), plan, loss=F.cross_entropy)


def scaled(tile: int, share: float) -> int:
    """A smaller tile, a multiple of what tiles are.

    >>> scaled(1024, 0.5), scaled(704, 0.25)
    (512, 192)
    """
    return -(-int(tile * share) // LEAST) * LEAST


def tiles_of(step: PredictedStep) -> list[list[int]]:
    """The tiles that a step goes through, and those of passes that have others: bands, where values are on the host."""
    grids = [step.needs.grid, *(grid for _, grid in sorted(step.needs.grids.items()))]
    return [[max(i.size for i in grid.cuts[a].intervals()) for a in SPATIAL if a in grid.cuts] for grid in grids]


def words(mix: Mix, blocks: int, tiles: Sequence[Sequence[int]] = ()) -> str:
    """A mix in words.

    >>> words(Mix(0, 0.0, ("a",), True, 2**30), 9)
    '1 of 9 blocks again, 1.0 GiB to the host'
    >>> words(Mix(0, 0.0, stream=(64, 64)), 9, [[8, 512], [16, 512]])
    'tiles of 64 × 64, as bands of 8 × 512'
    """
    if mix.stream is not None:
        asked, ran = (" × ".join(map(str, tile)) for tile in (mix.stream, tiles[0] if tiles else mix.stream))
        return f"tiles of {asked}" if asked == ran else f"tiles of {asked}, as bands of {ran}"
    again = f"{len(mix.recompute)} of {blocks} blocks again" if mix.recompute else "everything kept"
    return f"{again}, {mix.moved / 2**30:.1f} GiB to the host" if mix.offload else again


def predicted(part: Part, toy: bool) -> dict[str, Any]:
    """The prediction of a part's setting."""
    begin = time.perf_counter()
    setting = Setting(part, toy)
    mixes = {CHOSEN: setting.described(CHOSEN)}
    seen: dict[Any, str] = {}
    for name in FIXED:
        mix = mixes[name] = setting.described(name)
        if "plan" in mix:
            first = seen.setdefault(doing(mix), name)
            mix["same_as"] = None if first == name else first
    return {
        "limit": setting.question.limit, "room": setting.question.room, "blocks": setting.blocks, "mixes": mixes,
        "took": time.perf_counter() - begin,
    }  # fmt: skip

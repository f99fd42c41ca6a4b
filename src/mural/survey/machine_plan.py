"""The plan of a first run for the machine at hand: which of its devices are used, and how a step fits into them.

One GPU, or a machine without any: one rank, with the plan that `mural.plan` finds for the largest image. Several GPUs:
batches of images of one size are divided over them; else each image is cut over them, if it is large enough. Where no
plan is found in time, a rule gives one: the image in tiles.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from mural.cost.hardware import GIB
from mural.engine.memory_room import HOST_SHARE, device_limit
from mural.errors import MuralError
from mural.memory.machine_memory import machine_memory
from mural.planner import plan
from mural.plans import Plan, bytes_of
from mural.ranks.mesh import choose_grid
from mural.ranks.spawn import processors
from mural.survey.model_choice import ModelChoice, Task, in_words
from mural.train.configured_samples import padded

SECONDS = 30.0
"""How long a plan is looked for."""
TILES, CROPS = {1: 2**20, 2: 1024, 3: 64}, {1: 2**14, 2: 512, 3: 64}
"""The extent of tiles along each dim, by the rule; and of random boxes that are proposed instead."""
AT_ONCE, MOST_IMAGES = 2**20, 16
"""Positions of a batch of several images, and how many it has, at most."""
WORTH_CUTTING = 2**20
"""Positions for each GPU from which on an image is cut over several."""
NUMBERS = 2.0
"""What AdamW keeps for each number of a parameter."""


@dataclass(frozen=True)
class Machine:
    """The GPUs with the bytes that are free on each, or the processors and the bytes that are free next to them."""

    gpus: Sequence[tuple[str, int]]
    cores: int
    memory: int

    @property
    def limit(self) -> int:
        """The bytes that one rank may take."""
        return min(free for _, free in self.gpus) if self.gpus else int(HOST_SHARE * self.memory)

    def __str__(self) -> str:
        if not self.gpus:
            return f"{self.cores} CPU cores, {self.memory / GIB:.0f} GiB free, no GPU"
        several = f"{len(self.gpus)} × " if len(self.gpus) > 1 else ""
        return f"{several}{self.gpus[0][0]}, {self.limit / GIB:.0f} GiB free"


@dataclass(frozen=True)
class MachinePlan:
    """A plan with the batch that it divides, and why it is as it is."""

    plan: Plan
    batch: int
    why: str
    odd: tuple[str, ...] = ()


class _TimeIsUp(Exception):
    """Looking for a plan took too long."""


def this_machine() -> Machine:
    """What a run finds here."""
    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    gpus = [(torch.cuda.get_device_name(i), device_limit(torch.device("cuda", i))) for i in indices]
    return Machine(tuple(gpus), processors(), machine_memory().free)


def planned(machine: Machine, choice: ModelChoice, task: Task, images: int) -> MachinePlan:
    """The plan for that many images to train on."""
    batch = batch_of(task, images)
    largest = max((padded(size, choice.multiple) for size in task.sizes), key=prod)
    ranks = len(machine.gpus)
    if ranks > 1 and len(task.sizes) == 1 and images >= ranks and prod(largest) <= WORTH_CUTTING * ranks:
        batch = -(-batch // ranks) * ranks
        one = for_rank(machine, choice, task, largest, batch // ranks)
        return replace(
            one, plan=replace(one.plan, data=ranks), batch=batch, why=f"each GPU takes a part of a batch; {one.why}"
        )
    if ranks > 1 and not task.whole_images and prod(largest) >= WORTH_CUTTING * ranks:
        grid = choose_grid(largest, ranks)
        piece = tuple(-(-n // parts) for n, parts in zip(largest, grid, strict=True))
        one = for_rank(machine, choice, task, piece, 1)
        return replace(
            one, plan=replace(one.plan, spatial=grid), batch=1, why=f"each image is cut over the GPUs; {one.why}"
        )
    return for_rank(machine, choice, task, largest, batch)


def batch_of(task: Task, images: int) -> int:
    """Images of a batch: several only where all have one size, are small, and make four batches an epoch.

    >>> batch_of(Task(3, ((256, 256),), 2), 100), batch_of(Task(3, ((256, 256), (256, 300)), 2), 100)
    (16, 1)
    """
    if len(task.sizes) > 1:
        return 1
    most = min(MOST_IMAGES, AT_ONCE // prod(task.sizes[0]), images // 4)
    return 1 << (max(1, most).bit_length() - 1)


def for_rank(machine: Machine, choice: ModelChoice, task: Task, extents: Sequence[int], batch: int) -> MachinePlan:
    """The plan of one rank for images, or pieces of images, of some extents."""
    if choice.made is None:
        return MachinePlan(Plan(), batch, "no plan was looked for, since the model could not be tried")
    room = f"{machine.limit / GIB:.1f} GiB"
    try:
        with time_limit(SECONDS):
            found = plan(
                choice.made, (task.channels, *extents), batch=batch, memory=str(machine.limit), optimizer=NUMBERS,
                hardware="here" if machine.gpus else "cpu", target=() if task.whole_images else None,
            )  # fmt: skip
    except (MuralError, _TimeIsUp, RuntimeError, ValueError, TypeError) as error:
        reason = f"none was found in {SECONDS:.0f} s" if isinstance(error, _TimeIsUp) else "none was found that fits"
        return by_rule(task, extents, batch, f"{reason} into {room}")
    if found.offload and not machine.gpus:  # the host's memory is all that there is
        return by_rule(task, extents, batch, f"a step does not fit into {room}")
    peak = re.search(r"^→\s+([\d.]+ \w+)", found.explain(), re.MULTILINE)
    most = f"{max(bytes_of(peak[1]) / GIB, 0.1):.1f} of {room}" if peak else f"within {room}"
    predicted = f"predicted peak at {in_words(extents)}: {most}"
    return MachinePlan(found if found.offload else replace(found, memory=""), batch, predicted)


def by_rule(task: Task, extents: Sequence[int], batch: int, reason: str) -> MachinePlan:
    """The image in tiles, of which any number fits; a classifier's as it is."""
    crop = f"data.crop = {[min(n, CROPS[task.dims]) for n in extents]} trains on random boxes instead"
    if task.whole_images:
        return MachinePlan(Plan(), batch, reason, (f"plan: {reason}; smaller images would do",))
    tile = tuple(min(n, TILES[task.dims]) for n in extents)
    odd = f"plan: {reason}, so images of {in_words(extents)} are gone through in tiles, by a rule; {crop}"
    return MachinePlan(Plan(stream=tile), batch, f"{reason}: tiles by a rule", (odd,))


@contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """A block that ends with an exception when the time is up; without a limit where the system has no such alarm."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

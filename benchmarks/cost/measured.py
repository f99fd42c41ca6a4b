"""What the held-out models and blocks take: whole steps by the clock, their peaks, and each of their layers alone."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from held_out import HELD_OUT, Held, Shape
from layers import Case
from trials import peaks_of, release, step_of

from mural.cost import replay
from mural.cost.clock import Clock, CpuClock
from mural.cost.trial import trial
from mural.graph import Graph, capture
from mural.graph.differentiable import differentiable
from mural.graph.nodes import Place

THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
"""The variable by which glibc is told from which size on memory comes from the system, and goes back to it."""


def entries(device: str) -> list[tuple[Held, Shape, str]]:
    """Each model or block with the input and the type in which it is measured on that kind of device."""
    if device == "cpu":
        return [(held, shape, "float32") for held in HELD_OUT for shape in held.cpu]
    full = [(held, shape, "float32") for held in HELD_OUT for shape in held.cuda]
    return full + [(held, shape, "bfloat16") for held in HELD_OUT for shape in held.half]


def key_of(held: Held, shape: Shape, dtype: str) -> str:
    return f"{held.name} / {'×'.join(map(str, shape))} / {dtype}"


def inside(shape: Shape) -> bool:
    """Whether this is the input of a block inside a model, which has a gradient; images have 1 or 3 channels."""
    return shape[1] not in (1, 3)


def graph_of(held: Held, shape: Shape, dtype: str) -> tuple[Graph, frozenset[Place]]:
    """The graph of an entry, and which of its tensors have gradients."""
    with torch.device("meta"):
        model = held.build().to(getattr(torch, dtype))
    graph = capture(model, shape, getattr(torch, dtype))
    return graph, differentiable(graph, image=inside(shape))


def step(held: Held, shape: Shape, dtype: str, clock: Clock, repeats: int) -> dict[str, Any]:
    """Whole steps; on a CPU, the memory is that of a process of its own."""
    release()
    device = clock.device.type
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    torch.manual_seed(0)
    with torch.device(device):
        model = held.build().to(getattr(torch, dtype))
    image = torch.rand(shape, device=device).to(getattr(torch, dtype)).requires_grad_(inside(shape))
    found = asdict(step_of(model, [image], clock, repeats)) | {"before": before}
    if device == "cpu":
        found["peak"] = alone(held, shape)
    return found


def alone(held: Held, shape: Shape) -> int:
    """The growth of the resident size of a fresh process over two steps, its parameters and inputs included."""
    with returning() as pool:
        return pool.apply(grown, (HELD_OUT.index(held), shape))


@contextmanager
def returning() -> Iterator[Any]:
    """A process that gives each tensor's memory back to the system as soon as it is freed.

    glibc keeps freed memory between tensors that live, as much as a third more for the small models here; how much
    depends on the order of all that a process ever did, so it is measured without.
    """
    before = os.environ.get(THRESHOLD)
    os.environ[THRESHOLD] = "65536"
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            yield pool
    finally:
        os.environ.pop(THRESHOLD) if before is None else os.environ.update({THRESHOLD: before})


def spaces(cases: Sequence[Case]) -> list[tuple[int, int]]:
    """The most bytes that forward and backward of layers need, in such a process."""
    torch.set_num_threads(1)
    clock = CpuClock()
    return [peaks_of(case, clock) for case in cases]


def grown(index: int, shape: Shape) -> int:
    """Runs in a process of its own: the growth over two steps, after two that load libraries and fill their caches."""
    torch.set_num_threads(1)
    clock = CpuClock()

    def work() -> None:
        model = HELD_OUT[index].build()
        image = torch.rand(shape).requires_grad_(inside(shape))
        step_of(model, [image], clock, repeats=0)

    work()
    gc.collect()
    return clock.peak(work)[0]


def layers(held: Held, shape: Shape, dtype: str, clock: Clock, known: dict[str, Any]) -> dict[str, Any]:
    """The times of each layer of an entry that is not known yet, measured alone, by signature."""
    release()
    graph, wanted = graph_of(held, shape, dtype)
    found: dict[str, Any] = {}
    for node in graph.nodes:
        name = replay.signature(node, wanted)
        if name not in known and name not in found:
            tensors = replay.tensors_for(node, wanted, clock.device)
            leaves = [tensor for tensor in tensors if tensor.requires_grad]
            floating = [tensor for tensor in tensors if tensor.is_floating_point()]
            timing = trial(lambda node=node, ts=tensors: replay.call(node, ts, inplace=False), leaves, floating, clock)
            found[name] = timing.encode()
            del tensors, leaves, floating
    return found

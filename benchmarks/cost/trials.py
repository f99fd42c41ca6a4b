"""Trials: layers of the sweep, and whole steps of models, run on real tensors, with their times and their memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from layers import Case
from torch import Tensor, nn

from mural.cost.clock import CYCLES, Clock, CudaClock
from mural.cost.trial import Forward, Timing, peaks, trial

PAUSE = 0.05
"""Seconds in which a host queues a step of most models."""


def try_case(case: Case, clock: Clock) -> Timing:
    """The times and memory of a case of the sweep."""
    forward, leaves, images = prepared(case, clock.device)
    return trial(forward, leaves, images, clock)


def peaks_of(case: Case, clock: Clock) -> tuple[int, int]:
    """The most bytes that forward and backward of a case need."""
    forward, leaves, _ = prepared(case, clock.device)
    ahead, back, _ = peaks(forward, leaves, clock)
    return ahead, back


def prepared(case: Case, device: torch.device) -> tuple[Forward, list[Tensor], list[Tensor]]:
    """The forward of a case, the tensors that get gradients, and those that it is given."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    with torch.device(device):
        module = case.module()
        images = [torch.randn(shape).to(dtype).requires_grad_(case.gradient) for shape in case.shapes]
    leaves = [tensor for tensor in (*images, *module.parameters()) if tensor.requires_grad]
    return lambda: (module(*images),), leaves, images


@dataclass(frozen=True)
class Step:
    """Whole steps of a model: seconds of each forward and backward by the clock, and the peak of its memory.

    `device_forward` and `device_backward` are the seconds that a GPU needs when it never waits for the host.
    """

    forward: list[float]
    backward: list[float]
    peak: int = 0
    reserved: int = 0
    device_forward: float = 0.0
    device_backward: float = 0.0


def step_of(model: nn.Module, images: Sequence[Tensor], clock: Clock, repeats: int = 7) -> Step:
    """Steps of a model by the clock, the gradient of its outputs given; the first two do not count."""
    forward: list[float] = []
    backward: list[float] = []
    cuda = isinstance(clock, CudaClock)
    now = time.thread_time if not cuda and torch.get_num_threads() == 1 else time.perf_counter

    def wait() -> float:
        if cuda:
            torch.cuda.synchronize()
        return now()

    gradients: list[Tensor] = []
    for number in range(repeats + 2):
        model.zero_grad(set_to_none=True)
        for image in images:
            image.grad = None
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = wait()
        outputs = tensors_of(model(*images))
        between = wait()
        gradients = gradients or [torch.ones_like(output) for output in outputs]
        torch.autograd.backward(outputs, gradients)
        end = wait()
        del outputs
        if number > 1:
            forward.append(between - begin)
            backward.append(end - between)
    if not cuda:
        return Step(forward, backward)
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Step(forward, backward, *peaks, *on_device(model, images, gradients))


def on_device(model: nn.Module, images: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[float, float]:
    """Seconds of forward and backward on a GPU whose work is queued behind a pause, the fewer of two tries."""
    found: list[tuple[float, float]] = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda._sleep(int(CYCLES * PAUSE))
        marks[0].record()
        outputs = tensors_of(model(*images))
        marks[1].record()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(CYCLES * PAUSE))
        marks[2].record()
        torch.autograd.backward(outputs, list(gradients))
        marks[3].record()
        torch.cuda.synchronize()
        del outputs
        found.append((marks[0].elapsed_time(marks[1]) / 1000, marks[2].elapsed_time(marks[3]) / 1000))
    return min(ahead for ahead, _ in found), min(back for _, back in found)


def tensors_of(result: Any) -> list[Tensor]:
    """The outputs of a model that have a gradient."""
    given = result if isinstance(result, (list, tuple)) else [result]
    return [tensor for tensor in given if isinstance(tensor, Tensor) and tensor.requires_grad]


def release() -> None:
    """Give back what the last trial left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

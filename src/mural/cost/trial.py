"""A trial: one layer or block run on real tensors, forward and backward, with its times and its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mural.cost.clock import Clock

Forward = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Timing:
    """Seconds of forward and backward, to the nanosecond, and the most bytes that each needed beyond those before it.

    In backward the gradient of the output was there before.
    """

    forward: float
    backward: float
    forward_bytes: int
    backward_bytes: int

    def encode(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def trial(forward: Forward, leaves: Sequence[Tensor], fresh: Sequence[Tensor], clock: Clock) -> Timing:
    """The times and memory of one piece of a model.

    `forward` computes its outputs, `leaves` are the tensors whose gradients are wanted, and `fresh` those that the
    piece before it had just written.
    """
    ahead_bytes, back_bytes, ones = peaks(forward, leaves, clock)
    with torch.enable_grad():
        ahead = clock.seconds(forward, fresh)
        made = [output for output in forward() if output.requires_grad]

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(made, leaves, ones, retain_graph=True, allow_unused=True)

        back = clock.seconds(backward, ones) if made else [0.0]
    return Timing(round(clock.typical(ahead), 9), round(clock.typical(back), 9), ahead_bytes, back_bytes)


def peaks(forward: Forward, leaves: Sequence[Tensor], clock: Clock) -> tuple[int, int, list[Tensor]]:
    """The most bytes that forward and backward need, and gradients for the outputs.

    Both run once before, so that one-time work such as loading kernels and making workspaces does not count.
    """
    with torch.enable_grad():
        outputs = [output for output in forward() if output.requires_grad]
        ones = [torch.ones_like(output) for output in outputs]
        if not outputs:
            return clock.peak(forward)[0], 0, []
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
        del outputs
        ahead, made = clock.peak(forward)
        outputs = [output for output in made if output.requires_grad]
        del made
        back, gradients = clock.peak(lambda: torch.autograd.grad(outputs, leaves, ones, allow_unused=True))
        del gradients
    return ahead, back, ones

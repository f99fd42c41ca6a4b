"""torch's default generators, which random layers draw from: the CPU's, and that of the computing device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The states of the default generators, one after the other."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Restore the states of the default generators."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:].clone(), device)


def seed_generators(number: int, device: torch.device) -> None:
    """Begin with a seed. `torch.manual_seed` asks every kind of device, which takes longer than a small layer."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


@contextmanager
def generators_kept(device: torch.device) -> Generator[None]:
    """After the block, the default generators are in the same state as before, whatever it draws."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)

"""Draws: random numbers from generators of their own, each seeded by what its numbers are for."""

from __future__ import annotations

import hashlib

import torch


def seed_of(*purpose: int | str) -> int:
    """A 63-bit seed for a purpose, the same in every process and on every plan.

    >>> seed_of(0, "order", 1) == seed_of(0, "order", 1) != seed_of(0, "order", 2)
    True
    """
    text = ":".join(str(part) for part in purpose)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*purpose: int | str) -> torch.Generator:
    """A fresh generator for a purpose; torch's default generator is neither read nor moved."""
    return torch.Generator().manual_seed(seed_of(*purpose))


def permutation(count: int, *purpose: int | str) -> tuple[int, ...]:
    """The numbers 0, …, count - 1 in the order that the purpose draws."""
    return tuple(torch.randperm(count, generator=generator(*purpose)).tolist())


def uniform(low: float, high: float, count: int, *purpose: int | str) -> list[float]:
    """That many numbers between two limits, for a purpose."""
    drawn: list[float] = torch.rand(count, dtype=torch.float64, generator=generator(*purpose)).tolist()
    return [low + (high - low) * value for value in drawn]


def whole_number(limit: int, *purpose: int | str) -> int:
    """A number from 0 to limit - 1, for a purpose."""
    return int(torch.randint(limit, (), generator=generator(*purpose)).item())

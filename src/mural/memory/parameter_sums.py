"""Sums of parameters' gradients, to which tiles add."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class ParameterSums:
    """Where tiles add up the gradients of parameters, by name, and of which parameters they found any.

    `lasting` is memory for such sums that is there from step to step: graphs add to the same addresses.
    """

    def __init__(self) -> None:
        self.places: dict[str, Tensor] = {}
        self.added: dict[str, None] = {}
        self.lasting: Mapping[str, Tensor] = {}

    def place(self, name: str, parameter: Tensor) -> Tensor:
        """Where the gradient of a parameter is added up."""
        if name not in self.places:
            last = self.lasting.get(name)
            fits = last is not None and (last.shape, last.dtype) == (parameter.shape, parameter.dtype)
            self.places[name] = last.zero_() if last is not None and fits else torch.zeros_like(parameter.detach())
        return self.places[name]

    def note(self, names: Iterable[str]) -> None:
        """A tile has added the gradients of these parameters."""
        self.added.update(dict.fromkeys(names))

    @property
    def found(self) -> dict[str, Tensor]:
        """The gradients of all parameters that have one, of this rank's tiles."""
        return {name: self.places[name] for name in self.added}

    def clear(self) -> None:
        """Let go of all sums."""
        self.places, self.added = {}, {}

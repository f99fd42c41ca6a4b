"""What a stage runs: its part of the model's forward, or the model itself where there is one stage alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mural.graph.follow import Follower
from mural.graph.script import Key, Script

Values = dict[Key, Tensor]


class Part(Protocol):
    """A stage's part of a model."""

    @property
    def takes(self) -> tuple[Key, ...]:
        """What it takes from other stages, and of the model's inputs."""
        ...

    def __call__(self, given: Mapping[Key, Tensor], device: torch.device) -> tuple[Values, Any]:
        """What it gives to other stages, and the model's result on the last stage."""
        ...


@dataclass(frozen=True)
class Whole:
    """The model itself, which takes that many inputs."""

    model: nn.Module
    inputs: int

    @property
    def takes(self) -> tuple[Key, ...]:
        """All inputs."""
        return tuple((f"input {i}", 0) for i in range(self.inputs))

    def __call__(self, given: Mapping[Key, Tensor], device: torch.device) -> tuple[Values, Any]:
        """Nothing for others, and the model's result."""
        return {}, self.model(*(given[key] for key in self.takes))


@dataclass(frozen=True)
class Piece:
    """One stage of a model that is cut."""

    model: nn.Module
    script: Script
    stage: int
    paths: Mapping[int, str]

    @property
    def takes(self) -> tuple[Key, ...]:
        """What it takes from other stages, and of the model's inputs."""
        return self.script.stretches[self.stage].takes

    def __call__(self, given: Mapping[Key, Tensor], device: torch.device) -> tuple[Values, Any]:
        """What it gives to other stages, and the model's result on the last stage."""
        follower = Follower(self.script, self.stage, given, device, self.paths)
        result = follower.run(self.model)
        last = self.stage == len(self.script.stretches) - 1
        return follower.made, result if last else None

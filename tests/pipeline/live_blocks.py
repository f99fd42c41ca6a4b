"""Blocks that see one image at a time: ties, attributes that pass activations, views, what is written in place.

Each takes and gives 4 channels at the extents it was given, and each has parameters of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

CHANNELS = 4


def mixer(kernel: int = 1) -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, kernel, padding=kernel // 2)


class Block(nn.Module):
    """A convolution, and what subclasses do with its result. `watched` are attributes that training moves."""

    watched: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.mix = mixer()

    def meet(self, model: Any) -> None:
        """Is called once, with the whole model, when it is complete."""

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.mix(x))

    def change(self, x: Tensor) -> Tensor:
        return x


# --------------------------------------------------------------------------------------------------- ties and passing


class Tied(Block):
    """Shares its weight with the model's first inner convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.again = mixer(3)

    def meet(self, model: Any) -> None:
        self.again.weight = model.convs[0].weight

    def change(self, x: Tensor) -> Tensor:
        return self.again(x)


class Borrowed(Block):
    """Uses the head's weight, transposed, without holding it."""

    def meet(self, model: Any) -> None:
        self.others = [model.head]

    def change(self, x: Tensor) -> Tensor:
        return x + 0.1 * F.conv2d(F.conv2d(x, self.others[0].weight), self.others[0].weight.transpose(0, 1))


class Recall(Block):
    """Reads an activation that the model left as its attribute."""

    def meet(self, model: Any) -> None:
        self.others = [model]

    def change(self, x: Tensor) -> Tensor:
        return x + 0.3 * self.others[0].early


class Handoff(Block):
    """One child leaves an activation as an attribute, another one reads it there."""

    def __init__(self) -> None:
        super().__init__()
        self.giver, self.taker = Kept(), mixer(3)

    def change(self, x: Tensor) -> Tensor:
        return self.taker(self.giver(x)) + self.giver.kept


class Kept(Block):
    def change(self, x: Tensor) -> Tensor:
        self.kept = x.tanh()
        return x


class Twice(Block):
    def change(self, x: Tensor) -> Tensor:
        return self.mix(x.tanh()) + x


# ------------------------------------------------------------------------------------------------------ the rest


class NoGrad(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = mixer()

    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.gate(x).sigmoid()
        return x * gate + self.gate(x).detach()


class InPlace(Block):
    def change(self, x: Tensor) -> Tensor:
        y = x * 0.5
        y += x.tanh()
        y[:, :2] = y[:, 2:] * 0.5
        return y.relu_() + x


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.still = mixer(3).requires_grad_(False)

    def change(self, x: Tensor) -> Tensor:
        return self.still(x) + x


class Unused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.spare = mixer()


class Nested(Block):
    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(mixer(3), nn.Sequential(nn.Tanh(), mixer(), nn.GroupNorm(2, CHANNELS)))
        self.inner = nn.ModuleDict({"a": inner, "b": mixer()})

    def change(self, x: Tensor) -> Tensor:
        return self.inner["b"](self.inner["a"](x) + x)


class Decoder(nn.Module):
    """Is given all features, and takes the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = mixer()

    def forward(self, features: list[Tensor]) -> Tensor:
        if any(f.shape != features[-1].shape for f in features):
            raise ValueError("features of other extents")
        return self.last(features[-1])


class Features(Block):
    """Hands on tensors that nobody reads, as an encoder does whose decoder leaves the finest level."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.decoder = mixer(3), Decoder()

    def change(self, x: Tensor) -> Tensor:
        y = self.middle(x)
        return self.decoder([x, y, y.tanh()])


class Appends(nn.Module):
    """Puts what it makes into the list and the dict that it is given, and takes one out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mixer()

    def forward(self, x: Tensor, seen: list[Tensor], notes: dict[str, int]) -> Tensor:
        seen[0] = seen[0].tanh()
        seen.append(self.inner(x))
        notes["calls"] += 1
        return seen[-1] * 0.5


class Filled(Block):
    """Reads what its children left in a list and a dict of its own, as one-shot aggregation does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Appends(), Appends()

    def change(self, x: Tensor) -> Tensor:
        seen, notes = [x], {"calls": 1}
        y = self.second(self.first(x, seen, notes), seen, notes)
        return x + y * notes["calls"] + seen[0] + seen[1] * seen[2]


class Halved(Block):
    """Half the extents, and back."""

    def change(self, x: Tensor) -> Tensor:
        return F.interpolate(F.max_pool2d(x, 2), scale_factor=2, mode="nearest") + x


class Parts(Block):
    """Parameters in a list and a dict, and views of the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([torch.randn(2, 1, 1) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": torch.randn(CHANNELS, 1, 1) * 0.1})

    def change(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, 1)
        return torch.cat([two * self.gains[0], one * self.gains[1]], 1) + self.named["shift"]


class Position(Block):
    """A parameter with the image's extents, added."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, CHANNELS, 16, 12) * 0.1)

    def change(self, x: Tensor) -> Tensor:
        return x + self.place


class Checkpointed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(mixer(3), nn.Tanh(), mixer())

    def change(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class WeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.normal = weight_norm(mixer(3))

    def change(self, x: Tensor) -> Tensor:
        return self.normal(x)


class Dropped(Block):
    def change(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


class DroppedChannels(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout2d(0.3)

    def change(self, x: Tensor) -> Tensor:
        return self.drop(x) + 0.2 * x


RANDOM: dict[str, Callable[[], Block]] = {"dropout": Dropped, "dropout2d": DroppedChannels}
"""These draw torch's numbers: the reference is one rank with one micro-batch."""

OWN: dict[str, Callable[[], Block]] = {
    "tied": Tied,
    "borrowed": Borrowed,
    "recall": Recall,
    "handoff": Handoff,
    "twice": Twice,
    "no_grad": NoGrad,
    "in_place": InPlace,
    "frozen": Frozen,
    "unused": Unused,
    "nested": Nested,
    "features": Features,
    "filled": Filled,
    "halved": Halved,
    "parts": Parts,
    "position": Position,
    "checkpoint": Checkpointed,
    "weight_norm": WeightNorm,
}

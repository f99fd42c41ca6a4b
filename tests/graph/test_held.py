"""What modules hold: kept, put back and compared; and attributes that several calls touch."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mural.errors import PlanError
from mural.graph import capture
from mural.graph.commons import Commons
from mural.graph.held_state import HeldState
from mural.pipeline.route import Route


class Restless(nn.Module):
    """Changes something of every kind in forward."""

    shared = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moved", torch.zeros(2))
        self.register_buffer("rebound", torch.zeros(2))
        self.count, self.log, self.table, self.last = 0, [1], {"a": 1}, deque([1], maxlen=2)
        self.members, self.array, self.inner = {1}, np.zeros(2), [[1], {"b": [2]}]
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.moved += 1
        self.rebound = self.rebound + 1
        self.count += 1
        self.log.append(2)
        self.table["c"] = 3
        self.last.append(4)
        self.members.add(5)
        self.array += 1
        self.inner[1]["b"].append(6)
        self.fresh = 7
        type(self).shared += 1
        random.random()
        np.random.rand()
        return self.norm(x)


def state(model: Restless) -> list[Any]:
    plain = [
        model.count,
        list(model.log),
        dict(model.table),
        list(model.last),
        set(model.members),
        model.array.tolist(),
    ]
    return [
        *plain, repr(model.inner), hasattr(model, "fresh"), Restless.shared, random.getstate(),
        repr(np.random.get_state()),
        model.moved.tolist(), model.rebound.tolist(), model.norm.running_mean.tolist(),
    ]  # fmt: skip


def test_everything_is_put_back_and_told() -> None:
    model, x = Restless(), torch.rand(2, 3, 4, 4, requires_grad=True)
    before = state(model)
    held = HeldState.by(dict(model.named_modules()))
    assert not held.changes()
    model(x)
    changed = {name for path, name in held.changes() if not path}
    assert {"moved", "rebound", "count", "log", "table", "last", "members", "array", "inner", "fresh"} <= changed
    assert {("random", ""), ("numpy.random", ""), ("Restless", "shared")} <= set(held.commons.changes())
    held.put_back()
    assert state(model) == before
    assert {path for path, _ in held.changes()} <= {"norm"}  # torch's batch norm does not count its writes


def test_a_capture_changes_nothing() -> None:
    model = Restless()
    before = state(model)
    capture(model, (2, 3, 4, 4))
    assert state(model) == before


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 4, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.conv(x) * float(self.calls)


class Pair(nn.Module):
    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.shares = Encoder(), nn.Conv2d(4, 2, 1), shares

    def forward(self, x: Tensor) -> Tensor:
        y = self.decoder(self.encoder(x))
        return y * float(self.encoder.calls) if self.shares else y


def test_an_attribute_that_stages_share_is_refused_by_name() -> None:
    alone = capture(Pair(shares=False), (1, 3, 4, 4))
    assert Route.of(alone, [0, len(alone) - 1]).starts == (0, len(alone) - 1)
    shared = capture(Pair(shares=True), (1, 3, 4, 4))
    with pytest.raises(PlanError, match="'calls' of module 'encoder'"):
        Route.of(shared, [0, shared["decoder"].id])


class Noting(nn.Module):
    """Keeps the shape of what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.sizes = x.shape, (tuple(x.shape), "nchw", None)
        return x


def test_an_equal_shape_is_no_change() -> None:
    """One object was given for equal shapes in some runs, another one in others, which counted as a change: models that
    keep a shape were refused in micro-batches, by its name.
    """
    model = Noting()
    model(torch.zeros(2, 3, 4, 5))
    held = HeldState.by({"": model})
    model(torch.ones(2, 3, 4, 5))
    assert held.changes() == {}
    model(torch.zeros(1, 3, 4, 5))
    assert {name for _, name in held.changes()} == {"shape", "sizes"}
    held.put_back()
    assert model.shape == (2, 3, 4, 5)


def counting(step: int) -> Any:
    calls = [0]

    def act(x: Tensor) -> Tensor:
        calls[0] += step
        return x

    return act


class Acting(nn.Module):
    """Calls two functions that one function made."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = counting(1), counting(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


def test_variables_of_one_name_change_each_by_itself() -> None:
    """The last one stood for all, so that what the others left in one run and not in another was not compared."""
    model = Acting()
    before = Commons.of([model])
    model(torch.zeros(1))
    found = before.changes()
    assert sorted(calls for _, calls in found.values()) == [[1], [2]]
    assert {name for _, name in found} == {"calls", "calls (2)"}
    before.put_back()
    model.one(torch.zeros(1))
    assert [calls for _, calls in before.changes().values()] == [[1]]

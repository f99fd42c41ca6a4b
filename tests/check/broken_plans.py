"""Plans that are wrong on purpose: each block breaks one thing in the ranks' engine, in rules or in a model."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.engine import Parallel
from mural.engine.unsplit import Unsplit
from mural.shard.table import TABLE

Broken = Callable[[], Any]


class Net(nn.Module):
    """A small model with norms, a branch of tiny gradients, and nested results; `told` changes what is sharded."""

    def __init__(self, told: Callable[[Any], Any] | None = None, dropout: float = 0.0):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.third = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.faint, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.dropout, self.told = nn.Dropout(dropout), told

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.norm(self.first(x)))
        z = self.dropout(self.third(torch.tanh(self.second(y))))
        out = {"out": self.head(z) + 1e-5 * self.faint(x), "more": (y.mean((2, 3)), [z, z * 2])}
        return self.told(out) if self.told is not None and isinstance(x, mural.ShardedTensor) else out


def loss_of(result: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(result["out"], target) + 0.1 * result["more"][1][0].pow(2).mean()


# -- results ----------------------------------------------------------------------------------------------------------


def not_a_number(out: Any) -> Any:
    first, (z, twice) = out["more"]
    return {**out, "more": (first, [z, twice.masked_fill(twice > 0, float("nan"))])}


def entry_lost(out: Any) -> Any:
    return {**out, "more": (out["more"][0], out["more"][1][:1])}


def entry_lost_on_one_rank(out: Any) -> Any:
    return entry_lost(out) if torch.distributed.get_rank() == 1 else out


def entry_swapped(out: Any) -> Any:
    return {**out, "more": (out["more"][0], out["more"][1][::-1])}


def entry_added(out: Any) -> Any:
    return {**out, "extra": out["out"]}


def entry_none(out: Any) -> Any:
    return {**out, "more": (None, out["more"][1])}


def other_type(out: Any) -> Any:
    return {**out, "more": (out["more"][0].half(), out["more"][1])}


def other_shape(out: Any) -> Any:
    return {**out, "more": (out["more"][0][:, :2], out["more"][1])}


TOLD = [
    not_a_number, entry_lost, entry_lost_on_one_rank, entry_swapped, entry_added, entry_none, other_type, other_shape,
]  # fmt: skip

# -- rules ------------------------------------------------------------------------------------------------------------


@contextmanager
def rule(function: Any, change: Callable[[Any, tuple[Any, ...]], Any]) -> Generator[None]:
    name, true = TABLE[function]

    def broken(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return change(true(func, args, kwargs), args)

    with patch.dict(TABLE, {function: (name, broken)}):
        yield


def scaled_rule() -> Any:
    return rule(F.conv2d, lambda y, _: y * 1.0005)


def wrong_backward() -> Any:
    def change(y: Any, _: Any) -> Any:
        y.local.register_hook(lambda g: g * 1.002)
        return y

    return rule(torch.tanh, change)


def halo_dropped() -> Any:
    def change(y: Any, args: tuple[Any, ...]) -> Any:
        if args[1].shape[-1] == 1:
            return y
        alone = F.conv2d(args[0].local, args[1], args[2], padding=1)
        return mural.ShardedTensor(alone, y.placement)

    return rule(F.conv2d, change)


def scaled_dropout() -> Any:
    return rule(F.dropout, lambda y, _: y * 1.001)


# -- steps ------------------------------------------------------------------------------------------------------------


@contextmanager
def after_steps(change: Callable[[Parallel, dict[str, nn.Parameter], dict[str, Tensor]], None]) -> Generator[None]:
    """Change what steps on several ranks left, before the optimizer sees it."""

    def broken(true: Any) -> Any:
        def step(self: Parallel, *args: Any, **kwargs: Any) -> Tensor:
            before = {name: b.detach().clone() for name, b in self.named_buffers()}
            loss = true(self, *args, **kwargs)
            if self.world_mesh.world > 1:
                with torch.no_grad():
                    change(self, dict(self.named_parameters()), before)
            return loss

        return step

    with patch.object(Parallel, "step", broken(Parallel.step)):
        yield


def gradient(name: str, change: Callable[[Any], Any], when: Callable[[Parallel], bool] = lambda pm: True) -> Broken:
    def broken(pm: Parallel, parameters: dict[str, nn.Parameter], _: Any) -> None:
        if when(pm) and name in parameters:  # a stage has some of them
            parameters[name].grad = change(parameters[name].grad)

    return lambda: after_steps(broken)


def poked(value: Tensor, number: float) -> Tensor:
    value.view(-1)[1] = number
    return value


def buffer(name: str, change: Callable[[Tensor, Tensor], None]) -> Broken:
    return lambda: after_steps(lambda pm, _, before: change(dict(pm.named_buffers())[name], before[name]))


def swapped() -> Any:
    def broken(_: Parallel, p: dict[str, nn.Parameter], __: Any) -> None:
        a, b = p["second.weight"], p["third.weight"]
        a.grad, b.grad = b.grad, a.grad

    return after_steps(broken)


def not_averaged() -> Any:
    def broken(pm: Parallel, parameters: dict[str, nn.Parameter], _: Any) -> None:
        for p in parameters.values():
            p.grad = None if p.grad is None else p.grad * pm.world_mesh.world

    return after_steps(broken)


def not_zeroed() -> Any:
    return patch.object(Parallel, "zero_grad", lambda self: None)


@contextmanager
def lost_update() -> Generator[None]:
    def updated(self: Parallel, optimizer: Any = None) -> None:
        if self.world_mesh.rank == 1:
            with torch.no_grad():
                p = dict(self.named_parameters())["first.weight"]
                p.add_(optimizer.param_groups[0]["lr"] * p.grad)

    with patch.object(Parallel, "updated", updated):
        yield


@contextmanager
def other_draws() -> Generator[None]:
    true = Parallel.draw
    with patch.object(Parallel, "draw", lambda self: true(self) + (self.world_mesh.world > 1)):
        yield


@contextmanager
def wrong_loss() -> Generator[None]:
    true = Unsplit._over_parts
    with patch.object(Unsplit, "_over_parts", lambda self, loss: true(self, loss) * 1.0003):
        yield


BROKEN: dict[str, Broken] = {
    "a scaled rule": scaled_rule,
    "a wrong backward": wrong_backward,
    "a dropped halo": halo_dropped,
    "a buffer that is not a number": buffer("norm.running_var", lambda b, _: poked(b, float("nan")).sum()),
    "a buffer that is infinite": buffer("norm.running_mean", lambda b, _: poked(b, float("inf")).sum()),
    "a buffer that did not move": buffer("norm.running_mean", lambda b, before: b.copy_(before)),
    "a counter that did not move": buffer("norm.num_batches_tracked", lambda b, before: b.copy_(before)),
    "a gradient that is not a number": gradient("norm.weight", lambda g: poked(g, float("nan"))),
    "the last gradient is not a number": gradient("head.bias", lambda g: poked(g, float("nan"))),
    "a lost gradient": gradient("second.bias", lambda g: None),
    "a gradient of zeros": gradient("second.bias", lambda g: g * 0),
    "gradients of one another": swapped,
    "gradients not averaged": not_averaged,
    "gradients not zeroed": not_zeroed,
    "a gradient wrong in the second step": gradient("third.weight", lambda g: g * 1.05, lambda pm: pm.calls == 2),
    "a gradient wrong on one rank": gradient("third.weight", lambda g: g * 1.01, lambda pm: pm.world_mesh.rank == 1),
    "a bias off by one percent": gradient("head.bias", lambda g: g + 0.01 * g.abs().max()),
    "a faint gradient twice too large": gradient("faint.weight", lambda g: g * 2),
    "one entry of a gradient off": gradient("second.weight", lambda g: poked(g, float(g.view(-1)[1]) * 1.2)),
    "a lost update on one rank": lost_update,
    "a wrong loss": wrong_loss,
}

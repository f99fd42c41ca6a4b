"""The choice of an algorithm: the fastest for a size and a group, by prediction and by a trial of the best few."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from mural.collectives.algorithms import ALGORITHMS, all_reduction
from mural.collectives.execute import described, run
from mural.collectives.link_costs import gauge, slowest, together
from mural.collectives.ordered import ordered
from mural.collectives.price import cost
from mural.collectives.rounds import Collective
from mural.collectives.team import Team

BACKEND = "backend"
"""The name of the backend's own all-reduce among the algorithms."""
ADDED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16} | {torch.int64, torch.int32, torch.int8, torch.uint8}
)
"""The types that gloo and NCCL can add; MPI adds all types that these collectives do."""
TRIED, TRIALS, LARGEST_TRIAL = 3, 5, 2**24
GAUGED = (2**12, 2**17, 2**20)


@dataclass(frozen=True)
class Choice:
    """What `auto` chooses for tensors of about one size, and what it knows about the alternatives."""

    algorithm: str
    reason: str
    size: int = 0
    predicted: Mapping[str, float] = field(default_factory=dict[str, float])
    measured: Mapping[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        lines = [f"auto takes {self.algorithm}: {self.reason}"]
        for name in sorted({*self.predicted, *self.measured}, key=lambda n: (self.predicted.get(n, 0.0), n)):
            said = f"predicted {self.predicted[name] * 1e6:,.0f} µs" if name in self.predicted else "not predicted"
            tried = f"measured {self.measured[name] * 1e6:,.0f} µs" if name in self.measured else "not tried"
            lines.append(f"  {name:<18}{said}, {tried}")
        return "\n".join(lines)


@lru_cache(maxsize=256)
def rounds_of(algorithm: str, nodes: tuple[tuple[int, ...], ...], deterministic: bool) -> Collective:
    """The rounds of an all-reduce by name."""
    found = all_reduction(algorithm, nodes)
    return ordered(found) if deterministic else found


def choose(team: Team, flat: Tensor, deterministic: bool) -> Choice:
    """The fastest choice for such a tensor, the same on every rank. Collective the first time a size occurs."""
    team.check("auto")
    if team.size == 1:
        return Choice("ring", "one rank has nothing to send")
    if not team.backend.eager and not deterministic:
        if not adds(team, flat.dtype):
            return Choice("ring", f"{team.backend} does not add {flat.dtype}")
        return Choice(BACKEND, f"{team.backend} reduces on the device, in rounds of its own")
    bucket = max(flat.nbytes - 1, 1).bit_length()
    key = ("auto", bucket, flat.dtype, flat.device.type, deterministic)
    if key not in team.made:
        team.made[key] = tried(team, flat.new_ones(min(2**bucket, LARGEST_TRIAL) // flat.itemsize), deterministic)
    return team.made[key]


def tried(team: Team, sample: Tensor, deterministic: bool) -> Choice:
    """The fastest of the algorithms that the gauge predicts to be best and the backend's own. Collective."""
    if not team.backend.eager:
        return Choice("butterfly", "its order of summation is the one order, so it needs no more messages")
    together(team, f"auto for up to {described(sample)}{', deterministic' if deterministic else ''}")
    if "gauge" not in team.made:
        team.made["gauge"] = gauge(team, GAUGED, 3)
    every = {name: rounds_of(name, team.nodes, deterministic) for name in ALGORITHMS}
    predicted = {name: cost(each, sample.nbytes, team.made["gauge"], team.nodes) for name, each in every.items()}
    best = sorted(predicted, key=lambda name: predicted[name])[:TRIED]
    calls: dict[str, Callable[[], object]] = {name: lambda name=name: run(every[name], sample, team) for name in best}
    if not deterministic and adds(team, sample.dtype):
        calls[BACKEND] = lambda: by_backend(sample, team)
    measured = trial(team, calls, sample)
    fastest = min(measured, key=lambda name: measured[name])
    where = f"with {sample.nbytes:,} bytes on {team.size} ranks over {team.backend}"
    about = f"fastest of {len(calls)} that were tried {where}"
    return Choice(fastest, about, sample.nbytes, predicted, measured)


def adds(team: Team, dtype: torch.dtype) -> bool:
    """Whether the backend's own all-reduce accepts values of a type."""
    return team.backend.adds_all or dtype in ADDED


def by_backend(flat: Tensor, team: Team, options: str = "") -> Tensor:
    """The tensor, which now holds the sum of all ranks', by the backend's own all-reduce. Collective."""
    if team.size > 1:
        with team.calling(f"{BACKEND} of {described(flat)}{options}"):
            dist.all_reduce(flat, group=team.group)
    return flat


def trial(team: Team, calls: Mapping[str, Callable[[], object]], sample: Tensor) -> dict[str, float]:
    """The least seconds of each call, timed in turn, each time on the slowest rank. Collective."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + TRIALS):
        for name, call in calls.items():
            sample.fill_(1)
            together(team)
            begun = time.perf_counter()
            call()
            if sample.is_cuda:
                torch.cuda.synchronize(sample.device)
            seconds[name].append(time.perf_counter() - begun)
    return {name: min(slowest(team, found[1:])) for name, found in seconds.items()}

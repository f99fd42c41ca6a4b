"""Plans of every kind on up to four ranks, as the fields that are not the defaults."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Fields = dict[str, Any]


def tile(d: Random) -> tuple[int, ...]:
    """A tile: small, thin, or nearly the whole image; rarely of one dim."""
    if d.random() < 0.02:
        return (d.choice([4, 6, 9]),)
    return d.choice([3, 4, 5, 6, 8, 11, 16]), d.choice([3, 4, 6, 7, 8, 13, 40])


def streamed(d: Random) -> Fields:
    return {"stream": tile(d)}


def streamed_on_ranks(d: Random) -> Fields:
    more = d.choice(
        [{"spatial": (2, 1)}, {"spatial": (1, 2)}, {"data": 2}, {"spatial": (2,)}, {"data": 2, "spatial": (2, 1)}]
    )
    return streamed(d) | more


def spatial(d: Random) -> Fields:
    return {"spatial": d.choice([(2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (4, 1), (2,), (3,)])}


def data(d: Random) -> Fields:
    return {"data": d.choice([2, 2, 3, 4])}


def data_and_spatial(d: Random) -> Fields:
    return {"data": 2, "spatial": d.choice([(2, 1), (1, 2), (2,)])}


def staged(d: Random) -> Fields:
    """Stages, with a schedule and micro-batches."""
    schedule = d.choice(["sequential", "gpipe", "1f1b", "interleaved", "gems"])
    found: Fields = {"stage": d.choice([2, 2, 3]), "schedule": schedule}
    if schedule != "sequential" or d.random() < 0.4:
        found["microbatches"] = d.choice([2, 2, 3, 4])
    if schedule == "gems":
        found |= {"gems": d.choice(["lean", "pipelined", "interleaved"]), "replications": d.choice([1, 1, 2])}
    if schedule == "sequential" and d.random() < 0.2:
        found |= {"stage": 2, "seats": d.choice([(0, 1, 0), (1, 0, 1), (0, 0, 1)])}
    if d.random() < 0.4:
        found["cuts"] = d.choice(["layers", "time", "memory", "both"])
    return found


def staged_on_ranks(d: Random) -> Fields:
    found = staged(d) | {"stage": 2}
    if "seats" not in found and d.random() < 0.4:
        return found | {"grids": d.choice([((2, 1), (1, 1)), ((2, 1), (1, 2)), ((1, 1), (2, 1))])}
    return found | d.choice([{"spatial": (2, 1)}, {"spatial": (1, 2)}, {"data": 2}])


def in_parts(d: Random) -> Fields:
    """Micro-batches, or recompute, of a single stage."""
    return {"microbatches": d.choice([2, 3, 4])} | d.choice([{}, {}, {"data": 2}, {"spatial": (2, 1)}])


def channels(d: Random) -> Fields:
    found: Fields = {"channel": 2, "channel_layers": d.choice(["all", "all", "linear"])}
    return (
        found
        | {"channel_exchange": d.choice(["batch", "rank", "part"])}
        | d.choice([{}, {"data": 2}, {"spatial": (2, 1)}])
    )


def alone(d: Random) -> Fields:
    return {}


FAMILIES: dict[str, tuple[Callable[[Random], Fields], float]] = {
    "streamed": (streamed, 3.5), "streamed on ranks": (streamed_on_ranks, 1.5), "spatial": (spatial, 2.5),
    "data": (data, 0.8), "data and spatial": (data_and_spatial, 1.0), "staged": (staged, 2.0),
    "staged on ranks": (staged_on_ranks, 1.0), "in parts": (in_parts, 1.0), "channels": (channels, 0.8),
    "alone": (alone, 0.8),
}  # fmt: skip
"""Families of plans, and how often each is drawn."""


def plan_of(d: Random, blocks: list[str], normed: bool, simple: bool) -> Fields:
    """The fields of a plan. `blocks` can be named, `normed` models have BatchNorm, `simple` ones give one tensor."""
    family = d.choices(list(FAMILIES), [weight for _, weight in FAMILIES.values()])[0]
    found = FAMILIES[family][0](d)
    if d.random() < (0.7 if family == "alone" else 0.2):
        found["recompute"] = d.choice(["all", "all", "stages", *([tuple(blocks[:2])] if blocks else [])])
    if d.random() < (0.5 if family == "alone" else 0.12):
        found["offload"] = d.choice(
            [("activations",), ("activations", "parameters"), ("activations", "parameters", "optimizer")]
        )
    if "stream" not in found and found.get("microbatches", 1) > 1 and simple and normed and d.random() < 0.85:
        found["batchnorm"] = "micro"
    if found.get("data", 1) > 1 and d.random() < 0.2:
        found["all_reduce"] = d.choice(["ring", "tree", "butterfly", "halving-doubling", "two-level", "auto"])
    return found

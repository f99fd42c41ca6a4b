"""Predictions: every way's plan and what its ranks need, made before anything runs, kept as JSON, printed as text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.case import GIB
from harness.tables import markdown
from nets import NETS
from ways import Forecast, forecast, goals, ways

from memory import Need
from mural.plans import Plan

Forecasts = dict[str, dict[str, Forecast]]
GOALS: dict[str, dict[str, Any]] = {}
"""The optimum and the bound of each U-Net that was looked at."""


def make(nets: Iterable[str], ranks: int, cap: int) -> Forecasts:
    """The forecasts of all ways, by U-Net and way."""
    found: Forecasts = {}
    for name in nets:
        net = NETS[name]
        graph = net.graph()
        GOALS[name] = goals(net, graph, ranks, cap)
        found[name] = {way.name: forecast(net, way, graph, cap) for way in ways(net, ranks)}
    return found


def text(forecasts: Forecasts, cap: int) -> str:
    """A table of what is predicted to fit."""
    rows = [
        [net, name, str(found.way.ranks), str(found.largest(cap)), heaviest(found, cap)]
        for net, every in forecasts.items()
        for name, found in every.items()
    ]
    return markdown(["U-Net", "way", "ranks", "largest side", "GiB of each seat's ranks there"], rows)


def heaviest(found: Forecast, cap: int) -> str:
    """What the ranks of each seat need at the largest side."""
    scale = (found.largest(cap) / found.side) ** 2
    return ", ".join(f"{need.at(scale) / GIB:.1f}" for need in found.needs)


def save(forecasts: Forecasts, cap: int, path: Path) -> None:
    """Write them to a file."""
    records = [
        {
            "net": net,
            "way": name,
            "aim": found.aim,
            "side": found.side,
            "plan": None if found.plan is None else asdict(found.plan),
            "needs": [[need.fixed, need.pixels] for need in found.needs],
            "largest": found.largest(cap),
        }
        for net, every in forecasts.items()
        for name, found in every.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(record) for record in records)
    path.write_text(f'{{\n "cap": {cap},\n "goals": {json.dumps(GOALS)},\n "records": [\n  {rows}\n ]\n}}\n')


def load(path: Path) -> Forecasts:
    """The forecasts of a file."""
    if not path.is_file():
        raise SystemExit(f"there is no {path.name}: run the part `predicted` first")
    found: Forecasts = {}
    for record in json.loads(path.read_text())["records"]:
        way = next(way for way in ways(NETS[record["net"]]) if way.name == record["way"])
        plan = None if record["plan"] is None else Plan(**record["plan"])
        needs = tuple(Need(*need) for need in record["needs"])
        found.setdefault(record["net"], {})[way.name] = Forecast(way, plan, record["aim"], record["side"], needs)
    return found

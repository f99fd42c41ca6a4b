"""Refitting: a sweep on the device at hand, and the model fitted on it, in one call."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fit import fit, samples_of
from host import host_seconds
from sweep import sweep
from trials import release, try_case

from mural.cost.cache import cache_folder, setting
from mural.cost.clock import clock_of
from mural.cost.fitted_model import Model
from mural.cost.rates import Rates, rates

COUNT = 20000


def refit(kind: str, minutes: float, path: Path | None, seed: int = 0) -> Path:
    """The file of a model fitted on this machine; `Hardware(…, model=str(path))` uses it.

    Layers are measured for that many minutes, most of them convolutions; then the model is fitted and written, into the
    user's cache folder unless a path is given.
    """
    device = torch.device(kind)
    reached = rates(device)
    host = host_seconds(device) if device.type == "cuda" else {}
    records = measured_sweep(device, minutes, seed)
    about = {"setting": setting(device), "layers": len(records)}
    model = fit(samples_of(records, device.type), reached, name="here", kind=device.type, host=host, about=about)
    path = path or cache_folder() / "cost" / f"fitted-{device.type}.json"
    model.save(path)
    return path


def measured_sweep(device: torch.device, minutes: float, seed: int = 0) -> list[Mapping[str, Any]]:
    """What a sweep measured in that many minutes; a layer that the device has no memory for is left out."""
    clock, end = clock_of(device), time.monotonic() + 60 * minutes
    found: list[Mapping[str, Any]] = []
    for case in sweep(device.type, COUNT, seed):
        if time.monotonic() > end:
            break
        try:
            found.append({"kind": "sweep", "case": case.encode(), **try_case(case, clock).encode()})
        except torch.OutOfMemoryError:
            release()
    return found


def model_of(records: list[Mapping[str, Any]], device: str, name: str) -> Model:
    """The model fitted on the records of `mural bench cost`: rates, host and sweep, of one kind of device."""
    fields = Rates.__dataclass_fields__
    reached = next(Rates(**{k: r[k] for k in fields if k in r}) for r in records if r["kind"] == "rates")
    host = next(({k: (v[0], v[1]) for k, v in r["seconds"].items()} for r in records if r["kind"] == "host"), {})
    versions = next((r for r in records if r["kind"] == "versions"), {})
    about = {"torch": versions.get("torch"), "device": versions.get("device")}
    samples = samples_of(records, device)
    return fit(samples, reached, name=name, kind=device, host=host if device == "cuda" else {}, about=about)

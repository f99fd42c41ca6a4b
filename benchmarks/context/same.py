"""The same training on 1, 2 and 4 ranks, in float64, beside plain torch: is the curve the same?"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from harness.results import Log

import mural
from context.cases import Run, Settings
from context.scene import scenes
from context.training import Engine, Training, take
from mural.ranks import run_local

GRIDS: dict[str, tuple[int, int]] = {"1 rank": (1, 1), "2 ranks": (2, 1), "4 ranks": (2, 2)}


def trained(settings: Settings, run: Run, device: str, mesh: mural.Mesh | None) -> tuple[list[float], torch.Tensor]:
    """The losses of the steps and the parameters at the end."""
    scene = scenes(settings.pool, settings.size, 1, torch.device(device))
    training = Training(settings, run, scene, Engine(dtype=torch.float64, mesh=mesh))
    take([training], settings.steps)
    return training.losses.tolist(), torch.cat([p.detach().flatten() for p in training.model.parameters()]).cpu()


def rank_process(rank: int, settings: Settings, run: Run, device: str, name: str, folder: str) -> None:
    """Train on this rank's pieces, and hold the end against plain torch; rank 0 writes what it found."""
    mesh = mural.init(spatial=GRIDS[name])
    losses, parameters = trained(settings, run, device, mesh)
    plain = torch.load(Path(folder) / "plain.pt", weights_only=True)
    apart = float((parameters - plain).abs().max() / plain.abs().max())
    if rank == 0:
        found = {"losses": losses, "parameters": apart, "messages": mesh.transport.describe()}
        (Path(folder) / f"{name}.json").write_text(json.dumps(found))


def compare(settings: Settings, run: Run, device: str, names: Sequence[str], log: Log) -> None:
    """Train in plain torch and on each of these grids, and write each curve with its distance from the plain one."""
    losses, parameters = trained(settings, run, device, None)
    about = {"case": run.encode(), "steps": settings.steps, "size": settings.size, "images": settings.images}
    log.write("curve", name="plain torch", losses=losses, **about)
    with tempfile.TemporaryDirectory(prefix="mural-") as folder:
        torch.save(parameters, Path(folder) / "plain.pt")
        for name in names:
            run_local(rank_process, math.prod(GRIDS[name]), settings, run, device, name, folder)
            found = json.loads((Path(folder) / f"{name}.json").read_text())
            apart = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], losses, strict=True))
            log.write("curve", name=name, difference=apart, **found, **about)
            log.say(f"{name}: off plain torch by {apart:.1e} (losses), {found['parameters']:.1e} (parameters)")

"""What a start writes to a run's folder: config.toml, and a line of starts.jsonl with what was started, and where."""

from __future__ import annotations

import json
import platform
import shlex
import socket
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mural.checkpoint.manifest import mural_version
from mural.comm.failure.agree import gather, together
from mural.data import Loader
from mural.errors import ConfigError
from mural.ranks import Mesh
from mural.ranks.spawn import processors
from mural.train.config import Config
from mural.train.domain_batches import DomainLoader
from mural.train.meters import peak_memory
from mural.typed import build

RESOLVED, STARTS = "config.toml", "starts.jsonl"
Facts = dict[str, Any]
Batches = Loader | DomainLoader


@dataclass(frozen=True)
class StartRecord:
    """One start of a run, from its beginning or from a checkpoint."""

    step: int
    """The updates that had been taken."""
    time: float
    total: int
    """The update with which the run ends."""
    plan: str
    weights: int
    images: dict[str, Facts]
    """Of each domain, the only one under "": samples to train on, those held out, channels, type and extents."""
    hosts: tuple[str, ...]
    """The machine of each rank."""
    devices: tuple[str, ...]
    """What each rank computes on."""
    memory: tuple[int, ...]
    """The largest memory of each rank before its first step."""
    command: str
    directory: str
    versions: dict[str, str]
    before: Facts
    """How the start before this one ended, as its status said; empty for the first."""


def record_start(
    config: Config, mesh: Mesh, device: torch.device, *,
    step: int, total: int, weights: int, images: dict[str, Facts], before: Facts,
) -> None:  # fmt: skip
    """Add a line for this start; one from the beginning is the first. Collective."""
    mine = (socket.gethostname(), device_name(device), peak_memory(device))
    hosts, devices, memory = zip(*gather(mesh, mine, "machines").values(), strict=True)
    with together(mesh, "the start of the run"):
        if mesh.rank != 0:
            return
        plan, now = ", ".join(str(config.plan).splitlines()), round(time.time(), 3)
        about = command(), str(Path.cwd()), versions(config.model.factory), before if step else {}
        made = StartRecord(step, now, total, plan, weights, images, hosts, devices, memory, *about)
        path = config.folder / STARTS
        try:
            with path.open("a" if step else "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(made)) + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def starts_in(folder: Path) -> list[StartRecord]:
    """The starts of the run in a folder, in their order; lines that cannot be read are left out."""
    path = folder / STARTS
    found: list[StartRecord] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(build(StartRecord, json.loads(line)))
        except (ValueError, AttributeError):
            continue
    return found


def images_of(batches: Batches, held_out: Batches | None) -> dict[str, Facts]:
    """What is known of the images of each domain."""
    training, held = loaders_of(batches), loaders_of(held_out)
    found: dict[str, Facts] = {}
    for name, loader in training.items():
        found[name] = {"samples": len(loader.dataset), "held_out": len(held[name].dataset) if name in held else 0}
        if (facts := loader.facts) is not None:
            dtype = str(facts.dtype).removeprefix("torch.")
            extents = {"smallest": facts.smallest, "largest": facts.largest}
            found[name] |= {"channels": facts.channels, "dtype": dtype, **extents}
    return found


def loaders_of(batches: Batches | None) -> dict[str, Loader]:
    """The loader of each domain by its name."""
    if isinstance(batches, DomainLoader):
        return dict(batches.loaders)
    return {} if batches is None else {"": batches}


def device_name(device: torch.device) -> str:
    """What a rank computes on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {processors()} cores"


def command() -> str:
    """What was typed to start this process, as far as Python knows it; that of local ranks is their parent's."""
    first, *rest = sys.argv or [""]
    program = Path(first)
    named = "mural" if program.name == "mural" or program.parts[-2:] == ("mural", "__main__.py") else program.name
    return shlex.join([*(["python"] if named.endswith(".py") else []), named, *rest])


def versions(factory: str) -> dict[str, str]:
    """The versions of what computes, with the package that the model comes from.

    >>> sorted(versions("monai.networks.nets:UNet"))
    ['Python', 'monai', 'mural', 'torch']
    """
    found = {"mural": mural_version(), "torch": torch.__version__, "Python": platform.python_version()}
    package = factory.split(":")[0].split(".")[0]
    try:
        return found if package in found else {**found, package: version(package)}
    except (PackageNotFoundError, ValueError):
        return found

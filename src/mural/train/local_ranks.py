"""Local ranks: without a launcher, a run starts as many as `--devices` or its plan asks for, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

from mural.comm.backends import needs_mpirun
from mural.errors import PlanError
from mural.ranks.join import placement
from mural.ranks.spawn import run_local
from mural.train.config import Config

T = TypeVar("T")


def on_local_ranks(function: Callable[[int, Config], T], config: Config) -> T:
    """What rank 0's `function(rank, config)` returns: on local ranks that are started here, or on this rank alone."""
    ranks, place = local_ranks(config), placement()
    if ranks == 1:
        return function(place.rank, config)
    launch = config.launch
    backend = None if launch.backend == "auto" else launch.backend
    return run_local(
        function, ranks, config, device=launch.device, backend=backend, restarts=launch.restarts, say=typer.echo
    )


def local_ranks(config: Config) -> int:
    """How many ranks to start here: one where a launcher started this process as one of several.

    What a plan cannot be is told before they are started.
    """
    place, wanted = placement(), config.launch.devices or config.plan.devices
    if config.plan.devices > 1 and wanted != config.plan.devices:
        raise PlanError(
            f"launch.devices = {wanted}, but the plan needs {config.plan.devices} ranks "
            f"({', '.join(str(config.plan).splitlines())}): make them equal, or leave one out"
        )
    config.plan.check_runnable()
    if (folder := config.plan.offload_folder) and not Path(folder).is_dir():
        raise PlanError(f"plan.offload_folder = {folder!r} is not a folder: make it, or name another")
    if config.plan.domain > 1 and not config.targets.images:
        raise PlanError(
            f"plan.domain = {config.plan.domain} divides the domains of a separation network, but targets.images names "
            f"none: set plan.domain = 1, or name the images of target domains there"
        )
    if place.world > 1 and config.plan.devices not in (1, place.world):
        raise PlanError(
            f"{place.launcher} started {place.world} ranks, but the plan needs {config.plan.devices} "
            f"({', '.join(str(config.plan).splitlines())}): start as many, or change the plan"
        )
    if place.world > 1 or place.launcher != "single":
        return 1
    if wanted > 1 and needs_mpirun(config.launch.backend):
        raise PlanError(f'launch.backend = "mpi": start the ranks by mpirun -n {wanted} mural train …')
    return wanted

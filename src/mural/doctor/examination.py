"""The examination: one report of the launch, the machine, backends, features and speeds."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from mural.comm.backends import backend_of
from mural.comm.failure.agree import gather
from mural.comm.hosts import host
from mural.doctor.features import backends, features
from mural.doctor.findings import Finding, Report, Section, found
from mural.doctor.machine import machine, versions
from mural.doctor.speed import SECONDS, link_items, local_link, speeds, trips
from mural.ranks import Placement, placement
from mural.ranks.join import join


def examine(folder: Path | str = ".", measure: bool = True) -> Report:
    """What mural finds on this machine; `measure` takes some seconds more for the speeds, the disk's in a folder.

    It never raises: what fails becomes an item with its reason. Under a launcher all ranks call it; they join, the
    real link between them is measured, and rank 0 shows the report.
    """
    launch = found("placement", lambda: placed(placement()))
    place = placement_or_single()
    joined = found("joined", joining) if place.world > 1 else ()
    rank = dist.get_rank() if dist.is_initialized() else place.rank
    sections = [
        Section("launch", (*launch, *joined)),
        Section("versions", versions()),
        Section("machine", machine()),
        Section("backends and launchers", backends() if rank == 0 else ()),
        Section("optional features", features() if rank == 0 else ()),
    ]
    if measure:
        link = real_link if dist.is_initialized() else local_link if place.world == 1 else not_joined
        sections.append(Section("speeds", speeds(Path(folder), link) if rank == 0 else found("link", link)))
    return Report(tuple(sections), rank)


def placement_or_single() -> Placement:
    """The placement; a single process where the variables contradict each other."""
    try:
        return placement()
    except ValueError:
        return Placement()


def placed(place: Placement) -> tuple[Finding, ...]:
    """The placement and the sentences of why."""
    return (Finding("placement", str(place)), *(Finding("", sentence) for sentence in place.why))


def joining() -> str:
    """Join the run, and say how messages travel."""
    world, _, transport = join(None, SECONDS)
    return f"{world} ranks, {transport.describe()}"


def not_joined() -> tuple[Finding, ...]:
    """No link between ranks that did not join."""
    return (Finding("link", "not measured, since the ranks did not join", "failed"),)


def real_link() -> tuple[Finding, ...]:
    """Latency and speed from rank 0 to the next rank, and to one on another machine. All ranks call it."""
    hosts = gather(dist.group.WORLD, host(), "machines")
    cuda = backend_of(dist.group.WORLD).on_stream
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if len(hosts) == 1:
        return (Finding("link", "one rank alone"),)
    items: list[Finding] = []
    pairs = {1: "another local rank" if hosts[1] == hosts[0] else "another machine"}
    far = next((rank for rank, other in hosts.items() if other != hosts[0]), 1)
    pairs.setdefault(far, "another machine")
    for peer, words in pairs.items():
        if dist.get_rank() in (0, peer):
            items += link_items(f"to {words} over {backend_of(dist.group.WORLD)}", *trips(0, peer, device))
        dist.barrier()
    return tuple(items)

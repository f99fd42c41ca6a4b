"""Hardware: what a device and its links can do, as data, known or measured.

The rates are those that large products of matrices and large copies reach, not those of a datasheet: predictions are
made relative to them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from mural.comm.messages import Transfer
from mural.cost.fitted_model import load
from mural.cost.rates import Rates, rates
from mural.errors import PlanError
from mural.ranks import Mesh

# -- links between ranks -----------------------------------------------------------------------------------------------


SIZES = (2**10, 2**14, 2**18, 2**21, 2**24)
REPEATS = 9


@dataclass(frozen=True)
class Link:
    """Seconds that any message takes, and bytes a second beyond that."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """The time of a message of that many bytes.

        >>> Link(1e-5, 1e9).seconds(1e6)
        0.00101
        """
        return self.latency + size / self.bandwidth


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The link whose times are nearest, relatively, to those measured: one line through all sizes.

    The latency lies within a hundredth of the shortest time and all of it; the bandwidth is the best for that latency,
    so it is of a sensible size on a busy machine, too, where the line alone may fall.

    >>> link = fit_link([1000, 10**6, 10**7], [1.1e-5, 1.01e-3, 1.001e-2])
    >>> round(link.latency * 1e6, 1), round(link.bandwidth / 1e9, 2)
    (10.0, 1.0)
    >>> round(fit_link([1000, 10**6, 10**7], [9e-3, 1.1e-3, 1.2e-3]).bandwidth / 1e9)
    101
    """
    times, extents = np.array(seconds), np.array(sizes, dtype=np.float64)
    each = extents / times
    line, *_ = np.linalg.lstsq(np.stack([1 / times, each], axis=1), np.ones(len(times)), rcond=None)
    latency = float(np.clip(line[0], times.min() / 100, times.min()))
    a_byte = float(each @ (1 - latency / times) / (each @ each))
    return Link(latency, 1 / max(a_byte, 1e-15))


def measure_link(mesh: Mesh, first: int, second: int, device: torch.device | str = "cpu") -> Link:
    """The link between two ranks, the same answer on every rank; all ranks of the mesh call it together."""
    if first == second or not {first, second} <= set(mesh.ranks or range(mesh.world)):
        raise PlanError(
            f"ranks {first} and {second} are not a pair of a mesh of {mesh.world} ranks: give two different ones"
        )
    seconds = torch.zeros(len(SIZES), dtype=torch.float64)
    for place, size in enumerate(SIZES):
        found = [round_trip(mesh, first, second, size, torch.device(device)) / 2 for _ in range(REPEATS + 1)]
        seconds[place] = median(found[1:])
    shared = mesh.transport.outbound(seconds)
    dist.broadcast(shared, src=first, group=mesh.transport.group)
    return fit_link(SIZES, shared.cpu().tolist())


def round_trip(mesh: Mesh, first: int, second: int, size: int, device: torch.device) -> float:
    """Seconds in which a message goes to the other rank and comes back; other ranks take part without sending."""
    pair = {first: second, second: first}
    peer = pair.get(mesh.rank)
    data = torch.ones(size, dtype=torch.uint8, device=device)
    begin = time.perf_counter()
    for sender in (first, second):
        sends = {peer: data} if peer is not None and mesh.rank == sender else {}
        sizes = {peer: size} if peer is not None and mesh.rank != sender else {}
        arrived = Transfer(mesh.transport, "measured link", sends, sizes, data).wait()
        for buffer in arrived.values():
            _ = buffer[-1:].cpu()  # so that a copy to a GPU counts too
    return time.perf_counter() - begin


# -- machines ----------------------------------------------------------------------------------------------------------


GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """A device: its memory, its rates, its links to other devices and to the host, and the model fitted for it.

    `model` is the name of a fitted model, or the path of one; a device of the same kind with other rates can use it
    too, since what is fitted is how near each kind of layer comes to the rates.
    """

    name: str
    kind: str
    memory: int
    rates: Rates
    link: Link
    host: Link
    model: str
    host_memory: int
    """Bytes of the machine that it is in."""

    @staticmethod
    def named(name: str) -> Hardware:
        """A known machine, or the one at hand for the name "here".

        >>> Hardware.named("h200").kind
        'cuda'
        """
        if name == "here":
            return Hardware.here()
        if name not in KNOWN:
            raise PlanError(f"no hardware is called {name!r}: choose {', '.join(KNOWN)}, or 'here' to measure it")
        known = KNOWN[name]
        rest = known.link, known.host, name, known.host_memory
        return Hardware(name, known.kind, known.memory, load(name).rates, *rest)

    @staticmethod
    def here(device: torch.device | str | None = None) -> Hardware:
        """The machine at hand: a GPU where there is one. Its rates are measured in a second or two, not its links."""
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        like = "h200" if device.type == "cuda" else "cpu"
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device.type == "cuda":
            memory, name = torch.cuda.get_device_properties(device).total_memory, torch.cuda.get_device_name(device)
        else:
            memory, name = host, "cpu"
        return Hardware(name, device.type, memory, rates(device), KNOWN[like].link, KNOWN[like].host, like, host)


@dataclass(frozen=True)
class KnownMachine:
    """What is known of a machine besides the rates, which are in its fitted model."""

    kind: str
    memory: int
    link: Link
    host: Link
    host_memory: int


KNOWN: dict[str, KnownMachine] = {
    "h200": KnownMachine("cuda", 150109880320, link=Link(1e-5, 4e11), host=Link(1e-5, 5.5e10), host_memory=128 * GIB),
    "cpu": KnownMachine("cpu", 16 * GIB, link=Link(5e-5, 2e9), host=Link(0.0, 2.5e10), host_memory=16 * GIB),
}
"""Machines whose models come with the package. The H200's link is NVLink's by its datasheet, less a tenth; its way to
the host was measured. The CPU is one thread of a server, and its link one between two processes over gloo."""

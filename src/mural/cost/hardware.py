"""Hardware: what a device and its links can do, as data; known machines, and the one at hand.

The rates are those that large products of matrices and large copies reach, not those of a datasheet: predictions are
made relative to them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from mural.cost.fitted_model import load
from mural.cost.links import Link
from mural.cost.rates import Rates, rates
from mural.errors import PlanError

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
        return Hardware(name, known.kind, known.memory, load(name).rates, known.link, known.host, name)

    @staticmethod
    def here(device: torch.device | str | None = None) -> Hardware:
        """The machine at hand: a GPU where there is one. Its rates are measured in a second or two, not its links."""
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        like = "h200" if device.type == "cuda" else "cpu"
        if device.type == "cuda":
            memory, name = torch.cuda.get_device_properties(device).total_memory, torch.cuda.get_device_name(device)
        else:
            memory, name = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "cpu"
        return Hardware(name, device.type, memory, rates(device), KNOWN[like].link, KNOWN[like].host, like)


@dataclass(frozen=True)
class KnownMachine:
    """What is known of a machine beside the rates, which stand in its fitted model."""

    kind: str
    memory: int
    link: Link
    host: Link


KNOWN: dict[str, KnownMachine] = {
    "h200": KnownMachine("cuda", 150109880320, link=Link(1e-5, 4e11), host=Link(1e-5, 5.5e10)),
    "cpu": KnownMachine("cpu", 16 * GIB, link=Link(5e-5, 2e9), host=Link(0.0, 2.5e10)),
}
"""Machines whose models come with the package. The H200's link is NVLink's by its datasheet, less a tenth; its way to
the host was measured. The CPU is one thread of a server, and its link one between two processes over gloo."""

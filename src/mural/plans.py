"""The plan: how a model and its images are divided over ranks, as frozen data, in and out of TOML.

Written by hand or by a planner, applied by `parallelize`. The result of a run does not depend on it, up to rounding;
only `average`, `batchnorm` and `precision` change it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from math import ceil, prod
from pathlib import Path
from typing import Literal

from mural.errors import PlanError
from mural.text_files import save_text
from mural.typed import build, convert, dump, hints_of, read_toml

Schedule = Literal["sequential", "gpipe", "1f1b", "interleaved", "gems"]
AllReduce = Literal[
    "backend",
    "auto",
    "ring",
    "ring-blocking",
    "tree",
    "butterfly",
    "halving-doubling",
    "two-level",
    "parameter-server",
]
Exchange = Literal["batch", "rank", "part"]
Offloaded = Literal["activations", "parameters", "optimizer"]


@dataclass(frozen=True)
class Plan:
    """How a run is divided; every default changes nothing.

    >>> plan = Plan(data=2, spatial=(2, 1))
    >>> plan.devices
    4
    >>> print(plan)
    data = 2
    spatial = [2, 1]
    """

    data: int = 1
    """Ranks over which the images of a batch are divided."""
    stage: int = 1
    """Parts of the model that follow each other, each on ranks of its own."""
    spatial: tuple[int, ...] = ()
    """Ranks along each spatial dim of the image, for each stage."""
    grids: tuple[tuple[int, ...], ...] = ()
    """The grid of each stage, where they differ; then `spatial` stays empty."""
    channel: int = 1
    """Ranks over which split layers divide their channels, and all other layers the images of a batch."""
    channel_layers: str | tuple[str, ...] = "linear"
    """Which layers are split: "linear" ones alone (convolutions stay data-parallel), "all" with convolutions, or names
    as "fc1:output" and "fc2:input"."""
    channel_exchange: Exchange = "batch"
    """How the images of a channel group meet at a split layer: the whole "batch" at once, one "rank"'s at a time, or a
    "part" of every rank's at a time; the next ones travel while these are computed on."""
    domain: int = 1
    """Ranks over which the domains of a separation network are divided; each has `stage` parts of every domain."""
    schedule: Schedule = "sequential"
    """The order in which stages work on micro-batches."""
    microbatches: int = 1
    """Parts of a batch that follow each other through the stages."""
    chunks: int = 2
    """Stages that each rank holds under "interleaved"."""
    seats: tuple[int, ...] = ()
    """Under "sequential", the place of each part of the model among the `stage` ones, where several parts share one:
    (0, 1, 2, 1, 0) puts the ends of a U-Net together. There are then as many parts as numbers."""
    replications: int = 1
    """How often the two replicas of GEMS take turns before gradients are added up."""
    gems: Literal["lean", "pipelined", "interleaved"] = "interleaved"
    """How closely the replicas of GEMS follow each other: "lean" keeps one micro-batch's activations at a time."""
    cuts: str | tuple[str, ...] = "memory"
    """Where stages begin: balanced by "layers", "time" or "memory", by "both" (time within `memory`), or the names of
    blocks."""
    memory: str = ""
    """What a rank may reserve on its device, as "16GiB". Cuts are balanced within it, an image at a time; a streamed
    step keeps values within it; with `offload`, as much leaves for the host as it takes."""
    stream: tuple[int, ...] | None = None
    """The tile in which the image is gone through, its extent along each dim; None: the whole image at once."""
    recompute: str | tuple[str, ...] = ()
    """Blocks whose activations are computed again in backward; "all" blocks, or "stages" as a whole."""
    offload: tuple[Offloaded, ...] = ()
    """What leaves for the host's memory between two uses, and is back before the second: "activations" that backward
    needs, "parameters" and gradients that a step adds to, what the "optimizer" keeps. Without `memory`, a GPU lets
    leave what costs no time."""
    offload_folder: str = ""
    """A folder on a disk, for what leaves and has no room in the host's memory."""
    batchnorm: Literal["global", "rank", "micro", "micro-rank"] = "global"
    """Whose statistics BatchNorm uses: the whole batch's, each rank's own piece's, each micro-batch's, or those of each
    rank's own piece of each micro-batch."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """"bfloat16" runs under autocast; "float32" leaves the model's types as they are."""
    all_reduce: AllReduce = "backend"
    """How gradients are added up: by the backend's own all-reduce, by rounds of ours, or by the faster: "auto"."""
    average: int = 0
    """0: gradients are averaged in every step. k: each data rank trains alone (local SGD), and weights are averaged
    every k updates."""

    def __post_init__(self) -> None:
        for name, kind in hints_of(Plan).items():
            object.__setattr__(self, name, convert(kind, self.tidied(name), name))
        for name in ("data", "stage", "channel", "domain", "microbatches", "replications", "chunks"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} = {getattr(self, name)}: sizes are whole numbers of at least 1")
        if len(self.spatial) > 3 or any(n < 1 for n in self.spatial):
            raise PlanError(f"spatial = {self.spatial}: give 1 to 3 sizes of at least 1")
        if self.grids and (self.spatial or len(self.grids) != self.stage or any(n < 1 for g in self.grids for n in g)):
            raise PlanError(
                f"grids = {self.grids} for {self.stage} stages, spatial = {self.spatial}: give each stage a grid of "
                f"sizes of at least 1, and leave spatial empty"
            )
        if self.seats and (self.schedule != "sequential" or set(self.seats) != set(range(self.stage))):
            raise PlanError(
                f"seats = {self.seats} for stage = {self.stage} and schedule = {self.schedule!r}: under "
                f'"sequential", give each part of the model a place from 0 to {self.stage - 1}, and use every place'
            )
        if len(set(self.offload)) < len(self.offload):
            raise PlanError(f"offload = {list(self.offload)} names something twice: name each once")
        if self.memory:
            bytes_of(self.memory)
        if isinstance(self.channel_layers, str) and self.channel_layers not in ("linear", "all"):
            raise PlanError(
                f'channel_layers = {self.channel_layers!r}: give "linear", "all", or a list of names, as ["fc1:output"]'
            )
        if self.average < 0:
            raise PlanError(f"average = {self.average}: give 0 for gradients, or a number of updates")

    def tidied(self, name: str) -> object:
        """A field, with a single size as a grid of one dim."""
        value = getattr(self, name)
        return (value,) if name == "spatial" and type(value) is int else value

    @property
    def norm_scope(self) -> Literal["global", "rank"]:
        """Whether BatchNorm looks at all ranks' pieces, or at each one's own."""
        return "rank" if self.batchnorm in ("rank", "micro-rank") else "global"

    @property
    def norms_apart(self) -> bool:
        """Whether BatchNorm may look at each micro-batch alone."""
        return self.batchnorm in ("micro", "micro-rank")

    @property
    def devices(self) -> int:
        """How many ranks the plan needs."""
        return self.data * self.channel * self.domain * sum(map(prod, self.seat_grids))

    @property
    def seat_grids(self) -> tuple[tuple[int, ...], ...]:
        """The grid of each seat of the pipeline."""
        return self.grids or (self.spatial,) * self.stage

    @property
    def stages(self) -> int:
        """How many parts the model is cut into."""
        if self.seats:
            return len(self.seats)
        return self.stage * self.chunks if self.schedule == "interleaved" else self.stage

    @property
    def piped(self) -> bool:
        """Whether the model runs in parts: stages, micro-batches, or recomputed as a whole."""
        return self.stages > 1 or self.microbatches > 1 or self.recompute == "stages"

    def check_runnable(self) -> None:
        """Raise for what this version cannot run yet."""
        if self.domain > 1:
            self.check_domains()
        if self.stream is not None:
            self.check_streamed()
        if self.schedule == "gems" and self.stage < 2:
            raise PlanError('schedule = "gems" with stage = 1: its replicas run through stages; set stage = 2 or more')
        if isinstance(self.cuts, tuple) and self.stages == 1:
            raise PlanError(f"cuts = {list(self.cuts)} with stage = 1: one stage has no cuts; set stage, or leave them")
        if self.channel > 1 and self.piped:
            raise PlanError(
                f"channel = {self.channel} with stages, micro-batches or recomputed stages cannot be run by this "
                f"version: set stage = 1, microbatches = 1 and recompute blocks by name, or channel = 1"
            )
        if self.channel > 1 and self.average:
            raise PlanError(
                f"channel = {self.channel} with average = {self.average}: data ranks that train alone hold whole "
                f"layers; set average = 0, or channel = 1"
            )
        if self.average and self.piped:
            raise PlanError(
                f"average = {self.average} with stages or micro-batches cannot be run by this version: set 0"
            )

    def check_domains(self) -> None:
        """Raise for what does not go with a domain axis."""
        for name in ("schedule", "microbatches", "seats", "grids", "channel", "average", "stream"):
            if getattr(self, name) != getattr(DEFAULT, name):
                raise PlanError(
                    f"domain = {self.domain} with {name} = {getattr(self, name)!r} cannot be run: a domain has its "
                    f"own place, and its losses look at whole batches; leave {name} out, or set domain = 1"
                )

    def check_streamed(self) -> None:
        """Raise for what does not go with streaming."""
        if not self.stream or any(n < 1 for n in self.stream):
            raise PlanError(f"stream = {self.stream}: give the tile's extent along each dim, as [2048, 2048]")
        for name in ("stage", "microbatches", "channel", "average", "batchnorm", "seats"):
            if getattr(self, name) != getattr(DEFAULT, name):
                raise PlanError(
                    f"stream = {self.stream} with {name} = {getattr(self, name)!r} cannot be run by this version: "
                    f"leave one of them out"
                )
        if self.recompute == "stages":
            raise PlanError('stream with recompute = "stages": there are no stages; name blocks, or "all"')

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a TOML file; an unknown key is an error."""
        return build(cls, read_toml(path))

    def save(self, path: str | Path) -> None:
        """Write the plan to a TOML file."""
        save_text(path, dump(self))

    def because(self, why: str) -> Plan:
        """The plan itself, with the reasons of whoever made it; they are not saved with it."""
        object.__setattr__(self, "why", why)
        return self

    def explain(self) -> str:
        """Why the plan is as it is: what was considered, and what each would have taken."""
        return getattr(self, "why", "This plan was written by hand, or read from a file: nothing was considered.")

    def __str__(self) -> str:
        changed = {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        lines = [line for line in dump(self).splitlines() if line.split(" = ")[0] in changed]
        return "\n".join(lines) or "one rank"


UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50,
}  # fmt: skip


def bytes_of(text: str) -> int:
    """A number of bytes as people write it.

    >>> bytes_of("16GiB"), bytes_of("1.5 MB")
    (17179869184, 1500000)
    """
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*([A-Za-z]*)\s*", text)
    if not found:
        raise PlanError(f'memory = {text!r}: write a number of bytes with its unit, as "16GiB" or "800MB"')
    number, unit = found.groups()
    if unit.upper() not in UNITS:
        raise PlanError(f'memory = {text!r}: {unit!r} is no unit; KB to PB and KiB to PiB are, as in "{number}GiB"')
    size = int(float(number) * UNITS[unit.upper()])
    if not size:
        raise PlanError(f'memory = {text!r} is less than a byte: give what the device may reserve, as "16GiB"')
    return size


def memory_for(size: float) -> str:
    """The memory of at least so many bytes, as a plan has it: in whole MiB, or from 1 GiB on in hundredths of a GiB.

    >>> memory_for(1), memory_for(300 * 2**20 + 1), memory_for(7.4301 * 2**30)
    ('1MiB', '301MiB', '7.44GiB')
    """
    if size <= 1023 * 2**20:
        return f"{max(1, ceil(size / 2**20))}MiB"
    hundredths = ceil(size / 2**30 * 100)
    while bytes_of(text := f"{hundredths / 100:.2f}GiB") < size:  # it is cut off to whole bytes
        hundredths += 1
    return text


DEFAULT = Plan()

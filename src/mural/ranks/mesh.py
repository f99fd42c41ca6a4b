"""The mesh: ranks arranged along named axes, and the choice of a grid for an image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod

import torch
import torch.distributed as dist

from mural.comm.messages import Transport
from mural.errors import PlanError
from mural.ranks.join import join

SPATIAL = ("spatial0", "spatial1", "spatial2")
AXES = ("data", "stage", "domain", "channel", *SPATIAL)


@dataclass(frozen=True)
class Mesh:
    """All ranks of a run, or some, arranged along the axes of `AXES`; every axis exists, most have size 1.

    Ranks are numbered with the last axis fastest, so spatial neighbours are near each other. `ranks` lists, in order,
    the run's ranks that the mesh consists of; empty for all.

    If a batch comes in micro-batches, `now` is the mesh of ranks, and this is that mesh as a micro-batch sees it: its
    data axis has the ranks of all micro-batches one after the other; those of other micro-batches have negative
    numbers. The mesh of a tile (`tiled`) has such numbers for everything that comes before it and after it.
    """

    sizes: tuple[int, ...]
    rank: int
    spatial_dims: int
    transport: Transport = field(repr=False)
    ranks: tuple[int, ...] = ()
    now: Mesh | None = field(default=None, repr=False)
    tiled: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.sizes, self.rank, self.spatial_dims, self.transport, self.ranks, self.now))

    def size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        return self.sizes[AXES.index(axis)]

    @property
    def world(self) -> int:
        """The number of its ranks."""
        return prod((self.now or self).sizes)

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """The coordinates of this rank along each axis."""
        return self.coordinates_of(self.rank)

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank along each axis."""
        found: dict[str, int] = {}
        index = self.ranks.index(rank) if self.ranks else rank
        for axis, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            index, found[axis] = divmod(index, size)
        return found

    @property
    def spatial(self) -> tuple[int, ...]:
        """The grid over the spatial dims."""
        return tuple(self.size(axis) for axis in SPATIAL[: self.spatial_dims])

    def rank_at(self, **moved: int) -> int:
        """The rank at this rank's coordinates, with some of them replaced."""
        at, index = self.coordinates | moved, 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            index = index * size + at[axis]
        return self.ranks[index] if self.ranks else index

    @cached_property
    def folded(self) -> Mesh:
        """The same ranks with the channel axis as part of the data axis: the mesh of images and all activations.

        Only layers that are split by channels distinguish the two axes.
        """
        if self.size("channel") == 1:
            return self
        if self.size("stage") * self.size("domain") > 1:
            raise PlanError(f"{self}: the channel axis does not go with stage and domain; set them to 1, or channel=1")
        sizes = (self.size("data") * self.size("channel"), 1, 1, 1, *self.sizes[len(AXES) - len(SPATIAL) :])
        return replace(self, sizes=sizes)

    @staticmethod
    def of_one() -> Mesh:
        """A mesh of this process alone, which is in no group: for plans and rehearsals.

        >>> Mesh.of_one().world
        1
        """
        return Mesh((1,) * len(AXES), 0, 0, Transport(None, 0.0))

    def alone(self, data_only: bool = True) -> Mesh:
        """The mesh of the ranks that share this rank's images, or of this rank alone.

        On it nothing travels between data ranks: each trains on its own images.
        """
        kept = AXES.index("data") + 1 if data_only else len(AXES)
        return replace(self, sizes=(1,) * kept + self.sizes[kept:], ranks=self.peers(AXES[kept:]))

    def peers(self, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from this one only along those axes, itself included, in the same order on all."""
        return _peers(self, tuple(axes))

    @property
    def everyone(self) -> tuple[int, ...]:
        """All its ranks, in the same order on all."""
        return self.peers(AXES)

    @property
    def lines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks in line with this one, itself included, for each axis along which there are several."""
        return tuple(self.peers((axis,)) for axis, size in zip(AXES, self.sizes, strict=True) if size > 1)

    @property
    def replicas(self) -> int:
        """How many ranks compute the same loss: data × channel × spatial, over which gradients are averaged."""
        now = self.now or self
        return now.size("data") * now.size("channel") * prod(now.spatial)

    def at_time(self, part: int, parts: int) -> Mesh:
        """This mesh as one of several micro-batches sees it."""
        return self if parts == 1 else _at_time(self, part, parts)

    def __str__(self) -> str:
        used = ", ".join(f"{a}={s}" for a, s in zip(AXES, self.sizes, strict=True) if s > 1) or "one rank"
        return f"Mesh({used}; rank {self.rank} of {self.world}; {self.transport.describe()})"


@lru_cache(maxsize=4096)
def _at_time(mesh: Mesh, part: int, parts: int) -> Mesh:
    here, world = mesh.ranks or tuple(range(mesh.world)), mesh.world
    ranks = [here if time == part else range(-1 - time * world, -1 - (time + 1) * world, -1) for time in range(parts)]
    sizes = (mesh.size("data") * parts, *mesh.sizes[1:])
    return replace(mesh, sizes=sizes, ranks=tuple(rank for row in ranks for rank in row), now=mesh)


@lru_cache(maxsize=4096)
def _peers(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    names = [axis for axis in AXES if axis in axes]
    ranges = (range(mesh.size(axis)) for axis in names)
    return tuple(mesh.rank_at(**dict(zip(names, at, strict=True))) for at in product(*ranges))


def choose_grid(image: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The grid of that many ranks whose cuts through the image are smallest in total: least halo traffic.

    >>> choose_grid((4096, 4096), 4), choose_grid((4096, 512), 4), choose_grid((64, 64, 64), 8)
    ((2, 2), (4, 1), (2, 2, 2))
    """
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    grids = [g for g in product(divisors, repeat=len(image)) if prod(g) == ranks]
    fitting = [g for g in grids if all(n <= extent for n, extent in zip(g, image, strict=True))]
    if not fitting:
        raise PlanError(f"an image of {tuple(image)} has too few positions for {ranks} ranks: use fewer ranks")

    def cut_surface(grid: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        area = prod(image)
        return sum((n - 1) * area / extent for n, extent in zip(grid, image, strict=True)), tuple(-n for n in grid)

    return min(fitting, key=cut_surface)


def init(
    spatial: Sequence[int] | int | None = None,
    data: int = 1,
    stage: int = 1,
    channel: int = 1,
    domain: int = 1,
    *,
    image: Sequence[int] | None = None,
    backend: str | None = None,
    timeout: float = 600.0,
) -> Mesh:
    """The mesh over an existing process group, the one that torchrun, mpirun or srun started, or a single process.

    `mural.ranks.placement()` says which, and why.

    `spatial` gives the ranks along each spatial dim; without it, `image` (the spatial extents) lets mural choose the
    grid with the least traffic for the ranks that `data` and `channel` leave. Ranks along `channel` divide the layers
    that a plan splits, and everywhere else they divide the images, as ranks along `data` do. Afterwards torch's default
    random generator is in the same state on every rank.

    `backend`: by default NCCL if each rank has its own GPU, else gloo; "mpi" sends messages through MPI, under mpirun.

    Over gloo, GPU tensors travel through CUDA IPC between ranks that share a GPU (the current device at the first
    call), where that works and is faster, else through pinned memory; `print(mesh)` says which. The environment
    variable MURAL_GPU_PATH, set to `ipc` or `pinned` on all ranks, decides instead.

    >>> init(image=(64, 64)).spatial
    (1, 1)
    """
    grid = () if spatial is None else (spatial,) if isinstance(spatial, int) else tuple(spatial)
    if not all(type(n) is int and n >= 1 for n in (data, stage, channel, domain, *grid, *(image or ()))):
        raise PlanError(
            f"spatial={spatial}, data={data}, stage={stage}, channel={channel}, domain={domain}, image={image}: sizes "
            f"are whole numbers of at least 1"
        )
    if stage * domain > 1 and channel > 1:
        raise PlanError(
            f"stage={stage} × domain={domain} × channel={channel}: the channel axis does not go with stages and "
            f"domains; set channel to 1, or both of them"
        )
    world, rank, transport = join(backend, timeout)
    others = {"data": data, "stage": stage, "domain": domain, "channel": channel}
    grid = _fitting_grid(grid, None if spatial is not None else image, others, world)
    sizes = (data, stage, domain, channel, *grid, *(1,) * (len(SPATIAL) - len(grid)))
    mesh = Mesh(sizes, rank, len(grid), transport)
    align_generators(mesh)
    return mesh


def _fitting_grid(
    grid: tuple[int, ...], image: Sequence[int] | None, others: Mapping[str, int], world: int
) -> tuple[int, ...]:
    """The spatial grid of the ranks that the other axes leave, chosen for an image if one is given."""
    taken = prod(others.values())
    named = " × ".join(f"{axis}={size}" for axis, size in others.items() if size > 1 or axis == "data")
    if image is not None:
        if world % taken:
            raise PlanError(f"{named} does not divide {world} ranks: choose divisors of {world}")
        grid = choose_grid(image, world // taken)
    if len(grid) > len(SPATIAL):
        raise PlanError(f"spatial={grid}: give 1 to 3 sizes")
    needed = taken * prod(grid)
    if needed != world:
        raise PlanError(
            f"spatial={grid} × {named} needs {needed} ranks, but {world} run: "
            f"start {needed} ranks, or let init(image=…) choose the grid"
        )
    return grid


def align_generators(mesh: Mesh) -> None:
    """Put torch's default generators into rank 0's state, on every rank."""
    if mesh.world > 1:
        state = mesh.transport.outbound(torch.get_rng_state())
        with mesh.transport.meeting("mural.init"):
            dist.broadcast(state, src=0, group=mesh.transport.group)
        torch.set_rng_state(state.cpu())
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(torch.initial_seed())

"""All-reduce and its parts: the public calls, each a collective's rounds over the ranks of a group."""

from __future__ import annotations

from functools import lru_cache
from operator import index

import torch
import torch.distributed as dist
from torch import Tensor

from mural.collectives import algorithms
from mural.collectives.algorithms import Nodes
from mural.collectives.choose import BACKEND, Choice, adds, by_backend, choose, rounds_of
from mural.collectives.execute import run
from mural.collectives.rounds import Collective
from mural.collectives.team import Team, team_of
from mural.errors import PeerError, PlanError, UnsupportedOp

AUTO = "auto"
BITS = {torch.bool: torch.uint8, torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""The types as which values that cannot be added are sent; 8-bit floats are sent as uint8."""
PLAIN = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
"""The types of most tensors, which need no further checks."""


def all_reduce(
    tensor: Tensor,
    algorithm: str = "ring",
    group: dist.ProcessGroup | None = None,
    *,
    average: bool = False,
    deterministic: bool = False,
    nodes: Nodes | None = None,
) -> Tensor:
    """The tensor itself, which now holds the sum of all ranks' tensors (or their mean), the same bits on every rank.

    `algorithm` is one of `ALGORITHMS`; "backend", which is the backend's own all-reduce; or "auto", which measures the
    first time a size occurs, takes the fastest, the backend's own included, and reports it in `explain`. Each algorithm
    has its own order of summation, which its file states; `deterministic` makes all use the same order, so that the
    choice of algorithm does not change the bits. `nodes` lists the ranks that share a machine, for "two-level"; by
    default those of one host. Every rank of the group makes the same call, and no gradient flows through it.

    >>> all_reduce(torch.ones(3), algorithm="ring")  # a single process
    tensor([1., 1., 1.])
    """
    team = team_of(group)
    with agreeing(team):
        flat = flattened(written(tensor), average)
        name = choose(team, flat, deterministic).algorithm if algorithm == AUTO else algorithm
        if name == BACKEND and deterministic:
            raise PlanError(f"algorithm={BACKEND!r} has its own order of summation: drop deterministic=True")
        if name == BACKEND and team.size > 1 and not adds(team, flat.dtype):
            raise UnsupportedOp(f"{team.backend} does not add {flat.dtype}: choose {AUTO!r} or an algorithm by name")
        divided = team.nodes if nodes is None else divided_as(team, nodes)
        collective = None if name == BACKEND else rounds_of(name, divided, deterministic)
    options = f"{', average' if average else ''}{', deterministic' if deterministic else ''}"
    if collective is not None:
        run(collective, flat, team, options)
    else:
        by_backend(flat, team, options)
    if average:
        flat.div_(team.size)
    return restored(tensor, flat)


def explain(tensor: Tensor, group: dist.ProcessGroup | None = None, *, deterministic: bool = False) -> Choice:
    """What "auto" chooses for such a tensor, and why: print it. Collective."""
    team = team_of(group)
    with agreeing(team):
        return choose(team, flattened(tensor), deterministic)


def reduce(
    tensor: Tensor, root: int = 0, group: dist.ProcessGroup | None = None, *, chunks: int = 1, shape: str = "tree"
) -> Tensor:
    """The tensor, which now holds the sum over all ranks on the root, and partial sums on the others.

    It travels in chunks that follow each other along a tree or a chain. `root` is a rank of the group.
    """
    team = team_of(group)
    with agreeing(team):
        flat, collective = flattened(written(tensor)), rooted("reduce", team.size, root, chunks, shape)
    return restored(tensor, run(collective, flat, team, f", root={root}, chunks={chunks}"))


def broadcast(
    tensor: Tensor, root: int = 0, group: dist.ProcessGroup | None = None, *, chunks: int = 1, shape: str = "tree"
) -> Tensor:
    """The tensor, which now holds the root's values, in chunks that follow each other along a tree or a chain."""
    team = team_of(group)
    with agreeing(team):
        flat, collective = flattened(written(tensor), added=False), rooted("broadcast", team.size, root, chunks, shape)
    return restored(tensor, run(collective, flat, team, f", root={root}, chunks={chunks}"))


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tensors of all ranks, all of one shape, stacked in a new leading dim, by a ring."""
    team = team_of(group)
    with agreeing(team):
        mine = flattened(tensor, added=False)
    every = mine.new_empty((team.size, mine.numel()))
    every[team.rank] = mine
    run(gather_ring(team.size), every.view(-1), team)
    return viewed(every, tensor).view(team.size, *tensor.shape)


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part of the sum of all ranks' tensors, which are cut along dim 0 into equal parts, by a ring."""
    team = team_of(group)
    with agreeing(team):
        if not tensor.ndim or tensor.shape[0] % team.size:
            raise PlanError(
                f"a tensor of {tuple(tensor.shape)} has no {team.size} equal parts along dim 0: "
                f"pad its first extent to a multiple of {team.size}"
            )
        flat = flattened(tensor).clone()
    run(scatter_ring(team.size), flat, team)
    part = flat.numel() // team.size
    mine = flat[team.rank * part : (team.rank + 1) * part].clone()
    return viewed(mine, tensor).view(tensor.shape[0] // team.size, *tensor.shape[1:])


gather_ring, scatter_ring = lru_cache(algorithms.gather_ring), lru_cache(algorithms.scatter_ring)


def rooted(kind: str, ranks: int, root: int, chunks: int, shape: str) -> Collective:
    """The rounds of a reduction or a broadcast; the same object for the same numbers, since jobs are cached by it."""
    try:
        return rooted_rounds(kind, ranks, index(root), index(chunks), shape)
    except TypeError as error:
        raise PlanError(f"root={root!r}, chunks={chunks!r}: each is a whole number") from error


@lru_cache(maxsize=256)
def rooted_rounds(kind: str, ranks: int, root: int, chunks: int, shape: str) -> Collective:
    """The rounds themselves."""
    return (algorithms.reduction if kind == "reduce" else algorithms.broadcast)(ranks, root, chunks, shape)


class agreeing:
    """A block before a call: if it raises, the ranks that wait in the call are told."""

    def __init__(self, team: Team):
        self.team = team

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PeerError):
            self.team.refuse(error)


def divided_as(team: Team, nodes: Nodes) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, as given."""
    try:
        found = tuple(map(tuple, nodes))
    except TypeError as error:
        raise PlanError(f"nodes={nodes!r}: give a list of ranks for each node, such as [[0, 1], [2, 3]]") from error
    if sorted(rank for node in found for rank in node) != list(range(team.size)) or not all(found):
        raise PlanError(
            f"nodes={[list(node) for node in found]}: name each rank of {team.size} once, and leave no node empty"
        )
    return found


def written(tensor: Tensor) -> Tensor:
    """The tensor; raises unless its values can be overwritten: no two of them may share memory."""
    span = 0
    for stride, extent in () if tensor.is_contiguous() else sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride <= span:
            raise UnsupportedOp(
                f"the result of a collective in a tensor of {tuple(tensor.shape)}, strides {tensor.stride()}, whose "
                "values share memory: give its clone()"
            )
        span += (extent - 1) * stride
    return tensor


def flattened(tensor: Tensor, divided: bool = False, added: bool = True) -> Tensor:
    """The values as a flat tensor, in the tensor's own memory if contiguous; to be added, or just to be sent."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta device" if tensor.is_meta else str(tensor.layout)
        raise UnsupportedOp(f"a collective on a tensor of {tensor.dtype}, {kind}: give a dense tensor with values")
    if tensor.dtype in PLAIN and tensor.is_contiguous():
        return (tensor.detach() if tensor.requires_grad else tensor).view(-1)
    narrow = tensor.is_floating_point() and tensor.itemsize == 1
    if added and (narrow or tensor.dtype in BITS):
        wider = "bfloat16" if narrow else "int64"
        raise UnsupportedOp(f"a sum over ranks in {tensor.dtype}, which does not add: convert it to {wider}")
    if divided and not (tensor.is_floating_point() or tensor.is_complex()):
        raise UnsupportedOp(f"a mean over ranks in {tensor.dtype}: take the sum, or convert it to a floating type")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if flat.is_complex():
        return torch.view_as_real(flat).view(-1)
    return flat.view(-1).view(torch.uint8 if narrow else BITS.get(flat.dtype, flat.dtype))


def viewed(flat: Tensor, like: Tensor) -> Tensor:
    """Flat values in the type of a tensor."""
    return torch.view_as_complex(flat.view(-1, 2)) if like.is_complex() else flat.view(like.dtype)


def restored(tensor: Tensor, flat: Tensor) -> Tensor:
    """The tensor, with the values of the flat tensor that was made from it."""
    if flat.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        with torch.no_grad():
            tensor.copy_(viewed(flat, tensor).view(tensor.shape))
    return tensor

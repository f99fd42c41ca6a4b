"""All-reduce and its parts: the public calls, each a collective's rounds over the ranks of a group."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm import algorithms
from mural.comm.algorithms import Nodes
from mural.comm.ordered import ordered
from mural.comm.rounds import Collective
from mural.comm.run import run
from mural.comm.team import Team, team_of
from mural.errors import MuralError, PlanError, UnsupportedOp


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

    `algorithm` is one of `ALGORITHMS`. Each adds up in an order of its own, which its file states; `deterministic`
    makes all add up in one, so that the algorithm no longer changes the bits. `nodes` lists the ranks that share a
    machine, for "two-level"; by default those of one host. Every rank of the group makes the same call, and no
    gradient flows through it.

    >>> all_reduce(torch.ones(3), algorithm="ring")  # a process alone
    tensor([1., 1., 1.])
    """
    team = team_of(group)
    with agreeing(team):
        flat = flattened(tensor, average)
        collective = reduction_of(algorithm, divided_as(team, nodes), deterministic)
    run(collective, flat, team)
    if average:
        flat.div_(team.size)
    return restored(tensor, flat)


def reduce(
    tensor: Tensor, root: int = 0, group: dist.ProcessGroup | None = None, *, chunks: int = 1, shape: str = "tree"
) -> Tensor:
    """The tensor, which now holds the sum of all ranks' on the root, and what it had received on the others.

    It travels in chunks that follow each other along a tree or a chain. `root` is a rank of the group.
    """
    team = team_of(group)
    with agreeing(team):
        flat, collective = flattened(tensor), algorithms.reduction(team.size, root, chunks, shape)
    return restored(tensor, run(collective, flat, team))


def broadcast(
    tensor: Tensor, root: int = 0, group: dist.ProcessGroup | None = None, *, chunks: int = 1, shape: str = "tree"
) -> Tensor:
    """The tensor, which now holds the root's values, in chunks that follow each other along a tree or a chain."""
    team = team_of(group)
    with agreeing(team):
        flat, collective = flattened(tensor), algorithms.broadcast(team.size, root, chunks, shape)
    return restored(tensor, run(collective, flat, team))


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tensors of all ranks, of one shape, in a new leading dim, by a ring."""
    team = team_of(group)
    with agreeing(team):
        mine = flattened(tensor)
    every = mine.new_empty((team.size, mine.numel()))
    every[team.rank] = mine
    run(algorithms.gather_ring(team.size), every.view(-1), team)
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
    run(algorithms.scatter_ring(team.size), flat, team)
    return viewed(flat.view(team.size, -1)[team.rank].clone(), tensor).view(-1, *tensor.shape[1:])


@contextmanager
def agreeing(team: Team) -> Generator[None]:
    """What is raised inside, before a call, is told to the ranks that wait in it."""
    try:
        yield
    except MuralError as error:
        team.refuse(error)
        raise


@lru_cache(maxsize=256)
def reduction_of(algorithm: str, nodes: tuple[tuple[int, ...], ...], deterministic: bool) -> Collective:
    """The rounds of an all-reduce."""
    found = algorithms.all_reduction(algorithm, nodes)
    return ordered(found) if deterministic else found


def divided_as(team: Team, nodes: Nodes | None) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, as given or as found."""
    if nodes is None:
        return team.nodes
    if algorithms.ranks_of(nodes) != team.size:
        raise PlanError(f"nodes={[list(n) for n in nodes]} names {algorithms.ranks_of(nodes)} of {team.size} ranks")
    return tuple(map(tuple, nodes))


def flattened(tensor: Tensor, divided: bool = False) -> Tensor:
    """The values in a row, in the tensor's own memory where they are."""
    if tensor.layout != torch.strided or tensor.dtype == torch.bool or tensor.is_quantized:
        raise UnsupportedOp(
            f"a sum over ranks of a tensor of {tensor.dtype}, {tensor.layout}: make it a dense tensor of numbers"
        )
    if tensor.is_floating_point() and tensor.itemsize == 1:
        raise UnsupportedOp(f"a sum over ranks in {tensor.dtype}, which does not add: convert it to bfloat16")
    if divided and not (tensor.is_floating_point() or tensor.is_complex()):
        raise UnsupportedOp(f"a mean over ranks in {tensor.dtype}: take the sum, or convert it to a floating type")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return (torch.view_as_real(flat) if flat.is_complex() else flat).view(-1)


def viewed(flat: Tensor, like: Tensor) -> Tensor:
    """Values in a row in the type of a tensor."""
    return torch.view_as_complex(flat.view(-1, 2)) if like.is_complex() else flat


def restored(tensor: Tensor, flat: Tensor) -> Tensor:
    """The tensor with the values of a row that was made from it."""
    if flat.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        with torch.no_grad():
            tensor.copy_(viewed(flat, tensor).view(tensor.shape))
    return tensor

"""What each call of a process group does over MPI, as data: how it begins, and how its results get into place.

Broadcasts, reductions and barriers are MPI's own. Gathers, scatters and all-to-all are messages between all pairs: so
are MPI's non-blocking ones, and messages here have no size limit. In a communicator, messages between two ranks arrive
in the order of the calls; those of collectives have a separate tag, so they never mix with a caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm.mpi.buffers import (
    arrive,
    averaged,
    combine,
    incoming,
    operation_on,
    outgoing,
    parts,
    summand,
    typed_parts,
)
from mural.comm.mpi.installation import library, takes_cuda_pointers
from mural.comm.mpi.pending import Operation, Requests

COLLECTIVE_TAG = 2**14
"""MPI promises tags up to 2¹⁵ − 1; a caller's are below this one, and collectives have this one."""

Addressed = tuple[int, Tensor]
"""A rank of the communicator, and a tensor that goes there or comes from there."""
PerRank = Sequence[Tensor | None]
"""For each rank of the communicator the tensor that goes there or comes from there, or none."""


class Operations:
    """The operations of one communicator."""

    def __init__(self, communicator: Any):
        self.communicator, self.rank, self.size = communicator, communicator.rank, communicator.size
        self.everybody = frozenset(range(self.size))

    def messages(self, name: str, tag: int, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Operation:
        """Messages that travel together."""
        direct = takes_cuda_pointers()
        sources = {id(tensor): tensor for _, tensor in sends}
        staged = {key: outgoing(tensor, direct) for key, tensor in sources.items()}
        leaving = [(peer, staged[id(tensor)]) for peer, tensor in sends]
        awaited = [(peer, incoming(tensor, direct)) for peer, tensor in receives]

        def end() -> None:
            for (_, tensor), (_, wire) in zip(receives, awaited, strict=True):
                arrive(tensor, wire)

        peers = frozenset(peer for peer, _ in [*sends, *receives])
        return Operation(
            name,
            lambda: self._begin(tag, leaving, awaited),
            end,
            list(sources.values()),
            [tensor for _, tensor in receives],
            peers if min(peers, default=0) >= 0 else self.everybody,  # a negative number means any source
        )

    def _begin(self, tag: int, leaving: Sequence[Addressed], awaited: Sequence[Addressed]) -> Requests:
        found: Requests = []
        for peer, wire in awaited:
            found += [(self.communicator.Irecv(part, peer, tag), part[1]) for part in parts(wire)]
        for peer, wire in leaving:
            found += [(self.communicator.Isend(part, peer, tag), -1) for part in parts(wire)]
        return found

    def exchange(self, name: str, sends: PerRank, receives: PerRank) -> Operation:
        """A message to and from each rank that a tensor is given for; this rank's own is copied at once."""
        source, target = sends[self.rank], receives[self.rank]
        if source is not None and target is not None:
            arrive(target, source.detach().reshape(target.shape))
        found = self.messages(name, COLLECTIVE_TAG, self._others(sends), self._others(receives))
        return found if target is None else replace(found, results=[*found.results, target])

    def _others(self, tensors: PerRank) -> list[Addressed]:
        return [(peer, tensor) for peer, tensor in enumerate(tensors) if tensor is not None and peer != self.rank]

    def broadcast(self, tensor: Tensor, root: int) -> Operation:
        """The root's tensor on every rank."""
        # MPI's non-blocking collectives take no GPU memory, even where its messages do.
        here = self.rank == root
        wire = outgoing(tensor, direct=False) if here else incoming(tensor, direct=False)

        def begin() -> Requests:
            return [(self.communicator.Ibcast(part, root), -1) for part in parts(wire)]

        def end() -> None:
            if not here:
                arrive(tensor, wire)

        return Operation("broadcast", begin, end, [tensor], [tensor], self.everybody)

    def reduce(self, name: str, tensor: Tensor, operation: Any, root: int | None) -> Operation:
        """The tensors of all ranks combined, on the root, or on every rank where none is named."""
        function, wire = operation_on(operation, tensor.dtype), summand(tensor)
        here = root is None or self.rank == root

        def begin() -> Requests:
            whole = library().IN_PLACE
            if root is None:
                found = [self.communicator.Iallreduce(whole, part, function) for part in typed_parts(wire)]
            elif here:
                found = [self.communicator.Ireduce(whole, part, function, root) for part in typed_parts(wire)]
            else:
                found = [self.communicator.Ireduce(part, None, function, root) for part in typed_parts(wire)]
            return [(request, -1) for request in found]

        def end() -> None:
            if here:
                arrive(tensor, averaged(wire, operation, self.size))

        return Operation(name, begin, end, [tensor], [tensor], self.everybody)

    def reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], operation: Any) -> Operation:
        """One tensor of every rank's list combined on each rank, in the order of ranks."""
        operation_on(operation, output.dtype)
        leaving = [summand(source) for source in sources]
        rows = [torch.empty_like(wire) for wire in leaving]

        def begin() -> Requests:
            return self._begin(COLLECTIVE_TAG, self._others(leaving), self._others(rows))

        def end() -> None:
            rows[self.rank].copy_(leaving[self.rank])
            arrive(output, combine(rows, operation, output.dtype).view(output.shape))

        return Operation("reduce_scatter", begin, end, list(sources), [output], self.everybody)

    def barrier(self) -> Operation:
        """An operation that completes on no rank before all have begun it."""
        return Operation("barrier", lambda: [(self.communicator.Ibarrier(), -1)], nothing, [], [], self.everybody)


def joined(operations: Sequence[Operation]) -> Operation:
    """Several operations as one, which completes when all have."""

    def begin() -> Requests:
        return [request for operation in operations for request in operation.begin()]

    def end() -> None:
        for operation in operations:
            operation.end()

    return Operation(
        operations[0].name if operations else "nothing",
        begin,
        end,
        [tensor for operation in operations for tensor in operation.sources],
        [tensor for operation in operations for tensor in operation.results],
        frozenset[int]().union(*(operation.peers for operation in operations)),
    )


def nothing() -> None:
    """The end of an operation without results."""


def operation_of(options: Any) -> Any:
    """The operation that torch's options name; the sum without options."""
    return options.reduceOp if options is not None else dist.ReduceOp.SUM

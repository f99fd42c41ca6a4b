"""The process group over MPI: torch.distributed's names for the operations of a communicator.

torch calls some of them by another name since 2.12; both are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mural.comm.mpi.installation import NAME, library
from mural.comm.mpi.operations import COLLECTIVE_TAG, Operations, joined, operation_of
from mural.comm.mpi.pending import MPIWork, Operation, Queue
from mural.comm.mpi.progress import Engine
from mural.errors import UnsupportedOp

ProcessGroup: Any = dist.ProcessGroup  # its stubs name some arguments differently from older versions


class MPIGroup(ProcessGroup):
    """The ranks of one communicator."""

    aborts_waits = True
    """`abort` ends all waits of this process in the group."""

    def __init__(self, store: Any, communicator: Any, ranks: Sequence[int], engine: Engine, name: str, timeout: float):
        super().__init__(communicator.rank, communicator.size)  # torch lets Python subclasses have no store
        self.operations, self.engine, self.timeout = Operations(communicator), engine, timeout
        self.queue, self.store, self.purpose = Queue(name, ranks), store, ""

    def _post(self, operation: Operation) -> MPIWork:
        return MPIWork(self.engine, self.queue, operation, self.timeout)

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> MPIWork:
        """Send a tensor."""
        return self._post(self.operations.messages("send", checked(tag), [(destination, one(tensors))], []))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MPIWork:
        """Receive a tensor."""
        return self._post(self.operations.messages("recv", checked(tag), [], [(source, one(tensors))]))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MPIWork:
        """Receive a tensor from whoever sends one."""
        return self.recv(tensors, library().ANY_SOURCE, tag)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> MPIWork:
        """The root's tensor on every rank."""
        return self._post(self.operations.broadcast(one(tensors), opts.rootRank))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MPIWork:
        """The tensors of all ranks combined, on every rank."""
        return self.allreduce_coalesced([one(tensors)], opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> MPIWork:
        """Several at once."""
        operation = operation_of(opts)
        return self._post(joined([self.operations.reduce("all_reduce", t, operation, None) for t in tensors]))

    def reduce(self, tensors: list[Tensor], opts: Any) -> MPIWork:
        """The tensors of all ranks combined, on the root."""
        return self._post(self.operations.reduce("reduce", one(tensors), opts.reduceOp, opts.rootRank))

    def barrier(self, opts: Any = None) -> MPIWork:
        """Wait until all ranks have come here."""
        return self._post(self.operations.barrier())

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        """The tensors of all ranks, on every rank."""
        return self.allgather_coalesced([[t] for t in self._row(outputs)], [one(inputs)])

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        """Several at once; `outputs` has a list for each rank."""
        return self._post(joined([self._gathered([row[i] for row in outputs], x) for i, x in enumerate(inputs)]))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> MPIWork:
        """The tensors of all ranks in one, on every rank."""
        return self.all_gather_single_coalesced([output], [source])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        """Several at once."""
        pairs = zip(outputs, inputs, strict=True)
        return self._post(joined([self._gathered(self._rows(output), source) for output, source in pairs]))

    def _gathered(self, outputs: Sequence[Tensor], source: Tensor) -> Operation:
        return self.operations.exchange("all_gather", [source] * self.size(), outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MPIWork:
        """The tensors of all ranks, on the root."""
        receives = self._row(outputs) if self.rank() == opts.rootRank else self._nobody()
        return self._post(self.operations.exchange("gather", self._only(one(inputs), opts.rootRank), receives))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MPIWork:
        """One of the root's tensors on each rank."""
        sends = self._row(inputs) if self.rank() == opts.rootRank else self._nobody()
        return self._post(self.operations.exchange("scatter", sends, self._only(one(outputs), opts.rootRank)))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        """One tensor from each rank to each rank."""
        return self._post(self.operations.exchange("all_to_all", self._row([inputs]), self._row([outputs])))

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> MPIWork:
        """One part of a tensor from each rank to each rank."""
        sends, receives = self._parts(source, input_sizes), self._parts(output, output_sizes)
        return self._post(self.operations.exchange("all_to_all", sends, receives))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MPIWork:
        """One tensor of each rank's list combined, on each rank."""
        return self._post(self.operations.reduce_scatter(one(outputs), self._row(inputs), operation_of(opts)))

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> MPIWork:
        """One part of each rank's tensor combined, on each rank."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        """Several at once."""
        operation, pairs = operation_of(opts), zip(outputs, inputs, strict=True)
        return self._post(joined([self.operations.reduce_scatter(o, self._rows(i), operation) for o, i in pairs]))

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _row(self, tensors: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """The list with one tensor for each rank."""
        if len(tensors) != 1 or len(tensors[0]) != self.size():
            raise UnsupportedOp(
                f"lists of {[len(row) for row in tensors]} tensors were given: give one of {self.size()}"
            )
        return tensors[0]

    def _rows(self, tensor: Tensor) -> list[Tensor]:
        """A tensor cut into as many equal parts as there are ranks, in the order of its memory."""
        if not tensor.is_contiguous() or tensor.numel() % self.size():
            raise UnsupportedOp(
                f"a tensor of {tuple(tensor.shape)}, strides {tensor.stride()}, has no {self.size()} equal "
                "contiguous parts: make it contiguous, with a first extent that the number of ranks divides"
            )
        return list(tensor.view(-1).chunk(self.size())) if tensor.numel() else [tensor.view(-1)] * self.size()

    def _parts(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """A tensor cut along dim 0."""
        return list(tensor.split(list(sizes) or [tensor.shape[0] // self.size()] * self.size()))

    def _only(self, tensor: Tensor, rank: int) -> list[Tensor | None]:
        return [tensor if peer == rank else None for peer in range(self.size())]

    def _nobody(self) -> list[Tensor | None]:
        return [None] * self.size()

    def abort(self) -> None:
        """End all waits of this process in the group, each with an error; the group cannot be used afterwards."""
        self.queue.aborted = self.queue.aborted or "the group was aborted"

    def shutdown(self) -> None:
        """Take no more calls; the communicator is freed when MPI ends, since freeing it needs all its ranks."""
        self.queue.aborted = self.queue.aborted or "the process group was destroyed"

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long waits last."""
        self.timeout = timeout.total_seconds()

    # torch's C++ code calls these by name.

    def getBackendName(self) -> str:
        """The name under which the backend is registered."""
        return NAME

    def getGroupName(self) -> str:
        """The name that torch gave the group."""
        return self.queue.name

    def setGroupName(self, name: str) -> None:
        self.queue.name = name

    def getGroupDesc(self) -> str:
        """The description that torch gave the group."""
        return self.purpose

    def setGroupDesc(self, purpose: str) -> None:
        self.purpose = purpose

    name = _get_backend_name = getBackendName

    def get_group_store(self) -> Any:
        """The store through which the ranks met."""
        return self.store


def one(tensors: Sequence[Tensor]) -> Tensor:
    """The only tensor of a list."""
    if len(tensors) != 1:
        raise UnsupportedOp(f"{len(tensors)} tensors in one call: give one")
    return tensors[0]


def checked(tag: int) -> int:
    """A tag that a caller may use."""
    if not 0 <= tag < COLLECTIVE_TAG:
        raise UnsupportedOp(f"tag {tag}: over MPI tags are whole numbers from 0 to {COLLECTIVE_TAG - 1}")
    return tag

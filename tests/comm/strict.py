"""A process group that behaves like NCCL, over gloo: what relies on buffers or tags waits here until it is found out.

- A send completes only when the receiver has come to its receive; nothing is buffered. Tags are refused.
- All calls on a group run one after the other, in the order of the calls, as on a CUDA stream; those of one
  `batch_isend_irecv` run together, and are one piece of work. A lone `isend` or `irecv` waits for those before it
  between the same two ranks, in either direction.
- The sizes of a send and its receive, and the kinds and shapes of a collective on all ranks, must agree.
- A wait that is not answered in time ends with an error that lists what this rank and the others were waiting for.

`register()` makes it known as the backend "strict"; `MURAL_TEST_BACKEND=strict` makes the ranks of the tests use it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from strict_stream import Kernel, Stream, StrictError
from torch import Tensor

NAME = "strict"
SECONDS = float(os.environ.get("MURAL_STRICT_SECONDS", "60"))
TEXT_BYTES = 240
COLLECTIVES = ("broadcast", "allreduce", "allgather", "reduce", "gather", "scatter", "reduce_scatter", "alltoall")

Message = tuple[bool, int, Tensor]
"""Whether it is sent, the other rank of the group, and the tensor."""


class StrictGroup(dist.ProcessGroup):
    """Ranks that meet as NCCL's do."""

    aborts_waits = True

    def __init__(self, store: Any, rank: int, size: int, seconds: float, name: str):
        super().__init__(rank, size)
        self.store, self.seconds, self.group_title, self.purpose, self.aborted = store, seconds, name, "", False
        # Longer than any wait above it: gloo gives a group up when one of its waits ends without an answer.
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=seconds + 3600))
        self.stream = Stream(name)
        self.pairs: dict[int, Stream] = {}

    # ------------------------------------------------------------------------------------------------- messages

    def batch(self, messages: Sequence[Message]) -> Kernel:
        """Messages that travel together."""
        text = "batch of " + ", ".join(described(*message) for message in messages)
        targets = [tensor for sent, _, tensor in messages if not sent]
        return self.stream.post(Kernel(self, text, lambda: self._together(messages), targets))

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Kernel:
        """A message by itself."""
        return self._lone((True, peer, tensors[0]), tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Kernel:
        """A message by itself."""
        return self._lone((False, peer, tensors[0]), tag)

    def _lone(self, message: Message, tag: int) -> Kernel:
        if tag:
            raise StrictError(f"tag {tag}: NCCL ignores tags, so the order of messages has to do")
        peer = message[1]
        if peer not in self.pairs:
            self.pairs[peer] = Stream(f"{self.group_title} with {peer}")
        kernel = Kernel(self, described(*message), lambda: self._message(*message, tag=20), [message[2]])
        return self.pairs[peer].post(kernel)

    def _together(self, messages: Sequence[Message]) -> None:
        """Every message by itself, but those between two ranks in one direction in their order."""
        lanes: dict[tuple[bool, int], list[Tensor]] = {}
        for sent, peer, tensor in messages:
            lanes.setdefault((sent, peer), []).append(tensor)
        failed: list[Exception] = []

        def along(sent: bool, peer: int, tensors: list[Tensor]) -> None:
            try:
                for tensor in tensors:
                    self._message(sent, peer, tensor, tag=10)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=along, args=(*key, t), daemon=True) for key, t in lanes.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def _message(self, sent: bool, peer: int, tensor: Tensor, tag: int) -> None:
        """The receiver says that it is there and what it expects; the sender answers, and then sends."""
        if not tensor.is_contiguous():
            raise StrictError(f"{described(sent, peer, tensor)}: NCCL takes contiguous tensors alone")
        mine, theirs = torch.tensor([tensor.nbytes]), torch.zeros(1, dtype=torch.int64)
        steps = [(self.inner.send, mine, 1), (self.inner.recv, theirs, 2)]
        if sent:
            steps = [(self.inner.recv, theirs, 1), (self.inner.send, mine, 2)]
        for call, number, offset in steps:
            call([number], peer, tag + offset).wait()
        if int(mine) != int(theirs):
            raise StrictError(f"{described(sent, peer, tensor)}, but rank {peer} has {int(theirs)} bytes for it")
        if tensor.numel():
            (self.inner.send if sent else self.inner.recv)([tensor.detach()], peer, tag).wait()

    # ---------------------------------------------------------------------------------------------- collectives

    def collective(self, name: str, args: tuple[Any, ...]) -> Kernel:
        """A call of all ranks, after a look at what the others call."""
        tensors = list(flat(args))
        shapes = [(tuple(t.shape), str(t.dtype)) for t in tensors[-1:]]
        root = [a.rootRank for a in args if hasattr(a, "rootRank")]
        text = " ".join([name, *(f"{shape} {dtype}" for shape, dtype in shapes), *(f"root {r}" for r in root)])

        def action() -> None:
            self._agree(text if name not in ("gather", "scatter") else f"{name} root {root}")
            average = name == "allreduce" and args[1].reduceOp == dist.ReduceOp.AVG
            if average:
                args[1].reduceOp = dist.ReduceOp.SUM
            getattr(self.inner, name)(*args).wait()
            if average:
                args[0][0].div_(self.size())

        return self.stream.post(Kernel(self, text, action, tensors))

    def _agree(self, text: str) -> None:
        code = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        raw = text.encode()[:TEXT_BYTES]
        code[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        rows = [torch.empty_like(code) for _ in range(self.size())]
        self.inner.allgather([rows], [code]).wait()
        said = [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]
        if len(set(said)) > 1:
            raise StrictError("the ranks call different things: " + "; ".join(f"{r}: {t}" for r, t in enumerate(said)))

    def barrier(self, opts: Any = None) -> Kernel:
        """Wait for all ranks."""
        return self.collective("allreduce", ([torch.zeros(1)], dist.AllreduceOptions()))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Kernel:
        """Gather into one tensor."""
        rows = [row.view(source.shape) for row in output.view(-1).chunk(self.size())]
        return self.collective("allgather", ([rows], [source]))

    _allgather_base = all_gather_single

    # -------------------------------------------------------------------------------------------------- the rest

    def report(self) -> str:
        """What every rank that also gave up was waiting for."""
        streams = [self.stream, *self.pairs.values()]
        mine = [kernel.text for stream in streams for kernel in list(stream.pending)]
        self.store.set(f"pending/{self.rank()}", "; then ".join(mine) or "nothing")
        lines: list[str] = []
        for rank in range(self.size()):
            try:
                self.store.wait([f"pending/{rank}"], timedelta(seconds=2))
                lines.append(f"rank {rank} waits for: {self.store.get(f'pending/{rank}').decode()}")
            except RuntimeError:
                lines.append(f"rank {rank} waits for nothing here")
        return "\n".join(lines)

    def abort(self) -> None:
        """End all waits."""
        self.aborted = True

    def shutdown(self) -> None:
        """End the threads that are free to end."""
        for stream in (self.stream, *self.pairs.values()):
            stream.waiting.put(None)

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self.group_title

    def setGroupName(self, name: str) -> None:
        self.group_title = name

    def getGroupDesc(self) -> str:
        return self.purpose

    def setGroupDesc(self, purpose: str) -> None:
        self.purpose = purpose


def _delegate(name: str) -> Callable[..., Kernel]:
    def call(self: StrictGroup, *args: Any) -> Kernel:
        return self.collective(name, args)

    return call


for _name in COLLECTIVES:
    setattr(StrictGroup, _name, _delegate(_name))


def flat(value: Any) -> list[Tensor]:
    """The tensors in a call's arguments."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in flat(v)] if isinstance(value, (list, tuple)) else []


def described(sent: bool, peer: int, tensor: Tensor) -> str:
    """A message in words."""
    return f"{'send to' if sent else 'receive from'} {peer} of {tensor.nbytes} bytes"


def create(options: Any, _: Any) -> StrictGroup:
    """The group that torch asks for; its waits are short, whatever torch says."""
    seconds = min(options.timeout.total_seconds(), SECONDS)
    return StrictGroup(options.store, options.group_rank, options.group_size, seconds, options.group_id)


def register() -> None:
    """Make the backend known, and let `batch_isend_irecv` tell it what belongs together."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    before = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, StrictGroup):
            return before(operations)
        if tags := {op.tag for op in operations} - {0}:
            raise StrictError(f"tags {tags}: NCCL ignores tags, so the order of messages has to do")
        return [group.batch([(op.op is dist.isend, op.group_peer, op.tensor) for op in operations])]

    dist.batch_isend_irecv = batch_isend_irecv

"""A master and its workers: gradients are added up on one rank, which updates and sends the weights, layer by layer.

    master   ▒ backward ▒│ reduce │ update │ send 0 │ send 1 │ send 2 │
                         │        │        │▒ forward of chunk 0 ▒▒▒▒▒▒▒▒▒│
    worker   ▒ backward ▒│ reduce │  idle  │ chunk 0│ chunk 1│ chunk 2│
                                                    │▒ forward of chunk 0 ▒│▒ 1 ▒│▒ 2 ▒│

The weights travel in chunks in the order in which the forward pass needs them, so it begins before all have
arrived: a call waits for the weights that it reads, whoever's they are. The optimizer's state exists on the master
alone.

Document 004 reduces the error and back-propagates on the master. That is not the gradient of the batch, as each
rank's activations belong to its own images: here every rank back-propagates, and gradients are reduced.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, groupby
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mural.collectives import algorithms
from mural.collectives.execute import run
from mural.collectives.rounds import Collective
from mural.collectives.team import Team, team_of
from mural.comm.groups import group_of
from mural.errors import PlanError
from mural.gradients.buckets import mark_reduced
from mural.ranks import Mesh


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes of one step, of all ranks together."""

    messages: int
    bytes: int


class Master:
    """Steps of an optimizer that runs on one rank.

    ```python
    master = Master(model, torch.optim.SGD(model.parameters(), 0.1), mesh, chunks=8)
    F.cross_entropy(model(x), y).backward()
    master.step()  # instead of the optimizer's
    ```

    The model's parameters are replicated over all ranks of the mesh, and the loss is that of the whole batch, as it is
    on sharded tensors. All ranks begin with the master's weights. Between a step and the next forward, `wait()` before
    you read weights yourself. Making it and every step are collective.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, chunks: int = 8, root: int = 0):
        if chunks < 1:
            raise PlanError(f"chunks = {chunks}: the model travels in at least one")
        if mesh.size("stage") * mesh.size("channel") * mesh.size("domain") > 1:
            raise PlanError(f"{mesh}: a master updates a model that all ranks hold whole, over data and spatial axes")
        self.model, self.optimizer, self.mesh, self.root = model, optimizer, mesh, root
        self.team = team_for(mesh)
        self.chunks = divided(in_order(model), chunks)
        self.up = [algorithms.reduction(self.team.size, root) for _ in self.chunks]
        self.down = [algorithms.broadcast(self.team.size, root) for _ in self.chunks]
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="mural weights")
        self.arrived = [threading.Event() for _ in self.chunks]
        self.sending: Future[None] | None = None
        self.steps = 0
        self.place = {id(p): number for number, chunk in enumerate(self.chunks) for p in chunk}
        self.open: list[Arrivals] = []
        self.handles = list(self._hooks())
        self._begin()

    @property
    def is_master(self) -> bool:
        """Whether this rank updates."""
        return self.team.rank == self.root

    def step(self) -> None:
        """Add up the gradients of all ranks on the master, update there, and begin to send the weights."""
        self.wait()
        if self.team.size == 1:
            self.optimizer.step()
            return
        with self.mesh.transport.meeting("reduce", self.team.group):
            for chunk, collective in zip(reversed(self.chunks), reversed(self.up), strict=True):
                self._reduce(chunk, collective)
        if self.is_master:
            self.optimizer.step()
        self.steps += 1
        self._begin()

    def _begin(self) -> None:
        """Begin to send the weights."""
        if self.team.size == 1:
            return
        for event in self.arrived:
            event.clear()
        flats = [torch.cat([p.detach().reshape(-1) for p in chunk]) for chunk in self.chunks]
        self.sending = self.thread.submit(self._send, flats)

    @torch.no_grad()
    def _reduce(self, chunk: Sequence[nn.Parameter], collective: Collective) -> None:
        """The mean of the ranks' gradients on the master; None on the others, so that an optimizer leaves them.

        A flag for each parameter travels along: one that no rank's backward reached keeps None, as on one device.
        """
        flags = torch.tensor([p.grad is not None for p in chunk]).to(chunk[0])
        flat = torch.cat([*(zeros(p) if p.grad is None else p.grad.reshape(-1) for p in chunk), flags])
        run(collective, flat.div_(self.team.size), self.team)
        *parts, reached = flat.split([*(p.numel() for p in chunk), len(chunk)])
        for p, part, count in zip(chunk, parts, reached.tolist() if self.is_master else flags.tolist(), strict=True):
            p.grad = part.view_as(p) if self.is_master and count > 0 else None
            if p.grad is not None:
                mark_reduced(p.grad, ("data",))

    @torch.no_grad()
    def _send(self, flats: Sequence[Tensor]) -> None:
        """In a thread of its own: chunk by chunk, from the master to all."""
        try:
            parts = zip(self.chunks, flats, self.down, self.arrived, strict=True)
            for number, (chunk, flat, collective, event) in enumerate(parts):
                for trace in self.mesh.transport.traces:
                    trace.posts["weights", self.steps, number] = perf_counter()
                run(collective, flat, self.team)
                if not self.is_master:
                    for p, part in zip(chunk, flat.split([p.numel() for p in chunk]), strict=True):
                        p.copy_(part.view_as(p))
                event.set()
        finally:
            for event in self.arrived:
                event.set()

    def wait(self) -> None:
        """Wait until all weights have arrived, or raise what kept them."""
        if self.sending is not None:
            sending, self.sending = self.sending, None
            with self.mesh.transport.meeting("weights", self.team.group):
                sending.result()

    def traffic(self) -> Traffic:
        """What a step sends, counted from the rounds that run."""
        messages = size = 0
        for chunk, up, down in zip(self.chunks, self.up, self.down, strict=True):
            values = sum(p.numel() for p in chunk)
            for collective, count in ((up, values + len(chunk)), (down, values)):
                sends = sum(map(len, collective.rounds))
                messages += sends
                size += sends * count * chunk[0].element_size()
        return Traffic(messages, size)

    def close(self) -> None:
        """Wait for all weights and take the hooks off the model."""
        self.wait()
        for handle in self.handles:
            handle.remove()
        self.thread.shutdown()

    def _hooks(self) -> Iterator[Any]:
        """Hooks that let the calls of a forward wait for their weights, and who reads them all for all."""
        yield self.model.register_forward_pre_hook(self._enter)
        yield self.model.register_forward_hook(self._leave, always_call=True)
        yield self.model.register_state_dict_pre_hook(lambda *_: self.wait())

    def _enter(self, *_: Any) -> None:
        mode = Arrivals(self)
        mode.__enter__()
        self.open.append(mode)

    def _leave(self, *_: Any) -> None:
        self.open.pop().__exit__(None, None, None)
        self.wait()  # what the forward did not read; raises what went wrong

    def await_weights(self, parameters: Iterable[object]) -> None:
        """Wait for those of some objects that are weights of the model under way."""
        wanted = sorted({self.place[id(p)] for p in parameters if id(p) in self.place})
        late = [number for number in wanted if not self.arrived[number].is_set()]
        if late:
            root = (self.mesh.ranks or range(self.mesh.world))[self.root]
            with self.mesh.transport.blocked("weights", [(root, ("weights", self.steps, n)) for n in late]):
                for number in late:
                    self.arrived[number].wait()
        if self.sending is not None and self.sending.done():
            self.wait()  # raises what went wrong


class Arrivals(TorchFunctionMode):
    """Sees every call of a forward before it runs, and waits for the weights that it reads.

    A module's own hook would not do: another may read its weights, as a tied one does.
    """

    def __init__(self, master: Master):
        super().__init__()
        self.master = master

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.master.sending is not None:
            self.master.await_weights(pytree.tree_leaves((args, kwargs)))
        return func(*args, **kwargs)


def team_for(mesh: Mesh) -> Team:
    """The ranks of a mesh, with messages that no others meet. Collective."""
    if mesh.world == 1:
        return Team(None)
    return team_of(group_of(mesh.transport, mesh.ranks or tuple(range(mesh.world)), "master"))


def in_order(model: nn.Module) -> list[nn.Parameter]:
    """All parameters in the order in which modules were put together, which is mostly that of the forward pass."""
    return list({id(p): p for p in model.parameters()}.values())


def divided(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """At most that many chunks of whole parameters of one type, in order, about equal in bytes.

    >>> [len(chunk) for chunk in divided([nn.Parameter(torch.zeros(n)) for n in (4, 1, 1, 2)], 2)]
    [1, 3]
    """
    total = max(sum(p.numel() * p.element_size() for p in parameters), 1)
    starts = accumulate((p.numel() * p.element_size() for p in parameters), initial=0)
    placed = [((start * count // total, p.dtype, p.device), p) for start, p in zip(starts, parameters, strict=False)]
    return [[p for _, p in group] for _, group in groupby(placed, key=lambda item: item[0])]


def zeros(p: Tensor) -> Tensor:
    """The gradient of a parameter that backward did not reach."""
    return torch.zeros(p.numel(), dtype=p.dtype, device=p.device)

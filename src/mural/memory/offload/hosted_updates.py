"""Updates of parameters whose optimizer keeps more numbers than the device has room for.

The numbers rest on the host, in the optimizer's own state, so that checkpoints find them. An update goes through the
parameters in chunks: while one is updated on the device, the numbers of the next one come, those of the last one leave.

    device       ├ update 1 ┼ update 2 ┼ update 3 ┤
    inward   ├ 1 ┼ 2 ┼───────┤ 3 ├
    outward                 ├ 1 ┤      ├ 2 ┤      ├ 3 ┤

Each parameter is updated by itself, so the result is that of one update of all. Only torch's own optimizers are known
to do so (`BY_PARAMETER`): others may look at all gradients together, or count their steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from mural.comm.copy_streams import Moment
from mural.memory.host_memory import HostBuffer, HostMemory
from mural.memory.offload.moments import has_storage


def own_step(kind: type[Optimizer]) -> Any:
    """The step of a kind of optimizer, without what torch puts around it to call hooks."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


BY_PARAMETER = frozenset(
    own_step(getattr(torch.optim, name))
    for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
)  # fmt: skip
"""The steps that update each parameter by itself, and change nothing but it and what is kept for it."""

NUMBERS = {"SGD": 1, "RMSprop": 1, "Adagrad": 1}
"""How many numbers an optimizer keeps for each of a parameter's; others two."""


def needed(optimizer: Optimizer) -> tuple[int, int]:
    """The bytes of an optimizer's parameters and gradients, and of what it keeps."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fixed = sum(p.nbytes + (0 if p.grad is None else size_of(p.grad)) for p in parameters)
    return fixed, NUMBERS.get(type(optimizer).__name__, 2) * sum(p.nbytes for p in parameters)


def size_of(tensor: Tensor) -> int:
    """The bytes of a tensor; of a sparse one, those of its indices and values.

    >>> size_of(torch.ones(2, 4)), size_of(torch.eye(4).to_sparse())
    (32, 80)
    """
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


class HostedUpdates:
    """The updates of one optimizer; blocks of fewer than `least` bytes stay on the device."""

    def __init__(self, optimizer: Optimizer, host: HostMemory, least: int):
        self.held, self.host, self.least = weakref.ref(optimizer), host, least
        self.buffers: MutableMapping[Tensor, HostBuffer] = WeakTensorKeyDictionary()
        """The memory of numbers that rest, as long as somebody has them: the optimizer may be given others."""
        self.resting: dict[tuple[int, str], Tensor] = {}
        """Where the numbers rest that are on the device now."""
        self.params: list[list[nn.Parameter]] = []
        self.numbers = 0
        """For how many parameters the optimizer kept numbers when they were last put together."""
        self.chunked = False
        """Whether the last update went in chunks."""
        hooks = optimizer._optimizer_step_post_hooks
        others = dict(hooks)
        hooks.clear()
        optimizer.register_step_post_hook(lambda *_: self.restore())
        hooks.update(others)  # they see all parameters again

    @property
    def by_parameter(self) -> bool:
        """Whether updating the parameters in chunks is known to be the same as updating all."""
        return own_step(type(self.optimizer)) in BY_PARAMETER

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, which ends when nobody else uses it."""
        found = self.held()
        if found is None:
            raise RuntimeError("the optimizer is gone, and so are its updates")
        return found

    def asked_within(self, room: Callable[[], int | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a step that updates within so many bytes, if there are not enough for all.

        It does so as part of its closure, which follows all hooks.
        """
        given = args[1] if len(args) > 1 else kwargs.get("closure")

        def closure() -> Any:
            loss = None if given is None else given()
            most = room()
            if most is not None:
                self.run(most)
            return loss

        return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})

    def run(self, room: int) -> None:
        """Update all parameters within so many bytes on the device, and leave nothing to do for the optimizer."""
        self.params, self.chunked = [group["params"] for group in self.optimizer.param_groups], True
        try:
            self._run(list(self._chunks(room)))
        except BaseException:
            self.restore()
            raise

    def _run(self, chunks: Sequence[list[nn.Parameter]]) -> None:
        """Update one chunk after the other."""
        step = own_step(type(self.optimizer))
        coming = [self._fetch(chunk) for chunk in chunks[:1]]
        leaving: list[list[tuple[Tensor, Moment]]] = []
        for place, chunk in enumerate(chunks):
            coming += [self._fetch(following) for following in chunks[place + 1 : place + 2]]
            self._arrive(coming.pop(0))
            self._offer(chunk)
            step(self.optimizer)
            leaving.append(self._send(chunk))
            if len(leaving) > 1:
                self._wait(leaving.pop(0))
        for sent in leaving:
            self._wait(sent)
            for _, moment in sent:
                if self.host.lanes is not None:
                    self.host.lanes.finish(moment)
        self._offer([])

    def restore(self) -> None:
        """Give the optimizer its parameters back."""
        if self.params:
            for group, params in zip(self.optimizer.param_groups, self.params, strict=True):
                group["params"] = params
        self.params = []

    def _offer(self, chunk: Sequence[nn.Parameter]) -> None:
        """Let the optimizer see some parameters alone."""
        mine = {id(p) for p in chunk}
        for group, params in zip(self.optimizer.param_groups, self.params, strict=True):
            group["params"] = [p for p in params if id(p) in mine]

    def _chunks(self, room: int) -> Iterator[list[nn.Parameter]]:
        """Parameters that are updated together: their numbers, those of the next ones, and what is computed, fit."""
        most = room // 8
        chunk, size = list[nn.Parameter](), 0
        for p in (p for params in self.params for p in params if p.grad is not None):
            own = max(p.nbytes, sum(t.nbytes for _, t in self._numbers(p)))
            if chunk and size + own > most:
                yield chunk
                chunk, size = [], 0
            chunk.append(p)
            size += own
        if chunk:
            yield chunk

    def _numbers(self, p: nn.Parameter) -> list[tuple[str, Tensor]]:
        """The large tensors that the optimizer keeps for a parameter; sparse ones stay."""
        state = self.optimizer.state.get(p, {})
        found = [(k, t) for k, t in state.items() if isinstance(t, Tensor) and has_storage(t)]
        return [(k, t) for k, t in found if t.nbytes >= self.least and t.ndim]

    def _fetch(self, chunk: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, str, Tensor, Moment]]:
        """Have the numbers of parameters copied to the device."""
        lanes, found = self.host.lanes, list[tuple[nn.Parameter, str, Tensor, Moment]]()
        for p in chunk:
            for name, resting in self._numbers(p):
                if resting.device == p.device and self.host.device.type != "cpu":
                    continue
                here = torch.empty_like(resting, device=p.device)
                if lanes is None:
                    here.copy_(resting)
                moment = None if lanes is None else lanes.copy(here, resting, False, [lanes.now()])
                found.append((p, name, here, moment))
        return found

    def _arrive(self, coming: Sequence[tuple[nn.Parameter, str, Tensor, Moment]]) -> None:
        """Put the numbers that came into the optimizer's state; what they were copied from is kept for them."""
        for p, name, here, moment in coming:
            if self.host.lanes is not None:
                self.host.lanes.wait([moment])
            self.resting[id(p), name] = self.optimizer.state[p][name]
            self.optimizer.state[p][name] = here

    def _send(self, chunk: Sequence[nn.Parameter]) -> list[tuple[Tensor, Moment]]:
        """Have the numbers of parameters copied to the host, where they rest in the optimizer's state."""
        lanes, sent = self.host.lanes, list[tuple[Tensor, Moment]]()
        for p in chunk:
            for name, here in self._numbers(p):
                resting = self.resting.pop((id(p), name), None)
                if resting is None or resting.shape != here.shape:
                    resting = self._place(here)
                if lanes is None:
                    resting.copy_(here)
                sent.append((here, None if lanes is None else lanes.copy(resting, here, True, [lanes.now()])))
                self.optimizer.state[p][name] = resting
        return sent

    def _place(self, like: Tensor) -> Tensor:
        """Host memory for a tensor, with its strides."""
        buffer = self.host.take(like.untyped_storage().nbytes())
        memory = buffer.memory[: like.untyped_storage().nbytes()].view(like.dtype)
        resting = memory.as_strided(like.shape, like.stride(), like.storage_offset())
        self.buffers[resting] = buffer
        return resting

    def _wait(self, sent: Sequence[tuple[Tensor, Moment]]) -> None:
        """Make the device wait until numbers have left, so that their memory can be given to others."""
        if self.host.lanes is not None:
            self.host.lanes.wait(moment for _, moment in sent)

"""What a forward does besides its calls: hooks on gradients, backwards of its own, generators that it sets.

A recording has the calls that make and write tensors. Whoever makes these calls again, as a streamed step does, leaves
out all else, so it is noted here, for the step to refuse what it would lose.

    y.register_hook(clip)                        noted: the gradient of y would pass unclipped
    checkpoint(block, y, use_reentrant=True)     noted: torch's Function runs the block without gradients
    torch.manual_seed(3); torch.rand(8)          noted: each call that draws begins with a state that is known before
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from mural.graph.origins import memory_of

CALLS = {
    "register_hook": "registers a hook on a gradient",
    "register_post_accumulate_grad_hook": "registers a hook on a gradient",
    "retain_grad": "keeps the gradient of an intermediate tensor (retain_grad)",
    "backward": "goes back through its own calls (backward)",
    "autograd.grad": "goes back through its own calls (torch.autograd.grad)",
    "grad_fn.__get__": "asks for the grad_fn of a tensor",
    "grad.__get__": "asks for the .grad of a tensor",
    "_grad.__get__": "asks for the .grad of a tensor",
    "grad.__set__": "sets the .grad of a tensor",
    "_grad.__set__": "sets the .grad of a tensor",
    "data.__set__": "gives a tensor other memory (.data = …)",
    "set_": "gives a tensor other memory (set_)",
}
"""The calls on tensors whose effect no recording has."""
QUESTIONS = ("grad_fn.__get__", "grad.__get__", "_grad.__get__")
FLAGS = ("requires_grad_", "requires_grad.__set__")
INITS = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
TOP_HOOKS: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
"""The hooks on what autograd saves that were set last; None without any."""
CHECKPOINT = "torch.utils.checkpoint"
"""The module of torch's checkpoint, which computes a block again by hooks on what autograd saves."""


class SideEffects:
    """Notes what a forward does besides its calls; `where` says which line of the user's runs.

    `own` are the hooks by which the recorder itself sees what autograd saves.
    """

    def __init__(self, twins: Iterable[Tensor], own: Callable[[Tensor], Any], where: Callable[[], str]):
        self.parameters = {id(twin): twin for twin in twins if isinstance(twin, nn.Parameter)}
        self.own, self.where = own, where
        self.found: list[str] = []
        """What was found, as texts for an error."""
        self.reseeded: int | None = None
        """The time of the first call after one that set torch's generator."""
        self.saved: dict[int, list[tuple[Tensor, int]]] = {}
        """What autograd keeps, with how often it had been written to, by its memory."""
        self.saving: list[Tensor] = []
        """What it keeps for the call that runs."""
        self.state: Tensor | None = None
        """The state in which the last call left the generator."""

    def note(self, what: str) -> None:
        """Note something that the forward does now."""
        self.found.append(f"{what} {self.where()}")

    def begin_call(self, name: str, args: Sequence[Any], time: int) -> None:
        """A call begins, the one with this time; `args` are all its arguments."""
        what = CALLS.get(name.partition(".source")[0])
        if what is not None and not (name in QUESTIONS and self._answered(name, args[0])):
            self.note(what)
        elif name in FLAGS and id(args[0]) in self.parameters and self._turned(args):
            self.note("turns the gradients of a parameter on or off")
        if self.state is not None and not torch.equal(torch.get_rng_state(), self.state) and self.reseeded is None:
            self.reseeded = time

    def end_call(self) -> None:
        """A call has ended: the generator moves on, so that a state from before is another one."""
        for tensor in self.saving:
            self.saved.setdefault(memory_of(tensor), []).append((tensor, tensor._version))
        self.saving.clear()
        torch.empty((), device="cpu").uniform_()
        self.state = torch.get_rng_state()

    @staticmethod
    def _answered(name: str, tensor: Tensor) -> bool:
        """Whether the answer is known to be None."""
        return tensor.grad_fn is None if name == QUESTIONS[0] else not (tensor.is_leaf and tensor.requires_grad)

    @staticmethod
    def _turned(args: Sequence[Any]) -> bool:
        wanted = bool(args[1]) if len(args) > 1 else True
        return bool(args[0].requires_grad) != wanted

    def function(self, function: Any, args: Iterable[Any]) -> None:
        """One of torch's own Functions is applied: autograd would go back through it."""
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            name = function.__name__
            what = {
                "CheckpointFunction": "calls a checkpoint with use_reentrant=True",
                "BackwardHookFunction": "calls a module with backward hooks",
            }.get(name, f"applies {name}")
            self.note(what)

    @property
    def again(self) -> bool:
        """Whether torch's checkpoint will compute again what runs now; other hooks on what autograd saves are noted."""
        hooks = TOP_HOOKS(False)
        if hooks is None or hooks[0] == self.own or not torch.is_grad_enabled():
            return False
        if getattr(hooks[0], "__module__", "") == CHECKPOINT:
            return True
        self.note("has hooks on what autograd saves (saved_tensors_hooks)")
        return False

    def write(self, tensor: Tensor) -> None:
        """A call has written to a tensor: if autograd did not see it, backward goes on with what is there now."""
        if any(kept._version == version for kept, version in self.saved.get(memory_of(tensor), ())):
            self.note("writes, past autograd (.data), to what an earlier call keeps for its backward,")

    def forget(self) -> None:
        """A backward is over that was none of the forward's."""
        for twin in self.parameters.values():
            twin.grad = None

    def end(self) -> None:
        """The forward is over."""
        if any(twin.grad is not None for twin in self.parameters.values()):
            self.note("goes back to parameters (torch.autograd.backward), last seen")


@contextmanager
def refusing_inits(refused: Callable[[str], Exception]) -> Generator[None]:
    """Inside the block, initializations that leave tensors without memory as they are raise what `refused` makes."""
    before = {name: getattr(init, name) for name in INITS if hasattr(init, name)}

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise refused(f"torch.nn.init.{name.removeprefix('_no_grad_')}")

        return refuse

    for name in before:
        setattr(init, name, refusing(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(init, name, function)

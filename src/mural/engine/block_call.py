"""A call of a block of which autograd keeps what it takes alone, to compute it again in backward."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mural.engine.block_inputs import FirstWrites, TakenTensors, again_of, by_memory, carrier, copies_of, form_of
from mural.errors import PlanError
from mural.graph.kept_values import content, same
from mural.shard import ShardedTensor
from mural.shard.tensor import local_of


class BlockCall:
    """A call of a block: forward with what the caller gave, and again in backward with what was in it before.

    Forward may append to the caller's lists, and write to its tensors, as an activation in place does. So tensors are
    kept when it is over: they, or copies that were made before. If they may be `leaving` for the host, it runs on this
    rank's pieces alone. Other objects are the same ones again, so nobody may change them. `name` is for errors.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaving: bool,
        name: str = "a block",
    ):
        self.plain, self.leaving, self.name = plain, leaving, name
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.leaves, self.tree = pytree.tree_flatten((args, kwargs))
        found = {id(leaf): leaf for leaf in self.leaves if isinstance(leaf, Tensor)}
        numbers = {key: number for number, key in enumerate(found)}
        self.tensors = [*found.values()]
        self.places = {place: numbers[id(leaf)] for place, leaf in enumerate(self.leaves) if id(leaf) in numbers}
        """The numbers of the tensors, by their places among the leaves."""
        self.written = False
        """Whether forward wrote to what it took, as far as anybody saw."""
        self.copied = False
        """Whether copies are kept, made before it did."""
        self.ways: list[Callable[[Tensor], Tensor]] = []
        self.kept: Tensor | None = None
        """A tensor whose node keeps what the tensors are made of again: pieces, as autograd keeps them."""
        self.others: list[tuple[Any, Any]] = []
        """The other objects, and what was in them."""
        self.memory: set[int | None] = set()
        """The memory of the tensors, as it was before forward."""
        self.error: BaseException | None = None
        """What forward raised."""

    def forgetful(self, copied: bool = False, writes: FirstWrites | None = None, **options: Any) -> Any:
        """What the block makes, of which autograd keeps nothing.

        Tensors are `copied` if forward is known to write to them, or before the first of the `writes` that are seen.
        """
        tensors = self.tensors
        for x in tensors:
            if self.leaving and isinstance(x, ShardedTensor) and x.margin is not None:
                x.drop_margin()
        self.others = [(leaf, content(leaf)) for leaf in self.leaves if not isinstance(leaf, Tensor)]
        before = TakenTensors(tensors)
        if copied:
            before.copy()
        elif writes is not None:
            before.watch(writes)
        self.memory = {*before.memory}
        places = [torch.empty(0, device=x.device) for x in before.pieces]  # whose random numbers checkpoint keeps
        result = checkpoint(self._run, *places, use_reentrant=False, **options)
        if self.error is not None:
            try:
                self._check_hooked(self.error)
                raise self.error
            finally:
                self.error = None  # which holds this frame
        self.written, self.copied = before.written(), before.copies is not None
        self._check_others()
        if self.written:
            self._check_types(before.pieces)
        self._keep(tensors if before.copies is None else before.copies)
        return result

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        """Have autograd keep tensors: it finds out if they are written to, and lets them leave."""
        self.ways = [again_of(x) for x in tensors]
        pieces = (x.clone() if x.is_inference() else x for x in map(carrier, tensors))  # which autograd does not keep
        self.kept = Kept.apply(torch.empty(0, requires_grad=True), *pieces)
        self.tensors.clear()
        for place in self.places:
            self.leaves[place] = None

    def _run(self, *_: Tensor) -> Any:
        """What the block makes, for the first time or again."""
        if self.given is not None:
            return self._first()
        self._check_others()
        leaves = [*self.leaves]
        tensors = [way(piece) for way, piece in zip(self.ways, self._pieces(), strict=True)]
        if self.written:
            tensors = copies_of(tensors, [*map(local_of, tensors)])  # backward may come again
        for place, number in self.places.items():
            leaves[place] = tensors[number]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return self.plain(*args, **kwargs)

    def _first(self) -> Any:
        """What forward makes; what it raises is raised later: torch 2.11's checkpoint would not end its hooks."""
        assert self.given is not None
        (args, kwargs), self.given = self.given, None
        try:
            return self.plain(*args, **kwargs)
        except BaseException as error:
            self.error = error
            return None

    def _check_hooked(self, error: BaseException) -> None:
        """Raise if torch has refused to do without the hooks by which a block is computed again."""
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        hooked = "saved tensor hooks" in str(error) or frame.f_code.co_name == "disable_saved_tensors_hooks"
        if hooked and isinstance(error, RuntimeError):
            raise PlanError(
                f"{self.name}, a block in recompute, calls torch.func or turns hooks on saved tensors off ({error}), "
                f"but by such hooks it is computed again: leave it out of recompute"
            ) from error

    def _pieces(self) -> Sequence[Tensor]:
        """The pieces that autograd kept."""
        if self.kept is None and self.tensors:
            raise PlanError(
                f"{self.name}, a block in recompute, goes back through its own calls in its forward (backward, "
                f"torch.autograd.grad), when what it is computed again from is not kept yet: leave it out of recompute"
            )
        node: Any = self.kept.grad_fn if self.kept is not None else None  # of the tensor: without it, a node lets go
        try:
            return node.saved_tensors[1:]
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise PlanError(
                f"{self.name}, a block in recompute, takes a tensor that was written to after the block's forward and "
                f"before its backward, which would compute the block again from other numbers: give it a clone, or "
                f"leave it out of recompute"
            ) from error

    def _check_types(self, pieces: Sequence[Tensor]) -> None:
        """Raise if pieces are in one memory in several types: forward wrote to them, and copies of it are apart."""
        kinds = [{form_of(pieces[number]) for number in numbers} for numbers in by_memory(pieces)]
        several = next((found for found in kinds if len(found) > 1), None)
        if several:
            named = sorted(f"{dtype}" if kind is Tensor else f"{kind.__name__} of {dtype}" for kind, dtype in several)
            raise PlanError(
                f"{self.name}, a block in recompute, writes to what it takes, some of which is one memory in several "
                f"types ({', '.join(named)}): give it one of them, or leave it out of recompute"
            )

    def _check_others(self) -> None:
        """Raise if an object that the block takes was changed, by its forward or since."""
        for value, before in self.others:
            if not same(content(value), before):
                raise PlanError(
                    f"{self.name}, a block in recompute, takes a {type(value).__name__} that changed during its "
                    f"forward or before its backward, which would compute the block again with what is in it now: "
                    f"give it tensors, or lists and dicts of them, or leave it out of recompute"
                )


class Kept(torch.autograd.Function):
    """Has autograd keep tensors, in the node that makes the result."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """An empty tensor."""
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Nobody goes back through it."""
        raise AssertionError


class Repeated(AbstractContextManager[None]):
    """A block of code that is begun several times, each time by what `begin` gives."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Any]]):
        self.begin = begin

    def __enter__(self) -> None:
        self.open = self.begin()
        self.open.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self.open.__exit__(*raised)

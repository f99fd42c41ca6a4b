"""What a call draws: keys of random layers, or numbers by torch's own means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mural.shard.ops.random.lattice import new_key

MOST_KEYS = 16
"""How many keys a call draws at most."""


def is_random(operation: Any) -> bool:
    """Whether one of torch's operations draws from a generator, or may do so."""
    return torch.Tag.nondeterministic_seeded in operation.tags


class CallDraws(TorchDispatchMode):
    """Watches a call: `operations` are those that drew, keys among them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.before = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if is_random(func):
            self.operations.append(func)
        return func(*args, **(kwargs or {}))

    @property
    def keys(self) -> int | None:
        """How many keys a call on tensors without memory drew; None if it drew something else, too.

        Only keys come from the generator then: what torch draws for such tensors leaves it as it is.
        """
        keys = keys_between(self.before, torch.get_rng_state())
        return keys if keys == len(self.operations) else None


def keys_between(before: Tensor, after: Tensor) -> int | None:
    """How many keys lie between two states of torch's generator; None if the second is not reached by keys."""
    for count in range(MOST_KEYS):
        if torch.equal(before, after):
            torch.set_rng_state(after)
            return count
        torch.set_rng_state(before)
        new_key()
        before = torch.get_rng_state()
    torch.set_rng_state(after)
    return None

"""What a proof found: which parts of a plan gave the result of one device on a small case, and which it cannot say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

if TYPE_CHECKING:
    from mural.engine.parallel import Parallel
    from mural.ranks import Mesh


@dataclass(frozen=True)
class Proof:
    """A plan was compared with one device on small cases before its first step.

    >>> print(Proof(proved=("stream: 3 × 1 tiles",), unproved=("CUDA graphs",), difference=2e-16, seconds=1.25))
    proved in 1.2 s: stream: 3 × 1 tiles (largest difference 2e-16)
    not proved: CUDA graphs
    """

    proved: tuple[str, ...] = ()
    """The small cases whose results rounding explains."""
    unproved: tuple[str, ...] = ()
    """What the cases do not show, each with the reason."""
    difference: float = 0.0
    """The largest difference from one device of all values, relative to the largest entry of their kind."""
    seconds: float = 0.0
    remembered: str = ""
    """The file that an earlier run left this in; empty if it was found now."""

    def __str__(self) -> str:
        lines = list[str]()
        if self.proved:
            how = f"remembered from {self.remembered}" if self.remembered else f"in {self.seconds:.1f} s"
            lines.append(f"proved {how}: {'; '.join(self.proved)} (largest difference {self.difference:.0e})")
        return "\n".join([*lines, *(f"not proved: {text}" for text in self.unproved)]) or "nothing to prove"

    def values(self) -> dict[str, Any]:
        """The proof as a JSON file has it."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Proof:
        """The proof that a JSON file has."""
        proved, unproved = tuple(values["proved"]), tuple(values["unproved"])
        return cls(proved, unproved, values["difference"], values["seconds"], values["remembered"])


class Prover(Protocol):
    """What proves a plan before its first step."""

    def look(self, model: nn.Module, mesh: Mesh) -> None:
        """Note the model while it is still whole. Collective."""
        ...

    def prove(self, pm: Parallel, image: Any, target: Any) -> Proof:
        """The proof for batches such as this one; raises where the plan differs from one device. Collective."""
        ...

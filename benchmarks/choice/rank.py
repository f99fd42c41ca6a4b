"""The process of some parts: takes steps by its plan, and says what they took; or predicts. Started by run.py."""

from __future__ import annotations

import gc
from typing import Any

import torch
from harness.worker import serve
from one_gpu.rank import Alone, Trained, gradient_norm, host_peaks, plain_values
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from choice.nets import Data, built
from choice.parts import Part
from choice.predictions import predicted

DROPPED = 3
"""Steps that do not count: offload notes one and times one, and tiles become graphs."""


class Planned:
    """Steps of a model by a plan."""

    def __init__(self, model: nn.Module, plan: mural.Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.pm = mural.parallelize(model, plan, loss=F.cross_entropy)
        self.given: tuple[Any, Any] = (None, None)

    def take(self, data: Any) -> None:
        """Put images and targets on the device, or note where tiles of them are read."""
        self.given = data.whole(self.device) if self.plan.stream is None else data.sources()

    def step(self) -> Tensor:
        """The loss, after forward and backward."""
        return self.pm.step(*self.given)

    def report(self) -> dict[str, Any]:
        """What was planned for the last step, and what moved."""
        if self.pm.offloading is not None:
            return self.pm.offloading.report()
        told: Any = getattr(self.pm.way, "report", None)
        return {} if told is None else dict(told())


class Chooser(Alone):
    """A process that has the device to itself."""

    def predict(self, name: str, toy: bool) -> dict[str, Any]:
        """The prediction of a part's setting."""
        return plain_values(predicted(Part.parse(name), toy))

    def run_part(self, name: str, plan: dict[str, Any], toy: bool, repeats: int, budget: float) -> dict[str, Any]:
        """Times, peaks, losses and moved bytes of some steps of a part."""
        part, chosen = Part.parse(name), mural.Plan(**plan)
        cuda = self.device.type == "cuda"
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()  # of the part before
        retries = alloc_retries(cuda)
        if toy:
            torch.set_num_threads(1)  # threads that wait for each other on busy cores take most of a toy's time
        model = built(part, toy).to(self.device)
        way = Planned(model, chosen, self.device)
        way.take(Data.of(part, self.device))
        trained = Trained(way, model)
        self.begin_counting()
        first = [float(trained.step()) for _ in range(DROPPED)]
        first_peak = self.meter.peaks()["allocated"]
        base = self.begin_counting()
        seconds, losses, settled = self.timed(trained, repeats, budget)
        late = seconds[max(0, len(seconds) - settled) :] or seconds
        found: dict[str, Any] = {**self.meter.peaks(), **host_peaks(base), "plan": str(chosen), "seconds": late}
        return plain_values(found | {
            "first_peak": first_peak, "settled": settled > 0, "losses": [*first, *losses],
            "gradient": gradient_norm(model),
            "retries": alloc_retries(cuda) - retries, "report": way.report(),
        })  # fmt: skip


def alloc_retries(cuda: bool) -> int:
    """How often torch's allocator had to give memory back to the device to find some."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if cuda else 0


if __name__ == "__main__":
    serve(Chooser())

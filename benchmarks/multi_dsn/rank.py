"""One rank of a team: the paper's network with some targets, placed as a way says, and steps on images of some side."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from harness.counting import counting
from harness.worker import Rank, serve
from torch import Tensor

import mural
from multi_dsn.ways import BATCH
from mural.domain import SeparationNetwork, classification_network
from mural.domain.placement import by_part
from mural.engine import Parallel
from mural.shard.unread import Unread

CHANNELS, CLASSES = 3, 10


class Separator(Rank):
    """A rank that holds its part of a separation network."""

    def steps(self, targets: int, placement: str, side: int, width: int, repeats: int) -> dict[str, Any]:
        """Peaks of memory of the second step, the seconds of more, and what this rank sent and was to send."""
        self.pm = None
        self.meter.reset()
        torch.manual_seed(0)
        names = ["source", *(f"target{i}" for i in range(1, targets + 1))]
        with self.device:
            network = classification_network(names, CLASSES, (CHANNELS, side, side), width=width)
        plan = {
            "one process": mural.Plan(), "by domain": mural.Plan(domain=len(names)), "by part": by_part(network),
            "by part, computed again": by_part(network, mural.Plan(recompute=("reconstruction",))),
        }  # fmt: skip
        pm = self.pm = mural.parallelize(network, plan[placement], network.loss())
        images, labels = self.batch(pm, network, side)
        pm.step(images, labels)
        self.meter.reset()
        with pm.world_mesh.transport.record() as record, counting() as sent:
            pm.zero_grad()
            loss = float(pm.step(images, labels))
        found = {**self.meter.peaks(), "loss": loss, "bytes": record.bytes, "messages": record.messages}
        found["added"] = sent.by_rings
        found["seconds"] = [self.timed(pm, images, labels) for _ in range(repeats)]
        found["computing"] = self.own_time(pm, images, labels)
        return found | {"predicted": predicted_bytes(pm, images), "parameters": sum(p.numel() for p in pm.parameters())}

    def batch(self, pm: Parallel, network: SeparationNetwork, side: int) -> tuple[tuple[Any, ...], Tensor]:
        """Images of each domain, on the device where this rank takes them, and labels of the source."""
        images: list[Any] = []
        for number in range(len(network.domains)):
            needs, shape = pm.needs(True, number), (BATCH, CHANNELS, side, side)

            def read(number: int = number, mesh: Any = needs.mesh, shape: Any = shape) -> Any:
                draws = torch.Generator(self.device).manual_seed(number)
                return mural.shard(torch.rand(shape, generator=draws, device=self.device), mesh)

            images.append(read() if needs.image else Unread(shape, torch.float32, read))
        return tuple(images), torch.arange(BATCH) % CLASSES

    def timed(self, pm: Parallel, images: Any, labels: Tensor) -> float:
        """Seconds of a step by the clock, all ranks beginning together."""
        pm.zero_grad()
        if self.ranks > 1:
            dist.barrier()
        begin = time.perf_counter()
        pm.step(images, labels)
        self.meter.wait()
        return time.perf_counter() - begin

    def own_time(self, pm: Parallel, images: Any, labels: Tensor) -> float:
        """Seconds for which this rank's kernels keep the device busy in a step: over its time, the utilisation."""
        return self.meter.computing(lambda: pm.step(images, labels))


def predicted_bytes(pm: Parallel, images: Any) -> dict[str, float]:
    """What all ranks are to send in a step: tensors between seats and back, and sums of weights that several hold."""
    if pm.stage_ranks.alone:
        return {"codes": 0, "weights": 0}
    route, seats = pm.way.stage_programs.route(images, pm.device), pm.plan.seats
    crossing = [
        (edge, stage) for edge in route.edges for stage in edge.consumers if seats[stage] != seats[edge.producer]
    ]
    shared = {name: len(ranks) for name, ranks in pm.division.holders.items()}
    sizes = {name: p.numel() * p.element_size() for name, p in pm.plain.named_parameters()}
    return {
        "codes": sum(edge.bytes * (1 + edge.gradient) for edge, _ in crossing),
        # A ring sends each value 2 (n - 1) times in all.
        "weights": sum(2 * (shared[name] - 1) * size for name, size in sizes.items()),
    }


if __name__ == "__main__":
    serve(Separator())

"""The time of one inference, from an image on every rank to all scores on every rank, for each way to divide."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
from harness.counting import counting, over_ranks
from harness.vision import narrowed
from problems import plan_of, seeded
from training import together

import mural

WARMUP = 3


@dataclass(frozen=True)
class Inference:
    """Inferences of AlexNet; width 64 at 224² is the published one."""

    way: str
    ranks: int
    batch: int
    width: int
    side: int
    rounds: int
    device: str = "cpu"

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"{self.way} on {self.ranks}, batch {self.batch}, width {self.width}, {self.side}²"

    def measure(self) -> dict[str, Any]:
        """Seconds of each inference on the slowest rank, what a rank sends, and what it holds."""
        model = seeded(lambda: narrowed("alexnet", 64 // self.width)).to(self.device)
        plain = model.eval()(images := self.images()).detach()
        pm = mural.parallelize(model, plan_of(self.way, self.ranks), image=(3, self.side, self.side)).eval()

        def infer() -> torch.Tensor:
            scores = pm(images)
            return scores.full() if isinstance(scores, mural.ShardedTensor) else scores

        for _ in range(WARMUP):
            scores = infer()
        with counting() as sent:
            infer()
        gap = float((scores - plain).abs().max() / plain.abs().max())
        seconds = [self.timed(infer) for _ in range(self.rounds)]
        return {
            "seconds": seconds,
            "sent": over_ranks((sent.messages, sent.bytes)),
            "held": over_ranks(sum(p.numel() * p.element_size() for p in pm.parameters())),
            "difference": max(over_ranks(gap)),
        }

    def images(self) -> torch.Tensor:
        """The same on every rank."""
        draw = torch.Generator().manual_seed(1)
        return torch.rand(self.batch, 3, self.side, self.side, generator=draw).to(self.device)

    def timed(self, infer: Any) -> float:
        """Seconds of one on the slowest rank; all begin together."""
        gc.collect()
        together(self.device)
        begin = time.perf_counter()
        infer()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return max(over_ranks(time.perf_counter() - begin))


def jobs(*, quick: bool, device: str, rounds: int) -> list[Inference]:
    """One rank, two and four, at batch 1 and 8; the document's figure is data 2 × channel 2."""
    width, side = (2, 64) if quick else (64, 224)
    four = () if quick else ("data", "model", "hybrid", "hybrid, in two groups")
    ways = [("one rank", 1), *((way, 2) for way in ("data", "model", "hybrid")), *((way, 4) for way in four)]
    return [Inference(way, ranks, batch, width, side, rounds, device) for way, ranks in ways for batch in (1, 8)]

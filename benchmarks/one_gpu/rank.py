"""The process of one part: builds the model, takes steps, and says what they took. Started by run.py."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from harness.meters import RESET, resident
from harness.worker import Rank, serve
from torch import Tensor, nn

from one_gpu.nets import Data, built, made_data
from one_gpu.parts import STREAMED, Part
from one_gpu.sources import forget_files, opened_files, write_files
from one_gpu.ways import WAYS, Way

MINUTE = 60.0


class Alone(Rank):
    """A process that has the device to itself; it serves one part."""

    def prepare(self, name: str, folder: str) -> float:
        """Seconds of writing the files that a part reads."""
        begin = time.perf_counter()
        write_files(Path(folder), Part.parse(name).size)
        return time.perf_counter() - begin

    def steps(self, name: str, toy: bool, folder: str, repeats: int, budget: float) -> dict[str, Any]:
        """Times, peaks, loss and gradients of some steps of a part, after one to warm up.

        The `first` streamed step is told apart from others: it notes what tiles do, and takes pinned memory. So are
        `unsettled` ones, in which some tiles were noted or became graphs, if there are others.
        """
        part = Part.parse(name)
        torch.backends.cudnn.benchmark = "tuned" in part.extras
        model = built(part, self.device, toy)
        way = WAYS[part.way](part, model, self.device)
        trained = Trained(way, model)
        self.meter.reset()
        # What is streamed need not be of the whole size to warm up the device: its tiles are of a few shapes.
        some = min(part.size, 3 * part.chosen_tile) if part.way in STREAMED else part.size
        way.take(made_data(part, some, self.device))
        trained.step()
        self.meter.wait()
        data = self.data_of(part, Path(folder))
        way.take(data)
        base = self.begin_counting()
        seconds, losses, settled = self.timed(trained, repeats, budget)
        first = seconds.pop(0) if part.way in STREAMED and len(seconds) > 1 else None
        late = seconds[max(0, len(seconds) - settled) :]
        found: dict[str, Any] = {**self.meter.peaks(), **host_peaks(base)}
        return found | {
            "first": first,
            "seconds": late or seconds,
            "unsettled": seconds[: len(seconds) - len(late)] if late else [],
            "settled": bool(late),
            "losses": losses,
            "gradient": gradient_norm(model),
            "tile": part.chosen_tile if part.way not in ("plain", "checkpoint", "save_on_cpu") else None,
            "bytes_read": data.bytes_read // len(losses) if part.way in STREAMED else None,
            "parameters": sum(p.numel() for p in model.parameters()),
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if self.device.type == "cuda" else 0,
            "report": plain_values(way.report()),
        }

    def data_of(self, part: Part, folder: Path) -> Data:
        """The image of a part and its target: made as they are read, or from the files, which are read anew."""
        if part.way != "file":
            return made_data(part, part.size, self.device)
        forget_files(folder, part.size)
        return Data(*opened_files(folder, part.size))

    def begin_counting(self) -> int:
        """The host's memory now; all peaks start again. What the allocator keeps stays: it is part of the reserved."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self.meter.reset()
        gc.collect()
        if RESET.exists():
            RESET.write_text("5")
        return resident("VmRSS")

    def timed(self, trained: Trained, repeats: int, budget: float) -> tuple[list[float], list[float], int]:
        """Seconds and losses of steps, as many as the budget allows, which the first does not count in; and how many of
        the last ones were settled.

        At least one; two, unless one takes a minute. What is not settled goes on for as long as the budget allows.
        """
        seconds: list[float] = []
        losses: list[float] = []
        settled = 0
        while (
            not seconds
            or (len(seconds) == 1 and seconds[0] < MINUTE)
            or (min(settled, len(seconds)) < repeats and sum(seconds[1:]) + seconds[-1] < budget)
        ):
            begin = time.perf_counter()
            loss = trained.step()
            self.meter.wait()
            seconds.append(time.perf_counter() - begin)
            losses.append(float(loss))
            settled = 0 if trained.way.report().get("unsettled") else settled + 1
        return seconds, losses, settled


class Trained:
    """Training steps of a way. The rate is 0, so that all steps are the same, and their losses have to be."""

    def __init__(self, way: Way, model: nn.Module) -> None:
        self.way = way
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(self) -> Tensor:
        """The loss, after forward, backward and the update of the weights."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.way.step()
        self.optimizer.step()
        return loss


def host_peaks(base: int) -> dict[str, Any]:
    """The host's peak of resident memory, what of it the steps added, and of pinned memory, where torch tells."""
    pinned = getattr(torch.cuda, "host_memory_stats", dict)() if torch.cuda.is_available() else {}
    peak = resident("VmHWM")
    return {"host": peak, "host_grown": peak - base, "pinned": pinned.get("allocated_bytes.peak")}


def gradient_norm(model: nn.Module) -> float:
    """The norm of all gradients together."""
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def plain_values(report: dict[str, Any]) -> dict[str, Any]:
    """A report as JSON knows it."""
    return json.loads(json.dumps(report, default=str))


if __name__ == "__main__":
    serve(Alone())

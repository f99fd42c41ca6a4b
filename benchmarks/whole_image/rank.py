"""The process of one part: predicts, and says what it took. Started by run.py."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from harness.meters import RESET, resident
from harness.worker import Rank, serve
from torch import nn

import mural
from mural.checkpoint import open_snapshot, restore
from mural.plans import Plan
from mural.prediction.trained_run import trained_run
from mural.train.factory import make_model
from whole_image.parts import Part, Sizes
from whole_image.textures import forget, path_of, source, write_file
from whole_image.trained import trained
from whole_image.windows import sliding_labels

BAND = 1024
"""Rows of label maps that are compared at a time."""


class Predictor(Rank):
    """A process that has the device to itself; it serves one part."""

    def prepare(self, folder: str, sizes: dict[str, Any], sides: list[int]) -> dict[str, float]:
        """Seconds of training the run and of writing the images, which stay for the other parts."""
        begin = time.perf_counter()
        trained(Path(folder), decoded(sizes), self.device.type)
        between = time.perf_counter()
        for side in sides:
            write_file(Path(folder), side)
        return {"training": between - begin, "writing": time.perf_counter() - between}

    def measure(self, name: str, folder: str, sizes: dict[str, Any], tile: int) -> dict[str, Any]:
        """What a part gives."""
        self.part, self.folder, self.sizes, self.tile = Part.parse(name), Path(folder), decoded(sizes), tile
        torch.backends.cudnn.allow_tf32 = self.part.precision == "tf32"
        # Ranks that are started here learn it from the environment.
        os.environ |= {} if self.part.precision == "tf32" else {"NVIDIA_TF32_OVERRIDE": "0"}
        self.place = "cpu" if self.part.kind == "cpu" else self.device.type
        ways = {"predict": self.predict, "sliding": self.sliding, "same": self.same, "cpu": self.same}
        return ways[self.part.kind]()

    def predict(self) -> dict[str, Any]:
        """Time, peaks and the share of right labels of a streamed prediction."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self.meter.reset()
        base = self.host_now()
        found = self.labels("predict", "stream")
        found |= self.meter.peaks() | {"host": resident("VmHWM"), "host_grown": resident("VmHWM") - base}
        labels = Path(found.pop("file"))
        return found | {"right": self.right(labels)}

    def sliding(self) -> dict[str, Any]:
        """The same of a sliding window, and how far its labels are from those of the whole image."""
        whole = self.labels("whole", "stream")
        model, image = self.model(), path_of(self.folder, self.part.side)
        forget(image)
        self.meter.reset()
        self.meter.wait()
        begin = time.perf_counter()
        pixels = mural.open(image).read().to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.part.precision == "bf16"):
            labels = sliding_labels(model, pixels, self.sizes.window, float(self.part.option)).cpu().numpy()
        file = self.folder / f"sliding-{self.part.option}.tif"
        tifffile.imwrite(file, labels, tile=(512, 512), bigtiff=True, metadata=None)
        seconds = time.perf_counter() - begin
        first = Path(whole["file"])
        found = {"seconds": seconds, **self.meter.peaks(), "window": self.sizes.window, "tile": self.tile}
        found |= {"whole_seconds": whole["seconds"], "differ": differing(first, file)}
        return found | {"right": self.right(file), "whole_right": self.right(first)}

    def same(self) -> dict[str, Any]:
        """How many labels of a plan are not those of one rank that holds all of the image."""
        one, other = self.labels("one", "one"), self.labels("other", self.part.option)
        same = differing(Path(one["file"]), Path(other["file"]))
        return {"seconds": other["seconds"], "whole_seconds": one["seconds"], "differ": same, "tile": self.tile}

    def labels(self, out: str, plan: str) -> dict[str, Any]:
        """The label map of the part's image under a plan, written anew."""
        image = path_of(self.folder, self.part.side)
        forget(image)
        precision = "bfloat16" if self.part.precision == "bf16" else "float32"
        chosen = Plan(
            spatial=(2, 2) if "ranks4" in plan else (1, 1),
            stream=(self.tile, self.tile) if "stream" in plan else None,
            precision=precision,
        )
        run = trained(self.folder, self.sizes, self.device.type)
        out_folder = self.folder / "labels" / f"{self.part.kind}-{out}"
        made = mural.predict(run, image, out_folder, plan=chosen, device=self.place, overwrite=True)
        self.meter.wait()
        return {"seconds": made.seconds, "file": str(made.files[0]), "tile": self.tile}

    def model(self) -> nn.Module:
        """The trained model, as plain torch has it."""
        run = trained_run(trained(self.folder, self.sizes, self.device.type))
        model = make_model(run.config.model, run.config.seed)
        restore(open_snapshot(run.checkpoints, None, run.step), model)
        return model.to(self.device).eval()

    def right(self, labels: Path) -> float:
        """The share of labels that are the pixel's class."""
        truth = source(self.part.side, mask=True)
        return 1 - differing(labels, truth) / self.part.side**2

    def host_now(self) -> int:
        """The memory of the process, from which on peaks count."""
        gc.collect()
        if RESET.exists():
            RESET.write_text("5")
        return resident("VmRSS")


def decoded(sizes: dict[str, Any]) -> Sizes:
    """The sizes from JSON."""
    return Sizes(**{key: tuple(value) if isinstance(value, list) else value for key, value in sizes.items()})


def differing(first: Path, second: Any) -> int:
    """How many labels of two maps differ; bands of them are in memory."""
    a, b = (mural.open(map_) if isinstance(map_, Path) else map_ for map_ in (first, second))
    _, rows, columns = a.shape
    found = 0
    for top in range(0, rows, BAND):
        box = ((0, 1), (top, min(top + BAND, rows)), (0, columns))
        found += int(np.count_nonzero(a.read(box).numpy() != b.read(box).numpy()))
    return found


if __name__ == "__main__":
    serve(Predictor())

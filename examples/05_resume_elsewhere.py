"""Resume under another plan: a run starts on two data ranks, stops, and ends with every image cut in two.

    python examples/05_resume_elsewhere.py

No launcher is needed: a trainer starts the local ranks that its plan asks for. A third run that was never stopped
prints the same losses.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scenes import IMAGES, scene

import mural

STEPS = 6


def config(folder: Path, name: str, steps: int, **plan: Any) -> dict[str, Any]:
    return {
        "folder": str(folder / name),
        "model": {"factory": "mural.models:UNet", "arguments": {"width": 8, "depth": 3}},
        "data": {"images": str(folder / "images/*.npy"), "masks": str(folder / "masks/*.npy"), "batch": 2},
        "augment": {"flips": True},
        "optimizer": {"name": "SGD", "lr": 0.1, "arguments": {"momentum": 0.9}},
        "train": {"epochs": 3, "steps": steps},
        "log": {"every": 1, "tensorboard": "off"},
        "plan": plan,
    }


def write_images(folder: Path) -> None:
    for kind in ("images", "masks"):
        (folder / kind).mkdir()
    for number in range(IMAGES):
        pixels, mask = scene(number)
        np.save(folder / "images" / f"{number}.npy", pixels.numpy())
        np.save(folder / "masks" / f"{number}.npy", mask.numpy().astype(np.uint8)[None])


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder)
        mural.Trainer(config(folder, "run", 3, data=2)).fit()
        mural.Trainer(config(folder, "run", STEPS, spatial=[2, 1])).fit()
        mural.Trainer(config(folder, "never stopped", STEPS)).fit()
        stopped, never = losses(folder / "run"), losses(folder / "never stopped")
    for step, (mine, other) in enumerate(zip(stopped, never, strict=True), 1):
        print(f"step {step}  resumed {mine:.4f}  never stopped {other:.4f}")


if __name__ == "__main__":
    main()

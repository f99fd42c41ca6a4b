"""Run folders written by hand, for tests of what a report makes of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mural.train.config import Config
from mural.train.start_record import StartRecord

BEGIN = 1_800_000_000.0


def train_line(step: int, loss: float = 0.5, seconds: float = 2.0, **more: Any) -> dict[str, Any]:
    """A reading; step n ends 2 n seconds after the beginning."""
    pace = {"step_seconds": seconds, "images_per_second": 1 / seconds, "megapixels_per_second": 0.1}
    shares = {"communication": 0.25, "data_wait": 0.5, "peak_memory": [3 * 2**30]}
    return {"kind": "train", "step": step, "time": BEGIN + 2 * step, "epoch": 0, "loss": loss, **pace, **shares, **more}


def scored_line(step: int, **scores: Any) -> dict[str, Any]:
    """A validation."""
    return {"kind": "validation", "step": step, "time": BEGIN + 2 * step, "loss": 0.5, **scores}


def started(step: int = 0, after: float = 0.0, **more: Any) -> StartRecord:
    """A start of one rank, so many seconds after the beginning."""
    facts: dict[str, Any] = {
        "step": step,
        "time": BEGIN + after,
        "total": 100,
        "plan": "one rank",
        "weights": 1234,
        "images": {"": {"samples": 8, "held_out": 2}},
        "hosts": ("here",),
        "devices": ("CPU, 2 cores",),
        "memory": (2**30,),
        "command": "mural train run.toml",
        "directory": "/nowhere",
        "versions": {"torch": "2"},
        "before": {},
    }
    return StartRecord(**{**facts, **more})


def write_run(
    folder: Path,
    lines: list[dict[str, Any]],
    status: dict[str, Any] | None = None,
    starts: list[StartRecord] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """A run's folder with these lines, this status and these starts."""
    folder.mkdir(parents=True)
    Config.of(config or {}).save(folder / "config.toml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status is not None:
        (folder / "status.json").write_text(json.dumps(status))
    if starts:
        (folder / "starts.jsonl").write_text("".join(json.dumps(asdict(start)) + "\n" for start in starts))
    return folder

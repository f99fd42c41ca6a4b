"""What was measured before: one JSON file for each device and setting, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from mural.cost.trial import Timing


def cache_folder() -> Path:
    """`$MURAL_CACHE`, else `mural` in the user's cache folder."""
    given = os.environ.get("MURAL_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mural"


def setting(device: torch.device | str) -> str:
    """All that a measured time depends on besides the call itself: device, torch, threads, and TF32."""
    device = torch.device(device)
    if device.type == "cuda":
        tf32 = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, tf32 {tf32}"
    return f"{processor()}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def processor() -> str:
    """The name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


class Cache:
    """Timings by signature, for one setting; what is new is written at once."""

    def __init__(self, where: str, folder: Path | None = None) -> None:
        words = re.sub(r"\W+", "-", where).strip("-").lower()
        digest = hashlib.sha256(where.encode()).hexdigest()[:8]
        self.where = where
        self.path = (folder or cache_folder()) / "cost" / f"{words[:60]}-{digest}.json"
        self._found: dict[str, Timing] = self._read()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, signature: str) -> Timing | None:
        """What was measured for a signature."""
        return self._found.get(digest_of(signature))

    def add(self, found: Mapping[str, Timing]) -> None:
        """Keep what was measured; what other processes wrote meanwhile stays."""
        self._found = self._read() | self._found | {digest_of(name): timing for name, timing in found.items()}
        data = {"where": self.where, "found": {key: timing.encode() for key, timing in self._found.items()}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A reader sees the old file or the new one, never a part of it.
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".part", delete=False) as file:
            json.dump(data, file, indent=0)
        Path(file.name).replace(self.path)

    def _read(self) -> dict[str, Timing]:
        try:
            data = json.loads(self.path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        if data.get("where") != self.where:
            return {}
        return {key: Timing(**timing) for key, timing in data["found"].items()}


def digest_of(signature: str) -> str:
    """A short name for a signature."""
    return hashlib.sha256(signature.encode()).hexdigest()[:24]

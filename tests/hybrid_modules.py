"""The modules of `benchmarks/hybrid` that tests look at; other benchmarks have modules of the same names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "benchmarks" / "hybrid"


def load(name: str) -> Any:
    """A module by its file's name; it imports nothing of its folder. Ranks find its classes as `hybrid_NAME`."""
    spec = importlib.util.spec_from_file_location(f"hybrid_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


master_worker, payload, traffic = load("master_worker"), load("payload"), load("traffic")

"""torchvision and timm beside any build of torch: `from torchvision_shim import timm, torchvision`.

torchvision's wheel carries compiled operators that need the CUDA libraries. Beside a CPU build of torch they
do not load, torchvision goes on without them, and then fails while describing two of them: «operator
torchvision::nms does not exist». Declaring the two is enough for every model without box operations. They get
no kernel, so a call still raises. timm imports torchvision, so it comes from here too: each is imported when
asked for.
"""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import torch

# The operators that torchvision describes at import whether or not its compiled library loaded.
_DESCRIBED_AT_IMPORT = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def _compiled_operators_load() -> bool:
    """Whether torchvision's compiled library loads here, so that its operators must not be declared again."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchvision is not installed: run `make setup`")
    for library in sorted(Path(spec.origin).parent.glob("_C*.so")):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
    return hasattr(torch.ops.torchvision, "nms")


if not _compiled_operators_load():
    for operator, schema in _DESCRIBED_AT_IMPORT.items():
        torch.library.define(operator, schema)


def __getattr__(name: str) -> ModuleType:
    if name not in ("timm", "torchvision"):
        raise AttributeError(f"torchvision_shim has no {name}: it offers timm and torchvision")
    return importlib.import_module(name)

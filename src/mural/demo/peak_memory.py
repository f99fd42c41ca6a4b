"""Memory of this process: its largest resident size so far, and the bytes that autograd keeps for backward."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

STATUS = Path("/proc/self/status")


def peak_resident() -> int:
    """The largest resident size of this process so far, in bytes.

    >>> peak_resident() > 2**20
    True
    """
    if STATUS.is_file():
        # Not getrusage: on Linux, a process that another one spawned starts there with the size of that other.
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class SavedBytes(saved_tensors_hooks):
    """The bytes that autograd saves inside a `with` block, each storage once, the model's parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._keep, lambda saved: saved)
        self._seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.total = 0

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor.detach()  # the tensor itself would hold its own graph, and never be freed

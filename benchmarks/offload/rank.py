"""The process of one part: measures it and says what it took. Started by run.py."""

from __future__ import annotations

import gc
from typing import Any

from harness.worker import serve
from one_gpu.rank import Alone, plain_values

from offload import activations, copies, hosted, stages, training
from offload.parts import Part
from offload.settings import Settings


class Offloads(Alone):
    """A process that has the device to itself."""

    def run_part(self, name: str, **settings: Any) -> dict[str, Any]:
        """The record of a part."""
        part, chosen = Part.parse(name), Settings(**settings)
        gc.collect()
        match part.kind:
            case "table":
                found = training.measured(part, self.device, chosen)
            case "shape":
                found = copies.measured(part, self.device, chosen)
            case "stages":
                found = stages.measured(part, self.device, chosen)
            case "hosted":
                found = hosted.measured(part, self, chosen)
            case _:
                found = activations.measured(part, self, chosen)
        return plain_values(found)


if __name__ == "__main__":
    serve(Offloads())

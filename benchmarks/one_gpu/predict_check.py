"""Predicted peaks and seconds of streamed steps next to measured ones, on one GPU: about ten seconds a line.

python benchmarks/one_gpu/predict_check.py                 all parts
python benchmarks/one_gpu/predict_check.py NAME …          parts by name, as unet/stream16/bf16/frozen/8192@2048
python benchmarks/one_gpu/predict_check.py --toy           small ones on a CPU, to try it out: nothing is measured

The peak is `torch.cuda.max_memory_allocated` of a second step; a cap in a name is that of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from harness.case import GIB

from one_gpu.nets import built, made_data
from one_gpu.parts import Part
from one_gpu.ways import Streamed

PARTS = (
    "unet/stream16/bf16/frozen/4096@2048",
    "unet/stream16/bf16/frozen/8192@2048",
    "unet/stream16/bf16/frozen/8192@1024",
    "unet/stream16/fp32/frozen/4096@1024",
    "unet/stream16/fp32/frozen/8192@1024",
    "unet/stream/bf16/training/4096@2048",
    "unet/stream/bf16/training/8192@1024",
    "unet/stream16/bf16/training/8192@1024",
    "unet/stream/fp32/training/4096@1024",
    "resnet50/stream16/bf16/frozen/8192@2048",
    "resnet50/stream16/bf16/training/4096@1024",
    "unet3d/stream16/bf16/frozen/256@128",
    "unet3d/stream16/bf16/instance/256@128",
)
TOYS = ("unet/stream/fp32/frozen/96@32", "unet/stream/bf16/training/96@32", "unet3d/stream/fp32/instance/32@16")


def check(part: Part, device: torch.device, toy: bool) -> dict[str, Any]:
    """What was predicted and measured for a part."""
    cuda = device.type == "cuda"
    if cuda:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (part.cap or 1024) * GIB / total), device)
    model = built(part, device, toy)
    way = Streamed(part, model, device)
    way.take(made_data(part, part.size, device))
    found: dict[str, Any] = {"name": part.name}
    try:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
            way.step()
        found["peak"] = torch.cuda.max_memory_allocated(device) if cuda else None
        found["reserved"] = torch.cuda.max_memory_reserved(device) if cuda else None
    except torch.OutOfMemoryError as error:
        found["failure"] = str(error).split("\n")[0][:120]
    return found | way.report()


def line(found: dict[str, Any]) -> str:
    """One result as text."""
    predicted, peak = found["predicted_peak"], found.get("peak")
    words = [f"{found['name']:44} predicted {predicted / GIB:7.3f} GiB"]
    if peak:
        words.append(
            f"measured {peak / GIB:7.3f}, ratio {predicted / peak:.3f}, reserved {found['reserved'] / GIB:.3f}"
        )
    if found["predicted_seconds"] is not None and found["seconds"] is not None:
        words.append(f"{found['predicted_seconds']:.3f} s, measured {found['seconds']:.3f}")
    words.append(f"passes {found['passes']} sweeps {found['sweeps']} tiles {found['tiles']} halo {found['halo']:.3f}")
    words += [f"link {found['predicted_bytes'] / 1e9:.1f} GB", *filter(None, [found.get("failure")])]
    return "  ".join(words)


def main() -> None:
    """Check all parts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--output", type=Path, help="file of the results, one line for each")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.toy else "cpu")
    for name in options.names or (TOYS if options.toy else PARTS):
        found = check(Part.parse(name), device, options.toy)
        print(line(found), flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps(found, default=str) + "\n")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

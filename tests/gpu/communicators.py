"""The communicators of NCCL that a plan makes on each rank, and the device memory that they take: a table.

python tests/gpu/communicators.py FILE, on a machine with a GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["MURAL_TEST_BACKEND"] = "nccl"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

import mural
from mural.models import UNet
from ranks import Pool

MICRO: dict[str, Any] = {"microbatches": 2, "batchnorm": "micro"}
PLANS = {
    "data=2": mural.Plan(data=2),
    "spatial=(2, 1)": mural.Plan(spatial=(2, 1)),
    "channel=2": mural.Plan(channel=2, channel_layers="all"),
    "stage=2, 1F1B": mural.Plan(stage=2, schedule="1f1b", **MICRO),
    "data=2, spatial=(2, 1)": mural.Plan(data=2, spatial=(2, 1)),
    "spatial=(2, 2)": mural.Plan(spatial=(2, 2)),
    "stage=4, 1F1B": mural.Plan(stage=4, schedule="1f1b", **MICRO),
    "stage=2, spatial=(2, 1), 1F1B": mural.Plan(stage=2, spatial=(2, 1), schedule="1f1b", **MICRO),
    "stage=2, data=2, GEMS": mural.Plan(stage=2, data=2, schedule="gems", **MICRO),
}


def used(plan: mural.Plan) -> tuple[float, int]:
    """The MiB that two steps added to the device beyond torch's own allocations, per rank, and this rank's process."""
    torch.zeros(1, device="cuda")
    side = dist.new_group(backend="gloo")
    model = UNet(width=8, depth=2).cuda()
    (model(torch.zeros(1, 3, 64, 64, device="cuda")).sum() * 0).backward()  # what cuDNN loads is not counted
    model.zero_grad()
    before = free(side)
    pm = mural.parallelize(model, plan)
    for _ in range(2):
        pm.step(torch.zeros(4, 3, 64, 64, device="cuda"), torch.zeros(4, 64, 64, dtype=torch.int64, device="cuda"))
    return (before - free(side)) / dist.get_world_size() / 2**20, os.getpid()


def free(side: Any) -> float:
    """The bytes that are free on the device, and those that torch holds on all ranks."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier(group=side)
    held = torch.tensor([float(torch.cuda.memory_reserved())])
    dist.all_reduce(held, group=side)
    return torch.cuda.mem_get_info()[0] + float(held)


def main(out: Path) -> None:
    """Write a row for each plan."""
    lines = ["| plan | ranks | communicators a rank | device memory a rank |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="mural-nccl-") as folder:
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{folder}/%p"}
        for name, plan in PLANS.items():
            pool = Pool(plan.devices)
            found = pool.run(used, plan)
            pool.close()
            counts = [(Path(folder) / str(pid)).read_text().count("Init COMPLETE") for _, pid in found]
            many = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
            lines.append(f"| `{name}` | {plan.devices} | {many} | {max(mib for mib, _ in found):.0f} MiB |")
            print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

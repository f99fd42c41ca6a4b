"""The law of stages on the ranks of one mpirun: python mpi_stages.py FOLDER. Each rank writes what differed."""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from stage_cases import TOLERANCE, Case, law

import mural
from mural.comm import mpi

CASES = (
    Case("unet", mural.Plan(stage=4, schedule="1f1b", microbatches=3, batchnorm="micro"), images=5),
    Case("tied", mural.Plan(stage=2, spatial=(2, 1), schedule="gems", microbatches=4, batchnorm="micro")),
    Case("several", mural.Plan(stage=2, data=2, schedule="gpipe", microbatches=2), images=5, sizes=((8, 8),) * 2),
    Case("fan", mural.Plan(stage=2, grids=((3, 1), (1, 1)), schedule="interleaved", microbatches=2), images=3),
)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    mpi.register()
    dist.init_process_group(mpi.NAME, init_method=mpi.METHOD, timeout=timedelta(seconds=60))
    found: dict[str, object] = {}
    for case in CASES:
        try:
            found[str(case)] = {name: value for name, value in law(case).items() if not value <= TOLERANCE}
        except Exception:
            found[str(case)] = traceback.format_exc()
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

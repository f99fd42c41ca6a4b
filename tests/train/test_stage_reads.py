"""What the ranks of a run in stages read: the image where a stage takes it, the mask where the loss is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from runs import SIDE, run_config, write_images

from mural.data.formats.stored import FileSource
from mural.data.source import Counter as Reads
from mural.train import Config
from mural.train.loop import fit_rank
from mural.train.run_check import compare
from ranks import RankError, restart, run_on

IMAGE, MASK = SIDE * SIDE * 3, SIDE * SIDE
TRAINED, HELD = 4, 2
EPOCHS = 2
TWO_THIRDS = 2 / 3
"""Rows 0 to 24 or 24 to 48, in tiles of 16 rows."""
MICRO = {"microbatches": 2, "batchnorm": "micro"}
PLANS: list[Any] = [
    ({"stage": 2}, [(1, 0), (0, 1)]),
    pytest.param({"stage": 2, "data": 2, "cuts": "layers"}, [(1 / 2, 0), (0, 1 / 2)] * 2, marks=pytest.mark.slow),
]
SLOW_PLANS: list[Any] = [
    ({"stage": 3}, [(1, 0), (0, 0), (0, 1)]),
    ({"stage": 2, "spatial": [2, 1]}, [(TWO_THIRDS, 0)] * 2 + [(0, TWO_THIRDS)] * 2),
    ({"stage": 2, "grids": [[2, 1], [1, 1]]}, [(TWO_THIRDS, 0)] * 2 + [(0, 1)]),
    ({"stage": 2, "seats": [0, 1, 0]}, [(1, 1), (0, 0)]),
    ({"stage": 2, "schedule": "1f1b", **MICRO}, [(1, 0), (0, 1)]),
    # Two replicas in opposite order train, and one of them alone is evaluated.
    ({"stage": 2, "schedule": "gems", **MICRO}, [(1, 1, 1, 0), (1, 1, 0, 1)]),
]
PLANS += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_PLANS]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder, TRAINED)
    write_images(folder / "held", HELD, seed=1)
    return folder


def counted(config: Config) -> Counter[str]:
    """The bytes that this rank decoded in a run, by the folder of the files."""
    sources: dict[int, FileSource] = {}
    read = FileSource.read

    def noted(self: FileSource, *args: Any) -> Any:
        if id(self) not in sources:
            sources[id(self)], self.counter = self, Reads()  # the files of a loader share one
        return read(self, *args)

    FileSource.read = noted
    try:
        fit_rank(0, config)
    finally:
        FileSource.read = read
    found: Counter[str] = Counter()
    for source in sources.values():
        held = "held " if source.path.parent.parent.name == "held" else ""
        found[held + source.path.parent.name] += source.counter.bytes_decoded
    return found


@pytest.mark.parametrize(("plan", "shares"), PLANS, ids=str)
def test_a_rank_reads_what_its_stages_take(
    images: Path, tmp_path: Path, plan: dict[str, Any], shares: list[tuple[float, ...]]
) -> None:
    """Every rank decoded image and mask, whatever its stages took of them."""
    config = run_config(
        images,
        tmp_path / "run",
        plan=plan,
        augment={"flips": True, "noise": 0.02},
        train={"epochs": EPOCHS},
        validation={"images": str(images / "held/images/*.tif"), "masks": str(images / "held/masks/*.tif")},
    )
    found = run_on(config.plan.devices, counted, config)
    trained, held = EPOCHS * TRAINED, EPOCHS * HELD
    sizes = {"images": trained * IMAGE, "masks": trained * MASK, "held images": held * IMAGE, "held masks": held * MASK}
    for rank, share in enumerate(shares):
        parts = zip(sizes.items(), share * 2, strict=False)  # what is said of training alone holds for both
        assert found[rank] == Counter({kind: round(part * size) for (kind, size), part in parts}), rank
    last = json.loads((config.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "validation"
    assert {"loss", "accuracy"} <= set(last)  # under seats, they were asked of a rank that had no result


def test_a_part_that_was_not_read_is_read_when_it_is_asked_for(images: Path, tmp_path: Path) -> None:
    """`mural check` takes a batch whole on every rank; the ranks compare what each of them read of it."""
    config = run_config(images, tmp_path / "run", plan={"stage": 2}, augment={"flips": True, "noise": 0.02})
    for found in run_on(2, compare, 0, config):
        assert found.exact, found


def test_a_mask_out_of_range_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[3, 5] = 7
    tifffile.imwrite(tmp_path / "masks/1.tif", mask, tile=(16, 16))
    config = run_config(tmp_path, plan={"stage": 2})
    with pytest.raises(RankError) as caught:
        run_on(2, counted, config)
    restart(2)
    text = str(caught.value)
    assert text.count("DataError: rank 1 could not read") == 2
    assert text.count("masks/1.tif: the mask holds the value 7") == 2

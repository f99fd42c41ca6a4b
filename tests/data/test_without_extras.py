"""The core on a machine that lacks the optional packages: it imports, reads, converts, and names what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile

BLOCKED = """
import sys
ABSENT = set("imagecodecs zarr nibabel rasterio openslide skimage pydantic plotly matplotlib tensorboard mpi4py "
             "sklearn scipy".split())
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
READS = """
import numpy as np, tifffile
import mural, mural.cli, mural.data, mural.checkpoint, mural.train
pixels = np.random.default_rng(0).integers(0, 255, (64, 80, 3), dtype=np.uint8)
for number, compression in enumerate((None, "zlib", "deflate")):
    tifffile.imwrite(f"{number}.tif", pixels, tile=(16, 16), photometric="rgb", compression=compression)
    with mural.open(f"{number}.tif") as image:
        box = image.read([(0, 3), (5, 40), (7, 60)]).numpy()
    assert np.array_equal(box, pixels[5:40, 7:60].transpose(2, 0, 1)), compression
for name in ("out.ome.zarr", "out.tif"):
    mural.data.convert("1.tif", name)
    with mural.open(name) as image:
        assert np.array_equal(image.read().numpy(), pixels.transpose(2, 0, 1)), name
assert not ABSENT & {name.partition(".")[0] for name in sys.modules}, ABSENT & set(sys.modules)
"""
MISSES = """
for name, extra in (("x.nii", "nifti"), ("x.svs", "slides"), ("x.jp2", "geo")):
    with open(name, "wb") as file:
        file.write(bytes(344) + b"n+1\\0" + bytes(400))
    try:
        mural.open(name)
    except mural.errors.DataError as error:
        assert f'pip install "mural-train[{extra}]"' in str(error), error
    else:
        raise SystemExit(f"{name} was opened")
"""
DAMAGED = """
import logging, mural
def attempt():
    try:
        mural.open("x.tif")
    except mural.errors.DataError as error:
        assert "x.tif" in str(error), error
    else:
        raise SystemExit("it was opened")
attempt()
logging.getLogger("tifffile").warning("said after")
logging.basicConfig(format="HEARD %(name)s")
attempt()
"""


def run(code: str, folder: Path) -> str:
    """What a program writes to stderr, in a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_the_core_reads_and_converts_tiff_without_optional_packages_and_names_what_others_need(tmp_path: Path) -> None:
    run(BLOCKED + READS + MISSES, tmp_path)


def damaged(folder: Path) -> None:
    """Save a TIFF with a tag of which tifffile complains to its log: a value that lies beyond the end."""
    path = folder / "x.tif"
    tifffile.imwrite(path, np.zeros((64, 64), np.uint8), tile=(16, 16), compression="zlib")
    with tifffile.TiffFile(path) as file:
        at = file.pages.first.tags["TileOffsets"].offset
    data = bytearray(path.read_bytes())
    data[at + 8 : at + 12] = b"\xf0\xff\xff\x7f"
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_tiff_writes_nothing_to_the_terminal_unless_logging_is_configured(tmp_path: Path) -> None:
    damaged(tmp_path)
    first, *heard = run(DAMAGED, tmp_path).splitlines()
    assert first == "said after"
    assert set(heard) == {"HEARD tifffile"}

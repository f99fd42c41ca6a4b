"""What verbs other than `mural train` refuse."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from refusals import Bad, content, refused

UNET = "graph mural.models:UNet --shape 1,3,64,64"
CONVERT = "convert images/0.tif a.ome.zarr"


def without_images(folder: Path) -> None:
    shutil.rmtree(folder / "images")


VERBS = [
    Bad("check: no images", "check run.toml --data.images 'x/*.tif'", "nothing matches 'x/*.tif'"),
    Bad("check: no file", "check x/run.toml", "x/run.toml cannot be read: No such file or directory"),
    Bad("graph: an unknown model", "graph mural.models:Unet", "did you mean 'UNet'?"),
    Bad("graph: no file", "graph nowhere.toml", "nowhere.toml cannot be read"),
    Bad("graph: a shape in words", "graph mural.models:UNet --shape 1,3,abc", "--shape '1,3,abc': give one extent per"),
    Bad("graph: a shape of other dims", "graph mural.models:UNet --shape 3,64", "takes batch, channels and 2 dims"),
    Bad("graph: other channels", "graph mural.models:UNet --shape 1,4,64,64", "build it with in_channels=4"),
    Bad("graph: another ending", f"{UNET} --output graph.pdf", "let its name end in .html, .htm, .dot, .gv, .txt"),
    Bad("graph: no folder", f"{UNET} --output x/graph.html", "its folder does not exist: make it"),
    Bad("graph: a folder", f"{UNET} --output a.html", "it is a folder", lambda f: (f / "a.html").mkdir()),
    Bad("graph: an unknown level", f"{UNET} --level deep", "'deep' is not one of 'module', 'block', 'layer'", code=2),
    Bad("graph: too many stages", f"{UNET} --stages 900", "900 stages of a model with 67 layers: give 1 to 67"),
    Bad("graph: no images", "graph run.toml", "To draw the model without its images, give --shape", without_images),
    Bad("profile: no steps", "profile run.toml --steps 0", "Invalid value for '--steps'", code=2),
    Bad("profile: a file for a folder", "profile run.toml --output run.toml", "a file is in the way: choose another"),
    Bad("convert: no file", "convert nowhere.tif a.ome.zarr", "nowhere.tif: there is no such file or folder"),
    Bad("convert: a text", "convert run.toml a.ome.zarr", "not known by its name or first bytes. Can be read: TIFF"),
    Bad("convert: what is there", "convert images/0.tif masks/0.tif", "it exists: choose another name, or"),
    Bad("convert: another ending", "convert images/0.tif a.xyz", "end it in .ome.zarr or in .tif"),
    Bad("convert: chunks in words", f"{CONVERT} --chunks 3,a", "--chunks '3,a': give one extent per dim"),
    Bad("convert: chunks of other dims", f"{CONVERT} --chunks 16", "chunks (16,) do not fit the shape (3, 32, 32)"),
    Bad("convert: a shard of no chunks", f"{CONVERT} --chunks 3,16,16 --shard 3,20,20", "give a multiple per dim"),
    Bad("convert: below a file", "convert images/0.tif run.toml/a.ome.zarr", "run.toml': a file is in the way"),
    Bad("export: no run", "export nowhere a.safetensors", "nowhere holds no checkpoint: give the folder of a run"),
    Bad("bench: an unknown name", "bench nothing", "no benchmark is called 'nothing'", code=2),
    Bad("doctor: no folder", "doctor --folder nowhere", "Invalid value for '--folder'", code=2),
    Bad("demo: no grid", "demo --grid 0x2", "write rows x columns, as in 2x2", code=2),
    Bad("demo: a file for a folder", "demo --out run.toml", "'run.toml' is a file", code=2),
    Bad("predict: no run", "predict nowhere images/0.tif", "nowhere is not the folder of a run"),
    Bad("a file of the wrong kind", "profile a.toml", "a.toml is not TOML", content("a.toml", "a b c")),
]  # fmt: skip


@pytest.mark.parametrize("bad", VERBS, ids=str)
def test_a_verb_refuses(bad: Bad, tmp_path: Path) -> None:
    refused(bad, tmp_path)

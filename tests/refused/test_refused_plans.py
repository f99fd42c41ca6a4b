"""Plans that are refused, most of them before a rank is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from refusals import Bad, refused

PLAN = "plan mural.models:UNet --image 3,64,64"

PLANS = [
    Bad("no ranks along a dim", "--plan.spatial 0,2", "spatial = (0, 2): give 1 to 3 sizes of at least 1"),
    Bad("negative ranks", "--plan.spatial=-1,2", "spatial = (-1, 2): give 1 to 3 sizes of at least 1"),
    Bad("four dims", "--plan.spatial 1,1,1,2", "spatial = (1, 1, 1, 2): give 1 to 3 sizes"),
    Bad("three dims of images with two", "--plan.spatial 1,1,1", "write 2 sizes, as spatial = [1, 1]"),
    Bad("no stages", "--plan.stage 0", "stage = 0: sizes are whole numbers of at least 1"),
    Bad("an unknown key", "--plan.spacial 2,1", "No such option: --plan.spacial", code=2),
    Bad("an unknown schedule", "--plan.schedule 1b1f", "should be one of 'sequential', 'gpipe', '1f1b'"),
    Bad("an unknown way to add up", "--plan.all_reduce star", "should be one of 'backend', 'auto', 'ring'"),
    Bad("norms over micro-batches", "--plan.microbatches 2", 'set batchnorm = "micro"', begun=True),
    Bad("a cut without stages", "--plan.cuts '[\"down.0\"]'", "cuts = ['down.0'] with stage = 1: one stage has"),
    Bad("a cut at no block", "--plan.schedule interleaved --plan.cuts '[\"nowhere\"]'", "nowhere"),
    Bad("an unknown balance", "--plan.schedule interleaved --plan.cuts luck", "cuts = 'luck': balance by 'layers'"),
    Bad("blocks that are not there", "--plan.recompute '[\"nowhere\"]'", "'nowhere', which is not a module"),
    Bad("blocks in one string", "--plan.recompute stem,head", 'give a list of blocks, as ["down.0"]'),
    Bad("a tile of nothing", "--plan.stream 0,16", "stream = (0, 16): give the tile's extent along each dim"),
    Bad("a tile of other dims", "--plan.stream 16", "give the tile's extent along each of the 2 dims"),
    Bad("tiles and stages", "--plan.stream 16,16 --plan.stage 2", "stream = (16, 16) with stage = 2 cannot be run"),
    Bad("tiles and stages computed again", "--plan.stream 16,16 --plan.recompute stages", "there are no stages"),
    Bad("an unknown kind to offload", "--plan.offload weights", "'activations', 'parameters', 'optimizer'"),
    Bad("a folder that is not there", "--plan.offload_folder nowhere", "offload_folder = 'nowhere' is not a folder"),
    Bad("memory without a unit", "--plan.memory 16GB?", "memory = '16GB?': write a number of bytes with its unit"),
    Bad("no memory", "--plan.memory 0GiB", "memory = '0GiB' is less than a byte: give what"),
    Bad("too little memory", "--plan.schedule interleaved --plan.memory 1KiB", "the limit is 1,024 B: raise stages"),
    Bad("unknown layers to split", "--plan.channel_layers convs", 'give "linear", "all", or a list of names'),
    Bad("channels and stages", "--plan.channel 2 --plan.stage 2", "channel = 2 with stages"),
    Bad("domains without targets", "--plan.domain 2", "plan.domain = 2 divides the domains of a separation network"),
    Bad("GEMS with one stage", "--plan.schedule gems", 'schedule = "gems" with stage = 1'),
    Bad("other ranks than the plan's", "--plan.spatial 2,1 --devices 3", "launch.devices = 3, but the plan needs 2"),
    Bad("grids for other stages", "--plan.grids '[[2, 1]]' --plan.stage 2", "give each stage a grid"),
    Bad("a seat that is not there", "--plan.seats 0,3 --plan.stage 2", "give each part of the model a place from"),
]  # fmt: skip

CHOICES = [
    Bad("memory without a unit, to choose for", f"{PLAN} --memory lots", "memory = 'lots': write a number of bytes"),
    Bad("too little memory, to choose for", f"{PLAN} --memory 1MiB", ("nothing fits into 1.00 MiB", "needs", "MiB")),
    Bad("an image of other channels", "plan mural.models:UNet --image 4,64,64", "build it with in_channels=4"),
    Bad("an image in words", "plan mural.models:UNet --image large", "give one extent per dim, as in 3,512,512"),
    Bad("an unknown device", f"{PLAN} --hardware tpu", "no hardware is called 'tpu': choose h200"),
    Bad("a target of another size", f"{PLAN} --target 32,32", "target has shape (1, 32, 32), the scores need"),
    Bad("no folder for the plan", f"{PLAN} --output nowhere/plan.toml", "its folder does not exist: make it"),
]


@pytest.mark.parametrize("bad", [*PLANS, *CHOICES], ids=str)
def test_a_plan_is_refused(bad: Bad, tmp_path: Path) -> None:
    refused(bad, tmp_path)

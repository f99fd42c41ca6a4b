"""What document `001` printed about offload: a table for each model and machine, and the models' parameters.

Hamza, Alnaasan, Dong and Jain, "Scaling Distributed DNN Training for Large Images", The Ohio State University. Seconds;
batch 32, 20 epochs of 8 steps of which the first 5 do not count, the Hymenoptera images.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 155
PARAMETERS = {"vgg19": 139_578_434, "alexnet": 57_012_034, "resnet50": 23_512_130, "inception_v3": 24_348_900}
PRINTED = ("baseline", "naive", "pinned", "nonblocking", "both")
"""The document's variants, in its order."""
Times = tuple[float, float, float, float]
"""Mean, maximum, minimum and median."""


@dataclass(frozen=True)
class Row:
    """One variant on one machine."""

    seconds: float
    accuracy: float
    """The best on the images for validation."""
    to_device: Times | None = None
    """Of copying the model to the device before each step ("CtoG")."""
    to_host: Times | None = None
    """Of copying it back after each step ("GtoC")."""


TABLES: dict[tuple[str, str], dict[str, Row]] = {
    ("vgg19", "K80"): {
        "baseline": Row(94.4539, 0.9739),
        "naive": Row(179.9194, 0.9804, (0.1069, 0.1450, 0.0646, 0.1173), (0.4836, 0.5842, 0.4358, 0.4825)),
        "pinned": Row(194.5803, 0.9739, (0.1131, 0.1414, 0.0651, 0.1184), (0.4816, 0.6069, 0.4293, 0.4805)),
        "nonblocking": Row(179.8007, 0.9739, (0.0863, 0.1329, 0.0628, 0.0682), (0.4880, 0.6082, 0.4291, 0.4891)),
        "both": Row(190.4785, 0.9804, (0.0713, 0.1310, 0.0631, 0.0657), (0.4917, 0.6061, 0.4429, 0.4931)),
    },
    ("vgg19", "V100"): {
        "baseline": Row(30.0673, 0.9673),
        "naive": Row(150.5116, 0.9739, (0.0678, 0.0935, 0.0584, 0.0644), (0.2148, 0.2672, 0.1952, 0.2082)),
        "pinned": Row(166.7242, 0.9673, (0.0640, 0.0993, 0.0591, 0.0615), (0.2346, 0.2758, 0.1966, 0.2378)),
        "nonblocking": Row(153.9791, 0.9608, (0.0665, 0.0916, 0.0575, 0.0628), (0.2159, 0.2644, 0.1968, 0.2089)),
        "both": Row(160.9983, 0.9608, (0.0648, 0.0939, 0.0584, 0.0630), (0.2100, 0.2634, 0.1949, 0.2068)),
    },
    ("alexnet", "V100"): {
        "baseline": Row(24.1323, 0.9085),
        "naive": Row(42.2092, 0.9150, (0.0285, 0.0383, 0.0243, 0.0270), (0.0762, 0.0888, 0.0680, 0.0735)),
        "pinned": Row(47.4363, 0.9346, (0.0262, 0.0384, 0.0241, 0.0251), (0.0804, 0.0924, 0.0675, 0.0811)),
        "nonblocking": Row(41.5072, 0.9346, (0.0276, 0.0572, 0.0237, 0.0261), (0.0761, 0.0898, 0.0679, 0.0729)),
        "both": Row(47.5516, 0.9216, (0.0252, 0.0360, 0.0235, 0.0242), (0.0816, 0.0933, 0.0683, 0.0812)),
    },
    ("resnet50", "V100"): {
        "baseline": Row(26.1702, 0.9477),
        "naive": Row(113.5793, 0.9608, (0.0250, 0.0539, 0.0216, 0.0238), (0.0461, 0.0714, 0.0292, 0.0423)),
        "pinned": Row(110.0957, 0.9608, (0.0252, 0.0430, 0.0221, 0.0229), (0.0463, 0.0721, 0.0311, 0.0445)),
        "nonblocking": Row(113.6041, 0.9608, (0.0205, 0.0323, 0.0170, 0.0197), (0.0474, 0.0771, 0.0307, 0.0446)),
        "both": Row(109.3674, 0.9608, (0.0208, 0.0400, 0.0172, 0.0183), (0.0457, 0.0746, 0.0310, 0.0425)),
    },
    ("inception_v3", "V100"): {
        "baseline": Row(32.2195, 0.9281),
        "naive": Row(124.2807, 0.9477, (0.0352, 0.0471, 0.0317, 0.0339), (0.0555, 0.0890, 0.0390, 0.0523)),
        "pinned": Row(120.2433, 0.9346, (0.0358, 0.0575, 0.0317, 0.0328), (0.0562, 0.0990, 0.0393, 0.0534)),
        "nonblocking": Row(123.1403, 0.9477, (0.0280, 0.0394, 0.0241, 0.0271), (0.0605, 0.0973, 0.0407, 0.0602)),
        "both": Row(119.2649, 0.9281, (0.0283, 0.0620, 0.0241, 0.0254), (0.0574, 0.1029, 0.0402, 0.0532)),
    },
}
"""By model and GPU: the K80 is with a Skylake CPU, the V100 with a Broadwell one."""


def added(model: str, machine: str) -> tuple[float, float]:
    """Seconds that naive offload adds to a step, by the totals, and by the mean times of both copies.

    >>> [round(seconds, 2) for seconds in added("resnet50", "V100")]
    [0.56, 0.07]
    """
    rows = TABLES[model, machine]
    naive = rows["naive"]
    if naive.to_device is None or naive.to_host is None:
        raise ValueError(f"no times of copies for {model} on {machine}: the table needs them")
    return (naive.seconds - rows["baseline"].seconds) / STEPS, naive.to_device[0] + naive.to_host[0]

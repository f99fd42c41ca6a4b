"""Parts: each is one measurement in a process of its own, with a name by which it can be asked for.

    table/MODEL/VARIANT        table/vgg19/naive         the document's training, in one variant
    shape/COUNT                shape/4096                512 MiB in that many tensors, copied to the host and back
    hosted/WAY                 hosted/mural              Adam on a model whose training needs more than 16 GiB
    activations/SIZE/WAY[CAP]  activations/3072/mural8   a U-Net on an image of that size; mural under a cap in GiB
    stages/SIZE/WAY            stages/2048/2offload      a U-Net in two stages of 16 GiB each; gems4: under GEMS

This module imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property

from offload.published import PARAMETERS, PRINTED

MODELS = tuple(PARAMETERS)
VARIANTS = (*PRINTED, "pinned_buffers", "mural", "mural_tight", "plan", "mural_plan")
HOSTED = ("uncapped", "mural", "plain")
IN_MEMORY = ("plain", "checkpoint", "save_on_cpu")
HOSTED_CAP = 16
"""GiB of the parts on Adam, and of a rank of those on stages."""
PATTERNS = {
    "table": rf"table/(?P<subject>{'|'.join(MODELS)})/(?P<way>{'|'.join(VARIANTS)})",
    "shape": r"shape/(?P<subject>[1-9]\d*)",
    "hosted": rf"hosted/(?P<way>{'|'.join(HOSTED)})",
    "stages": r"stages/(?P<subject>[1-9]\d*)/(?P<way>(?:gems)?[1248](?:offload)?)",
    "activations": rf"activations/(?P<subject>[1-9]\d*)/(?:(?P<way>{'|'.join(IN_MEMORY)})|(?P<ours>mural)(?P<cap>\d+))",
}


@dataclass(frozen=True)
class Part:
    """One measurement: of a kind, on a subject (a model, a number of tensors, a size), in one way."""

    kind: str
    subject: str = ""
    way: str = ""
    cap: int | None = None
    """GiB that the process may have; None: the whole device."""

    @cached_property
    def name(self) -> str:
        """The name.

        >>> Part("activations", "3072", "mural", 8).name, Part("hosted", way="plain", cap=16).name
        ('activations/3072/mural8', 'hosted/plain')
        """
        way = self.way + (str(self.cap) if self.kind == "activations" and self.cap else "")
        return "/".join(word for word in (self.kind, self.subject, way) if word)

    @classmethod
    def parse(cls, name: str) -> Part:
        """The part of that name.

        >>> Part.parse("hosted/mural").cap, Part.parse("table/alexnet/both").way
        (16, 'both')
        """
        kind = name.split("/")[0]
        found = re.fullmatch(PATTERNS.get(kind, r"(?!)"), name)
        if found is None:
            raise ValueError(f"{name!r} is not the name of a part: `mural bench offload --list` prints them")
        given = found.groupdict()
        capped = kind == "stages" or (kind == "hosted" and given["way"] != "uncapped")
        cap = HOSTED_CAP if capped else given.get("cap")
        return cls(
            kind, given.get("subject") or "", given.get("way") or given.get("ours") or "", int(cap) if cap else None
        )

    @property
    def stages(self) -> int:
        """How many stages the model has.

        >>> Part.parse("stages/2048/gems4offload").stages
        4
        """
        return int("".join(letter for letter in self.way if letter.isdigit()))

    @property
    def gems(self) -> bool:
        """Whether two replicas take turns."""
        return self.way.startswith("gems")

    @property
    def offloads(self) -> bool:
        """Whether memory leaves the device."""
        return self.way.endswith("offload")

    def expected(self, epochs: int = 20) -> float:
        """Seconds that it takes on a GPU, roughly, from its start; `epochs` are those of the document's training."""
        match self.kind:
            case "table":
                # Gradients move with the parameters.
                moved = 2 * 4e-9 * PARAMETERS[self.subject]
                return START + 8 * epochs * (STEP[self.subject] + ADDED.get(self.way, 0.0) * moved)
            case "shape":
                return START + 2 + int(self.subject) * 6e-4
            case "stages":
                return START + 15 + (int(self.subject) / 1024) ** 2 * (3.0 if self.offloads else 1.5)
            case "hosted":
                return START + (15 if self.way == "mural" else 5)
            case _:
                slow = self.way in ("save_on_cpu", "mural")
                return START + 3 + (int(self.subject) / 1024) ** 2 * (2.0 if slow else 0.3)


START = 6.0
"""Seconds until a process that waits, with everything imported, has built its model on the device."""
STEP = {"vgg19": 0.07, "alexnet": 0.02, "resnet50": 0.05, "inception_v3": 0.07}
"""Seconds of a step with everything on the device, loading included."""
FRESH, PINNED = 0.5, 0.05
"""Seconds that a GB of the model adds to a step, copied to fresh memory, or to pinned memory, and back."""
ADDED = {"naive": FRESH, "pinned": FRESH, "nonblocking": PINNED, "both": PINNED, "pinned_buffers": PINNED}


@dataclass(frozen=True)
class Sizes:
    """The sizes at which parts are measured."""

    counts: tuple[int, ...] = (1, 8, 64, 512, 4096, 32768)
    images: tuple[int, ...] = (2048, 3072)
    activations: tuple[str, ...] = ("plain", "mural8", "checkpoint", "save_on_cpu")
    staged: tuple[int, ...] = (2048, 2560, 3072)
    stages: tuple[str, ...] = ("1", "1offload", "2", "2offload", "4", "gems2", "gems2offload", "gems4")


TOY = Sizes((1, 8, 64), (48,), staged=(32,), stages=("1", "2offload", "gems2"))


def all_parts(sizes: Sizes) -> list[Part]:
    """All parts; of each kind, those that others are compared with first."""
    names = [
        *(f"table/{model}/{variant}" for model in MODELS for variant in VARIANTS),
        *(f"shape/{count}" for count in sizes.counts),
        *(f"hosted/{way}" for way in HOSTED),
        *(f"activations/{size}/{way}" for size in sizes.images for way in sizes.activations),
        *(f"stages/{size}/{way}" for size in sizes.staged for way in sizes.stages),
    ]
    return [Part.parse(name) for name in names]


def selected(parts: list[Part], only: list[str]) -> list[Part]:
    """The parts whose names match a pattern, in the order of the patterns; a whole name need not be in the list.

    >>> [part.name for part in selected(all_parts(Sizes()), ["shape/3*", "activations/512/mural2"])]
    ['shape/32768', 'activations/512/mural2']
    """
    found: dict[str, Part] = {}
    for pattern in only:
        matching = [part for part in parts if fnmatch(part.name, pattern)] or [Part.parse(pattern)]
        found |= {part.name: part for part in matching}
    return list(found.values())

"""Many ranks on the CPU: the document's numbers of GPUs and more, at small images, beside one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.case import Case, extents_text
from harness.session import Session


@dataclass(frozen=True)
class Many:
    """A model on many ranks: the extents of the check, and those at which memory is measured."""

    model: str
    ranks: int
    check: tuple[int, ...]
    memory: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()


# In order of ranks, so that a team of ranks serves all models of its number.
MANY = (
    Many("CNN3D", 9, (24, 20, 18), (108, 108, 108)),
    Many("CNN2D", 10, (66, 50), (1280, 1280)),
    Many("FCN2D", 10, (97, 83), (1280, 1280), (("width", 8),)),
    Many("CNN1D", 12, (515,), (600_000,)),
    Many("DenseNet-121", 12, (97, 99), (512, 512)),
    Many("UNet3D", 16, (33, 24, 19), (96, 96, 96), (("width", 8), ("depth", 2))),
    Many("CNN3D", 28, (29, 24, 22), (108, 108, 108)),
)


def measure_many(session: Session, quick: bool = False) -> None:
    """Check every case against one process, and compare the peaks of memory."""
    chosen = [replace(m, ranks=3, memory=m.check) for m in MANY[:2]] if quick else MANY
    for many in chosen:
        if session.log.left < 20:
            session.log.write("skipped", name=many.model, ranks=many.ranks)
            continue
        case = Case(many.model, many.check, many.ranks, options=many.options)
        if session.log.find("check", case=case.encode()) is None:
            answers = session.ask("check", case, None)
            if answers is not None:
                session.log.write("check", case=case.encode(), **answers[0])
                about = f"{many.model} {extents_text(many.check)}, {many.ranks} ranks"
                session.log.say(f"{about}: {answers[0]['difference']:.1e} from one process, in float64")
        session.measure(replace(case, extents=many.memory), None, repeats=0)
    for many in chosen:
        if session.log.left > 20:
            session.measure(Case(many.model, many.memory, 1, options=many.options), None, repeats=0)

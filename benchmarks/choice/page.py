"""The tables: for each setting its mixes, the fastest first, and the chosen one next to the best; and the page."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.results import Record, read
from harness.tables import NONE, environment, gib, markdown, ms, place, ratio

from choice.parts import BATCHES, CHOSEN, FIXED, MIXES, MORE, Part, doing, not_run

TITLES = {"unet": "U-Net", "resnet50": "ResNet-50", "swin_t": "Swin-T"}


@dataclass
class Compared:
    """What is known of a setting: its prediction, and the measurements and failures of its mixes."""

    part: Part
    predicted: Record
    measured: dict[str, Record] = field(default_factory=dict[str, Record])
    failed: dict[str, Record] = field(default_factory=dict[str, Record])

    @property
    def title(self) -> str:
        """Model, images and cap."""
        return f"{images_of(self.part)}, {self.part.cap} GiB"

    def twins(self, mix: str) -> list[str]:
        """The measured mixes that do what this one does: it was measured as often."""
        wanted = doing(self.predicted["mixes"][mix])
        return [other for other in self.measured if doing(self.predicted["mixes"][other]) == wanted]

    @property
    def rivals(self) -> list[str]:
        """The measured mixes that do something else than the chosen one, each once."""
        found = (mix for mix in FIXED if mix in self.measured)
        different = {doing(self.predicted["mixes"][mix]): mix for mix in reversed([*found])}
        return [mix for mix in different.values() if mix not in self.twins(CHOSEN)][::-1]

    @property
    def best(self) -> str | None:
        """The fastest mix that was measured."""
        return min(self.measured, key=self.seconds, default=None)

    def seconds(self, mix: str) -> float:
        """The median of a mix's steps, under this name."""
        return statistics.median(self.measured[mix]["seconds"])

    def steps(self, mix: str) -> list[float]:
        """The steps of a mix, under any name."""
        return [seconds for twin in self.twins(mix) for seconds in self.measured[twin]["seconds"]]

    def chosen_over_best(self, reduced: Callable[[list[float]], float] = statistics.median) -> float | None:
        """The chosen mix's seconds divided by those of the best that was measured; 1 where nothing else was faster.

        Of a mix's steps, the medians are compared, or what `reduced` makes of them.
        """
        if not self.steps(CHOSEN) or not self.rivals:
            return None
        return max(1.0, reduced(self.steps(CHOSEN)) / min(reduced(self.steps(mix)) for mix in self.rivals))

    def over_best(self, mix: str) -> float | None:
        """A mix's seconds divided by the best one's."""
        return self.seconds(mix) / self.seconds(self.best) if mix in self.measured and self.best else None

    def peak(self, mix: str) -> int:
        """The measured peak: of streamed steps that of the first ones too, which autograd holds and tapes do not."""
        record = self.measured[mix]
        first = record.get("first_peak", 0) if self.predicted["mixes"][mix]["plan"]["stream"] else 0
        return max(record["allocated"], first)

    def peak_ratio(self, mix: str) -> float | None:
        """The predicted peak divided by the measured one."""
        bytes_measured = self.peak(mix) if mix in self.measured else 0
        return self.predicted["mixes"][mix]["peak"] / bytes_measured if bytes_measured else None

    def seconds_ratio(self, mix: str) -> float | None:
        """The predicted seconds divided by the measured ones."""
        steps = self.steps(mix) if mix in self.measured else []
        return self.predicted["mixes"][mix]["seconds"] / statistics.median(steps) if steps else None

    def apart(self, mix: str) -> float | None:
        """The slowest step of a mix divided by the fastest, under all its names."""
        return max(self.steps(mix)) / min(self.steps(mix)) if self.steps(mix) else None


def images_of(part: Part) -> str:
    """Model and images.

    >>> images_of(Part("unet", 2048, 8, "keep"))
    'U-Net, 1 × 2048²'
    """
    return f"{TITLES[part.model]}, {BATCHES[part.model]} × {part.size}²"


def compared(records: Iterable[Record]) -> list[Compared]:
    """All settings of which there is a prediction and at least one result; the last record of each part counts.

    A result of another plan than is predicted now under that name does not.
    """
    records = list(records)
    found = {
        r["name"]: Compared(Part.parse(f"{r['name']}/{CHOSEN}"), r) for r in records if r["kind"] == "predicted"
    }  # fmt: skip
    last = {r["name"]: r for r in records if r["kind"] in ("measure", "failure") and r["name"].count("/") == 3}
    for name, record in last.items():
        part = Part.parse(name)
        if part.setting in found and ran(record) in (None, planned(found[part.setting], part.mix)):
            one = found[part.setting]
            (one.measured if record["kind"] == "measure" else one.failed)[part.mix] = record
    return [one for one in found.values() if one.measured or one.failed]


def ran(record: Record) -> dict[str, Any] | None:
    """The plan that a part ran, the fields that it sets; None where that was not noted."""
    return tomllib.loads(record["plan"]) if "plan" in record else None


def planned(one: Compared, mix: str) -> dict[str, Any]:
    """The plan of a mix by its prediction, the fields that it sets."""
    plan: Mapping[str, Any] = one.predicted["mixes"].get(mix, {}).get("plan", {})
    return {name: value for name, value in plan.items() if value}


def short(record: Record) -> str:
    """A measurement in a line."""
    moved = record["report"].get("to_host")
    left = f", {gib(moved)} GiB left" if isinstance(moved, int) and moved else ""
    return f"{ms(record['seconds'])} ms a step, {gib(record['allocated'])} GiB{left}, loss {record['losses'][-1]:.6g}"


def why(failure: Record) -> str:
    """What stopped a part."""
    known = {"memory": "out of memory", "late": "no time"}
    return known.get(failure["why"]) or str(failure["message"])[:120]


# -- a setting -------------------------------------------------------------------------------------------------------

HEAD = (
    "mix", "what it does", "step, ms", "÷ best", "predicted, ms", "peak, GiB", "predicted, GiB", "predicted ÷ measured",
    "in the first steps, GiB", "reserved, GiB", "to the host, GiB", "allocator retries",
)  # fmt: skip


def mix_rows(one: Compared) -> list[list[str]]:
    """The mixes of a setting: measured ones by time, then those that failed, then those that did not run."""
    ran = sorted(one.measured, key=one.seconds)
    others = [m for m in MIXES if m not in one.measured and (m in one.failed or m not in MORE)]
    others.sort(key=lambda mix: mix not in one.failed)
    rows: list[list[str]] = []
    for mix in (*ran, *others):
        about, record = one.predicted["mixes"][mix], one.measured.get(mix)
        named = [f"**{mix}**" if mix == CHOSEN else mix, about.get("words", NONE)]
        foreseen = [f"{1000 * about['seconds']:.0f}", gib(about["peak"])] if "plan" in about else [NONE, NONE]
        if record is None:
            reason = why(one.failed[mix]) if mix in one.failed else not_run(replace(one.part, mix=mix), one.predicted)
            rows.append([*named, (reason or "not measured")[:120], NONE, foreseen[0], NONE, foreseen[1], *[NONE] * 5])
            continue
        rows.append([
            *named, ms(record["seconds"]), ratio(one.over_best(mix)), foreseen[0], gib(one.peak(mix)),
            foreseen[1], ratio(one.peak_ratio(mix), 3), gib(record.get("first_peak", 0)), gib(record["reserved"]),
            gib(record["report"].get("to_host", 0)), str(record["retries"]),
        ])  # fmt: skip
    return rows


# -- all of them -----------------------------------------------------------------------------------------------------

SUMMARY = (
    "model and images", "cap, GiB", "other mixes measured", "out of memory", "chosen", "step, ms",
    "best of the others", "step, ms", "chosen ÷ best", "by fastest steps", "its slowest step ÷ its fastest",
    "peak, predicted ÷ measured", "the furthest of all mixes", "step, predicted ÷ measured",
)  # fmt: skip


def summary_row(one: Compared) -> list[str]:
    """The chosen mix of a setting next to the best one."""
    rival = min(one.rivals, key=lambda mix: statistics.median(one.steps(mix)), default=None)
    words = one.predicted["mixes"][CHOSEN].get("words", NONE)
    peaks = [found for mix in one.measured if (found := one.peak_ratio(mix)) is not None]
    furthest = max(peaks, key=lambda found: abs(found - 1), default=None)
    took = why(one.failed[CHOSEN]) if CHOSEN in one.failed else ms(one.steps(CHOSEN))
    other = f"{rival}: {one.predicted['mixes'][rival]['words']}" if rival else NONE
    return [
        images_of(one.part), str(one.part.cap), str(len(one.rivals)), str(len(one.failed)), words, took, other,
        ms(one.steps(rival)) if rival else NONE, ratio(one.chosen_over_best()),
        ratio(one.chosen_over_best(min)),
        ratio(one.apart(CHOSEN)), ratio(one.peak_ratio(CHOSEN), 3), ratio(furthest, 3),
        ratio(one.seconds_ratio(CHOSEN)),
    ]  # fmt: skip


def spread_rows(found: Sequence[Compared]) -> list[list[str]]:
    """How far the losses of all mixes of a model and size are apart, next to the loss itself."""
    rows: list[list[str]] = []
    for images in dict.fromkeys(images_of(one.part) for one in found):
        same = [one for one in found if images_of(one.part) == images]
        losses = [loss for one in same for record in one.measured.values() for loss in record["losses"]]
        norms = [record["gradient"] for one in same for record in one.measured.values()]
        if losses:
            apart = [f"{max(many) / min(many) - 1:.1e}" if min(many) else NONE for many in (losses, norms)]
            rows.append([images, str(len(losses)), f"{statistics.median(losses):.6f}", *apart])
    return rows


def tables(records: Sequence[Record]) -> str:
    """All tables of what was measured, as Markdown."""
    found = compared(records)
    sections = [("Chosen, and the best", markdown(SUMMARY, map(summary_row, found)))] if found else []
    spread = ("model and images", "steps", "loss, median", "largest ÷ smallest − 1", "of the gradient's norm")
    sections += [("Losses", markdown(spread, spread_rows(found)))] if found else []
    sections += [(one.title, markdown(HEAD, mix_rows(one))) for one in found]
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in sections)


def write(folder: Path) -> None:
    """Write the tables into README.md."""
    source = folder / "results" / "gpu.json"
    if not source.is_file():
        raise SystemExit("results/gpu.json does not exist: run the benchmark first, then --collect its files")
    records = read(source)
    place(folder / "README.md", "results", f"{environment(records)}\n\n{tables(records)}")

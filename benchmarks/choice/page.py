"""The tables: for each setting its mixes, the fastest first, and the chosen one next to the best; and the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.results import Record, read
from harness.tables import NONE, environment, gib, markdown, ms, place, ratio

from choice.parts import BATCHES, CHOSEN, FIXED, MIXES, MORE, Part, not_run

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

    @property
    def twins(self) -> list[str]:
        """The measured mixes that do what the chosen one does: it was measured as often."""
        wanted = doing(self.predicted["mixes"][CHOSEN])
        return [mix for mix in self.measured if doing(self.predicted["mixes"][mix]) == wanted]

    @property
    def rivals(self) -> list[str]:
        """The measured mixes that do something else."""
        return [mix for mix in FIXED if mix in self.measured and mix not in self.twins]

    @property
    def best(self) -> str | None:
        """The fastest mix that was measured."""
        return min(self.measured, key=self.seconds, default=None)

    def seconds(self, mix: str) -> float:
        """The median of a mix's steps."""
        return statistics.median(self.measured[mix]["seconds"])

    @property
    def chosen_steps(self) -> list[float]:
        """The steps of the chosen mix, under any name."""
        return [seconds for mix in self.twins for seconds in self.measured[mix]["seconds"]]

    @property
    def chosen_over_best(self) -> float | None:
        """The chosen mix's seconds divided by those of the best that was measured; 1 where nothing else was faster."""
        if not self.chosen_steps or not self.rivals:
            return None
        return max(1.0, statistics.median(self.chosen_steps) / min(map(self.seconds, self.rivals)))

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
        return self.predicted["mixes"][mix]["seconds"] / self.seconds(mix) if mix in self.measured else None


def doing(mix: Record) -> Any:
    """What a mix does: two of the same are one mix, whatever they are called. None: it cannot be."""
    if "plan" not in mix:
        return None
    plan = mix["plan"]
    again = plan["recompute"] if isinstance(plan["recompute"], str) else frozenset(plan["recompute"])
    return again, mix["moved"] > 0, tuple(plan["stream"] or ())


def images_of(part: Part) -> str:
    """Model and images.

    >>> images_of(Part("unet", 2048, 8, "keep"))
    'U-Net, 1 × 2048²'
    """
    return f"{TITLES[part.model]}, {BATCHES[part.model]} × {part.size}²"


def compared(records: Iterable[Record]) -> list[Compared]:
    """All settings of which there is a prediction and at least one result; the last record of each part counts."""
    records = list(records)
    found = {
        r["name"]: Compared(Part.parse(f"{r['name']}/{CHOSEN}"), r) for r in records if r["kind"] == "predicted"
    }  # fmt: skip
    last = {r["name"]: r for r in records if r["kind"] in ("measure", "failure") and r["name"].count("/") == 3}
    for name, record in last.items():
        part = Part.parse(name)
        if part.setting in found:
            one = found[part.setting]
            (one.measured if record["kind"] == "measure" else one.failed)[part.mix] = record
    return [one for one in found.values() if one.measured or one.failed]


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
    "best of the others", "step, ms",
    "chosen ÷ best", "peak, predicted ÷ measured", "the furthest of all mixes", "step, predicted ÷ measured",
)  # fmt: skip


def summary_row(one: Compared) -> list[str]:
    """The chosen mix of a setting next to the best one."""
    rival = min(one.rivals, key=one.seconds, default=None)
    words = one.predicted["mixes"][CHOSEN].get("words", NONE)
    peaks = [found for mix in one.measured if (found := one.peak_ratio(mix)) is not None]
    furthest = max(peaks, key=lambda found: abs(found - 1), default=None)
    took = why(one.failed[CHOSEN]) if CHOSEN in one.failed else ms(one.chosen_steps)
    other = f"{rival}: {one.predicted['mixes'][rival]['words']}" if rival else NONE
    return [
        images_of(one.part), str(one.part.cap), str(len(one.rivals)), str(len(one.failed)), words, took, other,
        ms(one.measured[rival]["seconds"]) if rival else NONE, ratio(one.chosen_over_best),
        ratio(one.peak_ratio(CHOSEN), 3), ratio(furthest, 3), ratio(one.seconds_ratio(CHOSEN)),
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

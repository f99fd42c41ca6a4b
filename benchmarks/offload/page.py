"""The tables: what was published next to ours, what leaves and the peaks, shapes, Adam, activations; and the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.results import Record, read
from harness.tables import NONE, environment, gib, markdown, ms, place, ratio

from offload.parts import MODELS, VARIANTS, Part
from offload.published import PARAMETERS, STEPS, TABLES, Times, added

TITLES = {"vgg19": "VGG-19", "alexnet": "AlexNet", "resnet50": "ResNet-50", "inception_v3": "Inception-v3"}
NAMES = {
    "baseline": "baseline",
    "naive": "naive",
    "pinned": "pinned loader",
    "nonblocking": "non-blocking",
    "both": "pinned loader, non-blocking",
    "pinned_buffers": "pinned buffers",
    "mural": "**mural**",
    "mural_tight": "**mural, ¾ of the memory**",
    "plan": "plan without offload",
    "mural_plan": "**plan with offload**",
}
COPY_WAYS = ("fresh", "pageable", "pinned", "nonblocking")
Found = dict[Part, Record]


def latest(records: Iterable[Record]) -> tuple[Found, Found]:
    """The last record about each part: those that were measured, and those that failed."""
    last = {r["name"]: r for r in records if r["kind"] in ("measure", "failure")}
    parts = {Part.parse(name): record for name, record in last.items()}
    measured = {part: record for part, record in parts.items() if record["kind"] == "measure"}
    return measured, {part: record for part, record in parts.items() if record["kind"] == "failure"}


def short(record: Record) -> str:
    """A measurement in a line."""
    match record["name"].split("/")[0]:
        case "table":
            took = f"{record['total']:.2f} s in {record['steps']} steps, {1000 * record['step']:.1f} ms a step"
            return f"{took}, {gib(record['allocated'])} GiB, accuracy {record['accuracy']:.3f}"
        case "shape":
            return ", ".join(f"{way} {rates(record, way)} GB/s" for way in COPY_WAYS)
        case "hosted":
            took = f"{ms(record['steps'])} ms a step, {ms(record['updates'])} ms an update"
        case _:
            took = f"{ms(record['seconds'])} ms a step"
    return f"{took}, {gib(record['allocated'])} GiB, loss {record['losses'][-1]:.6g}"


# -- the document's table -------------------------------------------------------------------------------------------


def machines(model: str) -> list[str]:
    """Where the document measured a model."""
    return [machine for name, machine in TABLES if name == model]


def base_of(variant: str) -> str:
    """The variant that another one is compared with: mural's plans draw other dropout than plain torch."""
    return "plan" if variant.endswith("plan") else "baseline"


def table_of(model: str, measured: Found) -> str:
    """Totals, ratios to the baseline and accuracies of a model, published and ours."""
    head = ["variant"]
    for where in machines(model):
        head += [f"{where}, s", "÷ baseline", "accuracy"]
    head += ["ours, s", "÷ baseline", "median step, ms", "÷ baseline", "accuracy", "last loss", "same as baseline"]
    rows = [[NAMES[v], *printed_cells(model, v), *our_cells(model, v, measured)] for v in VARIANTS]
    return markdown(head, rows)


def printed_cells(model: str, variant: str) -> list[str]:
    """What the document has for a variant."""
    cells: list[str] = []
    for machine in machines(model):
        rows = TABLES[model, machine]
        row = rows.get(variant)
        if row is None:
            cells += [NONE] * 3
        else:
            cells += [f"{row.seconds:.2f}", ratio(row.seconds / rows["baseline"].seconds), f"{row.accuracy:.4f}"]
    return cells


def our_cells(model: str, variant: str, measured: Found) -> list[str]:
    """What we measured of a variant; ratios are those of times a step."""
    record = measured.get(Part("table", model, variant))
    if record is None:
        return [NONE] * 7
    base = measured.get(Part("table", model, base_of(variant)))
    steps = "" if record["steps"] == STEPS else f" ({record['steps']} steps)"
    each = record["total"] / record["steps"]
    ratios = [each * base["steps"] / base["total"], record["step"] / base["step"]] if base else [None, None]
    return [
        f"{record['total']:.2f}{steps}", ratio(ratios[0]), f"{1000 * record['step']:.1f}", ratio(ratios[1]),
        f"{record['accuracy']:.3f}", f"{record['losses'][-1]:.6f}", same_training(record, base),
    ]  # fmt: skip


def same_training(record: Record, base: Record | None) -> str:
    """Whether a training ended with its baseline's weights, bit for bit; one of fewer steps draws other batches."""
    if base is None or base is record or base["steps"] != record["steps"]:
        return NONE
    return "yes" if base["weights"] == record["weights"] else f"no, losses: {same_losses(record, base)}"


COPIES_HEAD = (
    "variant", "machine", "to device: mean", "max", "min", "median", "to host: mean", "max", "min", "median",
)  # fmt: skip


def copies_of(model: str, measured: Found) -> str:
    """Seconds of the model's copies before and after each step, published and ours."""
    rows: list[list[str]] = []
    for variant in VARIANTS:
        for machine in machines(model):
            row = TABLES[model, machine].get(variant)
            if row is not None and row.to_device is not None:
                rows.append([NAMES[variant], machine, *times(row.to_device), *times(row.to_host)])
        record = measured.get(Part("table", model, variant))
        if record is not None and record["left"]:
            rows.append([NAMES[variant], "ours", *times(record["came"]), *times(record["left"])])
    return markdown(COPIES_HEAD, rows)


def times(found: Times | Sequence[float] | None) -> list[str]:
    """Mean, maximum, minimum and median, as the document prints them."""
    return [NONE] * 4 if found is None else [f"{seconds:.4f}" for seconds in found]


LEAVES_HEAD = (
    "model", "variant", "parameters, GiB", "tensors", "leaves, GiB", "comes, GiB", "peak, GiB", "÷ baseline",
    "reserved, GiB", "between steps, GiB", "rests pinned", "loading, s",
)  # fmt: skip


def leaves_rows(measured: Found) -> list[list[str]]:
    """What moves in a step, and what the device holds."""
    rows: list[list[str]] = []
    for model, variant in ((m, v) for m in MODELS for v in VARIANTS):
        record = measured.get(Part("table", model, variant))
        if record is None:
            continue
        base, report = measured.get(Part("table", model, base_of(variant))), record["report"]
        over = record["allocated"] / base["allocated"] if base and base["allocated"] else None
        rows.append([
            TITLES[model], NAMES[variant], gib(4 * record["parameters"], 3), str(record["tensors"]),
            gib(report["to_host"], 3), gib(report["from_host"], 3), gib(record["allocated"]), ratio(over),
            gib(record["reserved"]), gib(record["between"]), "yes" if record["rests_pinned"] else NONE,
            f"{record['loading']:.2f}",
        ])  # fmt: skip
    return rows


# -- the other parts ------------------------------------------------------------------------------------------------


def rates(record: Record, way: str) -> str:
    """GB/s to the host and back, of the median copy."""
    both = (record["bytes"] / statistics.median(record[way][direction]) / 1e9 for direction in ("out", "back"))
    return " / ".join(f"{rate:.3g}" for rate in both)


def shape_rows(measured: Found) -> list[list[str]]:
    """Bandwidth by the number of tensors."""
    parts = sorted((part for part in measured if part.kind == "shape"), key=lambda part: int(part.subject))
    return [
        [part.subject, f"{record['each'] / 1024:g}", *(rates(record, way) for way in COPY_WAYS)]
        for part, record in ((part, measured[part]) for part in parts)
    ]


HOSTED_HEAD = (
    "way", "cap, GiB", "step, ms", "update, ms", "both ÷ uncapped", "peak, GiB", "reserved, GiB",
    "Adam's on the host, GiB", "steps", "last loss", "same losses",
)  # fmt: skip


def hosted_rows(measured: Found, failed: Found) -> list[list[str]]:
    """Adam within the cap and without."""
    whole = measured.get(Part("hosted", way="uncapped"))
    rows: list[list[str]] = []
    for part in sorted({p for p in (*measured, *failed) if p.kind == "hosted"}, key=lambda p: (p.cap or 0, p.way)):
        named, record = [part.way, str(part.cap or NONE)], measured.get(part)
        if record is None:
            rows.append([*named, why(failed[part]), *[NONE] * 8])
            continue
        over = together(record) / together(whole) if whole else None
        rows.append([
            *named, ms(record["steps"]), ms(record["updates"]), ratio(over), gib(record["allocated"]),
            gib(record["reserved"]), gib(record["resting"]), str(len(record["losses"])),
            f"{record['losses'][-1]:.6f}", same_losses(record, whole),
        ])  # fmt: skip
    return rows


def together(record: Record) -> float:
    """Seconds of a step and its update."""
    return statistics.median(record["steps"]) + statistics.median(record["updates"])


def same_losses(record: Record, other: Record | None) -> str:
    """Whether the losses of all steps that both took are equal, as far as they are written."""
    if other is None or other is record:
        return NONE
    both = list(zip(record["losses"], other["losses"], strict=False))
    return "yes" if all(one == two for one, two in both) else f"no: {max(abs(a - b) for a, b in both):.1e}"


def why(failure: Record) -> str:
    """What stopped a part."""
    known = {"memory": "out of memory", "late": "no time"}
    return known.get(failure["why"]) or str(failure["message"])[:120]


ACTIVATIONS_HEAD = (
    "image", "way", "cap, GiB", "step, ms", "÷ plain", "peak, GiB", "reserved, GiB", "leaves, GiB", "comes, GiB",
    "host, GiB", "planned peak, GiB", "planned step, ms", "loss ÷ plain − 1",
)  # fmt: skip


def activations_rows(measured: Found, failed: Found) -> list[list[str]]:
    """The ways in which a U-Net's activations are kept."""
    found = {part for part in (*measured, *failed) if part.kind == "activations"}
    rows: list[list[str]] = []
    for part in sorted(found, key=lambda part: (int(part.subject), part.cap or 0, part.way)):
        named = [f"{part.subject}²", "**mural**" if part.way == "mural" else part.way, str(part.cap or NONE)]
        record, plain = measured.get(part), measured.get(Part("activations", part.subject, "plain"))
        if record is None:
            rows.append([*named, why(failed[part]), *[NONE] * 9])
            continue
        took, report = statistics.median(record["seconds"]), record["report"]
        over = took / statistics.median(plain["seconds"]) if plain else None
        apart = f"{record['losses'][0] / plain['losses'][0] - 1:.1e}" if plain and plain is not record else NONE
        rows.append([
            *named, ms(record["seconds"]), ratio(over), gib(record["allocated"]), gib(record["reserved"]),
            gib(report.get("to_host", 0)), gib(report.get("from_host", 0)), gib(record["host"], 1),
            gib(report.get("peak")), f"{1000 * report['seconds']:.0f}" if "seconds" in report else NONE, apart,
        ])  # fmt: skip
    return rows


STAGES_HEAD = (
    "image", "stages of 16 GiB", "schedule", "offload", "step, s", "largest peak, GiB", "reserved, GiB", "leaves, GiB",
    "loss",
)  # fmt: skip


def stages_rows(measured: Found, failed: Found) -> list[list[str]]:
    """A U-Net in stages, with and without offload."""
    found = {part for part in (*measured, *failed) if part.kind == "stages"}
    rows: list[list[str]] = []
    for part in sorted(found, key=lambda part: (int(part.subject), part.gems, part.stages, part.offloads)):
        schedule = "GEMS" if part.gems else "1F1B" if part.stages > 1 else NONE
        named = [f"{part.subject}²", str(part.stages), schedule, "yes" if part.offloads else "no"]
        record = measured.get(part)
        if record is None:
            rows.append([*named, why(failed[part]), *[NONE] * 4])
            continue
        rows.append([
            *named, f"{record['step']:.3f}", gib(record["allocated"]), gib(record["reserved"]),
            gib(record["report"]["to_host"]), f"{record['losses'][-1]:.6f}",
        ])  # fmt: skip
    return rows


# -- the page -------------------------------------------------------------------------------------------------------


def tables(records: Sequence[Record]) -> str:
    """All tables of what was measured, as Markdown; those without a row are left out."""
    measured, failed = latest(records)
    models = [model for model in MODELS if any((p.kind, p.subject) == ("table", model) for p in measured)]
    sections: list[tuple[str, str]] = []
    for model in models:
        title = f"{TITLES[model]}, {PARAMETERS[model]:,} parameters"
        sections += [(title, f"{table_of(model, measured)}\n\n{copies_of(model, measured)}")]
    shapes = ["tensors", "KiB each", *(f"{way}, GB/s out / back" for way in COPY_WAYS)]
    lists: list[tuple[str, Sequence[str], list[list[str]]]] = [
        ("What leaves, and the peak", LEAVES_HEAD, leaves_rows(measured)),
        ("Few large tensors, many small ones", shapes, shape_rows(measured)),
        ("Adam in 16 GiB", HOSTED_HEAD, hosted_rows(measured, failed)),
        ("Activations of a U-Net", ACTIVATIONS_HEAD, activations_rows(measured, failed)),
        ("A U-Net in stages", STAGES_HEAD, stages_rows(measured, failed)),
    ]
    sections += [(title, markdown(head, rows)) for title, head, rows in lists if rows]
    stopped = [f"- {part.name}: {why(record)}" for part, record in failed.items() if part.kind in ("table", "shape")]
    sections += [("Failed", "\n".join(stopped))] if stopped else []
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in sections)


def published() -> str:
    """What naive offload adds to a step by the document's totals, and by its own times of copies."""
    rows: list[list[str]] = []
    for model, machine in TABLES:
        whole, copied = added(model, machine)
        moved = 4e-9 * PARAMETERS[model]
        cells = [f"{whole:.2f}", f"{copied:.2f}", f"{whole - copied:.2f}", f"{moved:.2f}"]
        rows.append([TITLES[model], machine, *cells])
    head = ("model", "machine", "added to a step, s", "copies, s", "the rest, s", "parameters, GB")
    return markdown(head, rows)


def write(folder: Path) -> None:
    """Write the tables into README.md; those of ours as far as there are results."""
    place(folder / "README.md", "published", published())
    source = folder / "results" / "gpu.json"
    if not source.is_file():
        raise SystemExit("results/gpu.json does not exist: run the benchmark first, then --collect its files")
    records = read(source)
    place(folder / "README.md", "results", f"{environment(records)}\n\n{tables(records)}")

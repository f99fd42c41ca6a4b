"""Tables of what travels: sizes of layers, the document's formulas, counters, and where one way overtakes the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sending
from harness.results import Record
from harness.tables import NONE, markdown
from payload import Size, data_parallel, model_parallel
from published import CROSSOVER

WAYS = ("data", "model", "hybrid")


def sizes_text(records: Sequence[Record]) -> str:
    """For each network: its parameters and values between layers, and what convolutions and linear layers have."""
    rows: list[list[str]] = []
    for record in records:
        layers = record["layers"]
        linear = [row for row in layers if row["type"] == "Linear"]
        held, kept = (sum(row[key] for row in layers) for key in ("parameters", "kept"))
        share = sum(row["parameters"] for row in linear) / held
        data = sum(row["kept"] for row in linear) / kept
        rows.append(
            [
                record["words"],
                str(len(layers)),
                f"{held:,}",
                f"{kept:,}",
                f"{100 * share:.1f}%",
                f"{100 * data:.1f}%",
                f"{max(row['kept'] / row['parameters'] for row in layers):,.1f}",
                f"{held / kept:.1f}",
            ]
        )
    head = ["network", "layers", "parameters", "values kept between layers", "of these in linear layers: parameters"]
    head += ["values", "largest values ÷ parameters of a layer"]
    return markdown([*head, "parameters ÷ values: images of a step at which both send as much"], rows)


def layers_of(record: Record) -> list[Size]:
    """The layers of a record."""
    return [
        Size(*(row[key] for key in ("name", "parameters", "inputs", "outputs", "kept"))) for row in record["layers"]
    ]


def totals(record: Record) -> tuple[int, int]:
    """Messages and values of a step: split channels, and means of gradients by a ring."""
    rows: list[dict[str, Any]] = record["layers"]
    return (
        sum(row["messages"] + row["ring_messages"] for row in rows),
        sum(row["values"] + row["ring_values"] for row in rows),
    )


def formulas_text(records: Sequence[Record]) -> str:
    """For each network, way and number of ranks: counted, by mural's formulas, and by the document's."""
    rows: list[list[str]] = []
    for record in records:
        layers, ranks, images = layers_of(record), record["ranks"], record["images"]
        messages, values = totals(record)
        ours = sending.expected(record["layers"], images, record["channel"], record["data"])
        theirs = {"data": data_parallel(layers, ranks), "model": model_parallel(layers, ranks, images)}.get(
            record["way"]
        )
        rows.append(
            [
                record["words"],
                record["way"],
                str(ranks),
                str(images),
                f"{messages:,}",
                f"{values:,}",
                f"{100 * (values / ours - 1):+.2f}%",
                f"{theirs.messages:,}" if theirs else NONE,
                f"{theirs.values:,}" if theirs else NONE,
                f"{values / theirs.values:.2f}" if theirs else NONE,
            ]
        )  # fmt: skip
    head = ["network", "way", "ranks", "images", "messages, counted", "values, counted"]
    return markdown(
        [*head, "against mural's formulas", "messages, document", "values, document", "counted ÷ document"], rows
    )


def counted_text(records: Sequence[Record]) -> str:
    """For each network, a table of its layers under each way on the most ranks: messages and values, counted."""
    parts: list[str] = []
    for net in dict.fromkeys(r["net"] for r in records):
        mine = [r for r in records if r["net"] == net and r["images"] == 2 * r["ranks"]]
        ranks = max(r["ranks"] for r in mine)
        ways = {r["way"]: r for r in mine if r["ranks"] == ranks}
        some = next(iter(ways.values()))
        rows = [
            [row["name"], f"{row['parameters']:,}", f"{row['inputs']:,}", f"{row['outputs']:,}"]
            + [cell(ways[way]["layers"][number]) for way in ways]
            for number, row in enumerate(some["layers"])
        ]
        rows.append(["all", "", "", "", *("{:,} · {:,}".format(*totals(r)) for r in ways.values())])
        head = ["layer", "parameters", "inputs", "outputs", *ways]
        parts += [
            f"{some['words']} on {ranks} ranks, {some['images']} images; messages · values:",
            markdown(head, rows),
        ]
    return "\n\n".join(parts)


def cell(row: dict[str, Any]) -> str:
    """Messages and values of one layer; a split one is marked."""
    text = f"{row['messages'] + row['ring_messages']:,} · {row['values'] + row['ring_values']:,}"
    return f"**{text}**" if row["split"] else text


def crossover_text(schemes: Sequence[Record], steps: Sequence[Record], sizes: Sequence[Record]) -> str:
    """On both sides of where one way overtakes the other: the document's scheme, and mural's, counted."""
    lenet = next(r for r in sizes if r["net"] == "lenet5")
    held, kept = (sum(row[key] for row in lenet["layers"]) for key in ("parameters", "kept"))
    found = [
        f"{held:,} ÷ {kept:,} = {held / kept:.1f}. With b images on each of N nodes, model parallelism sends 2·N·(N·b)·"
        f"{kept:,} values and data parallelism 2·N·{held:,}: less while N·b < {held / kept:.1f}. N itself cancels out: "
        f"the document's «N ≤ {CROSSOVER}» is its number for b = 1.",
        markdown(
            ["images of each node", "nodes up to which model parallelism sends less"],
            [[str(b), f"{held / kept / b:.1f}"] for b in (1, 2, 4, 8, 16, 100)],
        ),
    ]
    rows: list[list[str]] = []
    for r in schemes:
        rows.append(
            ["the document's", str(r["ranks"]), str(r["images"]), *sides(r["model"]["values"], r["data"]["values"])]
        )
    plain = {r["ranks"]: totals(r)[1] for r in steps if r["net"] == "lenet5" and r["way"] == "data"}
    for r in steps:
        if r["net"] == "lenet5" and r["way"] in ("model", "hybrid") and r["images"] != 2 * r["ranks"]:
            rows.append(
                [f"mural's {r['way']}", str(r["ranks"]), str(r["images"]), *sides(totals(r)[1], plain[r["ranks"]])]
            )
    head = ["scheme", "ranks", "images of a step", "model or hybrid: values, counted", "data: values, counted", "less"]
    return "\n\n".join([*found, markdown(head, rows)])


def sides(model: int, data: int) -> list[str]:
    """Two counts, and which is less."""
    return [f"{model:,}", f"{data:,}", "split" if model < data else "data"]

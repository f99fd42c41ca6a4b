"""What was run, in tables: model, images, plan, starts, machines, versions; and the configuration without defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from mural.checkpoint.folder import steps_in
from mural.report.run_page import TextTable
from mural.report.words import seconds_in_words
from mural.run_report.run_history import RunHistory
from mural.run_report.run_verdict import moment, sessions
from mural.train.config import Config
from mural.train.configured_samples import Split
from mural.train.start import CHECKPOINTS
from mural.typed import tables

MODEL = "model."


def description(run: RunHistory, splits: Mapping[str, Split]) -> list[TextTable]:
    """The tables of what was run."""
    config = run.config
    optimizer = f"{config.optimizer.name}, lr {config.optimizer.lr:g}, schedule {config.schedule.name}"
    rows = [
        ("model", f"{config.model.factory}{weights(run)}"),
        *([("weights from", str(config.model.weights))] if config.model.weights else []),
        *images(run, splits),
        ("batch", f"{config.data.batch} image{'s' * (config.data.batch > 1)}"),
        ("loss", config.loss.name),
        ("optimizer", optimizer),
        ("plan", ", ".join(str(config.plan).splitlines())),
        ("checkpoints", checkpoints(run)),
        ("folder", str(run.folder.resolve())),
        *origin(run),
    ]
    return [TextTable("", (), rows), *([starts(run)] if len(run.starts) > 1 else [])]


def weights(run: RunHistory) -> str:
    """How many weights the model has; of an old run, what its checkpoint holds."""
    if run.starts:
        return f", {run.starts[-1].weights:,} weights"
    if run.manifest is None:
        return ""
    shapes = (entry.shape for name, entry in run.manifest.tensors.items() if name.startswith(MODEL))
    return f", {sum(map(prod, shapes)):,} numbers in its checkpoint"


def images(run: RunHistory, splits: Mapping[str, Split]) -> Iterable[tuple[str, str]]:
    """The images of each domain."""
    if run.starts:
        return [(f"images of {name}" if name else "images", in_words(facts)) for name, facts in known(run).items()]
    counts = {
        name: {"samples": len(split.training), "held_out": 0 if split.held_out is None else len(split.held_out)}
        for name, split in splits.items()
    }
    return [(f"images of {name}" if name else "images", in_words(facts)) for name, facts in counts.items()]


def known(run: RunHistory) -> Mapping[str, Mapping[str, Any]]:
    """What the last start noted of images."""
    return run.starts[-1].images


def in_words(facts: Mapping[str, Any]) -> str:
    """How many images there are, and of which kind.

    >>> in_words({"samples": 6, "held_out": 2, "channels": 3, "dtype": "uint8", "smallest": [9, 8], "largest": [9, 9]})
    '6 to train on, 2 held out; 3 channels of uint8, 9 × 8 to 9 × 9'
    """
    found = f"{facts['samples']} to train on, {facts['held_out'] or 'none'} held out"
    if "channels" not in facts:
        return found
    small, large = (" × ".join(map(str, facts[name])) for name in ("smallest", "largest"))
    extents = small if small == large else f"{small} to {large}"
    many = f"{facts['channels']} channel{'s' * (facts['channels'] != 1)}"
    return f"{found}; {many} of {facts['dtype']}, {extents}"


def checkpoints(run: RunHistory) -> str:
    """The checkpoints that are there."""
    steps = steps_in(run.folder / CHECKPOINTS)
    return f"after steps {', '.join(map(str, steps))}" if steps else "none"


def origin(run: RunHistory) -> list[tuple[str, str]]:
    """By which command, where, and on what the run was started last; of an old run, what its checkpoint says."""
    if not run.starts:
        written = {} if run.manifest is None else dict(run.manifest.written)
        host = written.pop("host", "")
        written.pop("time", None)
        versions = [("versions", versions_in_words(written))] if written else []
        return [*([("machine", host)] if host else []), *versions]
    last = run.starts[-1]
    places = dict.fromkeys(zip(last.hosts, last.devices, strict=True))
    machines = [f"{host}: {count} × {device}" if (count := several(last, host, device)) > 1 else f"{host}: {device}"
                for host, device in places]  # fmt: skip
    return [
        ("ranks", str(len(last.hosts))),
        ("machine", "; ".join(machines)),
        ("command", last.command),
        ("started in", last.directory),
        ("versions", versions_in_words(last.versions)),
    ]


def several(start: Any, host: str, device: str) -> int:
    """How many ranks of a start have such a device on a machine; those of a CPU share it."""
    pairs = list(zip(start.hosts, start.devices, strict=True))
    return 1 if device.startswith("CPU") else pairs.count((host, device))


def versions_in_words(found: Mapping[str, str]) -> str:
    """Versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in found.items())


def starts(run: RunHistory) -> TextTable:
    """The starts of a run that was resumed."""
    rows: list[list[str]] = []
    for number, (start, (begin, end)) in enumerate(zip(run.starts, sessions(run), strict=True)):
        after = run.starts[number + 1].before if number + 1 < len(run.starts) else run.status
        by = f" by {after['by']}" if after.get("by") else ""
        ended = f"{after.get('state', 'unknown')}{by}"
        rows.append([moment(begin), str(start.step), seconds_in_words(end - begin), start.plan, ended])
    return TextTable("Starts", ["started", "at step", "took", "plan", "then"], rows)


def changed_toml(config: Config) -> str:
    """The configuration as TOML, without fields that have their default values.

    >>> print(changed_toml(Config.of({"seed": 3, "train": {"epochs": 2}})), end="")
    seed = 3
    <BLANKLINE>
    [train]
    epochs = 2
    """
    usual = dict(tables(Config(), ""))
    lines: list[str] = []
    for name, values in tables(config, ""):
        kept = [line for line in values if line not in usual.get(name, [])]
        if kept:
            lines += [*([f"\n[{name}]"] if name else []), *kept]
    return "\n".join(lines).lstrip("\n") + "\n"

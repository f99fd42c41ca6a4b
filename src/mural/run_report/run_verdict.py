"""The headline of a report: how a run stands, how long it took, what its best validation was, and what it leaves."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import median
from typing import Literal

from mural.checkpoint.folder import steps_in
from mural.errors import MuralError
from mural.prediction.trained_run import trained_run
from mural.report.run_page import Headline
from mural.report.words import seconds_in_words
from mural.run_report.run_history import RunHistory
from mural.train.journal import METRICS
from mural.train.start import CHECKPOINTS

Mood = Literal["good", "busy", "bad"]


def headline(run: RunHistory) -> Headline:
    """The headline of a run."""
    mood, words, more = verdict(run)
    bad = [str(one.get("name")) for one in run.status.get("bad", ())]
    if run.damaged:
        more.append(f"Left out: {counted(run.damaged, 'damaged line')} of {METRICS}.")
    if bad:
        more.append(f"Left out: {counted(len(bad), 'sample')} that could not be read: {', '.join(bad[:3])}")
    return Headline(mood, words, more, [took(run), best(run), chosen(run), last_loss(run)])


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "line"), counted(3, "line")
    ('1 line', '3 lines')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def verdict(run: RunHistory) -> tuple[Mood, str, list[str]]:
    """How a run stands, and what more there is to say."""
    at, error = f"step {run.step}" + f" of {run.total}" * bool(run.total), str(run.status.get("error", ""))
    by, saved = str(run.status.get("by", "")), steps_in(run.folder / CHECKPOINTS)
    again = f"mural train goes on from step {saved[-1]}." if saved else "Nothing was saved."
    match run.state:
        case "finished":
            return "good", f"Finished: {counted(run.step, 'step')}", []
        case "stopped" if by.startswith("train.stop_after"):
            return "good", f"Stopped early, after {at}: {by.partition(': ')[2]} (train.stop_after)", []
        case "stopped":
            return "busy", f"Stopped by {by}, after {at}", [again]
        case "failed":
            return "bad", f"Failed after {at}", [error, *([] if "saved" in error else [again])]
        case "killed":
            return "bad", f"Killed by {by}, after {at}" if by else f"Killed after {at}", [error, again]
        case "gone":
            return "bad", f"Ended without a word after {at}: process {run.status.get('pid')} is gone", [again]
        case "running":
            return "busy", f"Still running, at {at}{left(run)}", [alive(run)]
        case _:
            return "busy", f"At {at}; there is no status.json, which would say whether it goes on", []


def left(run: RunHistory) -> str:
    """How long a run will take from here on, if it goes on as before."""
    paces = [float(line["step_seconds"]) for line in run.of("train") if "step_seconds" in line]
    rest = (run.total - run.step) * median(paces) if paces and run.total else 0.0
    return f"; about {seconds_in_words(rest)} left" if rest > 0 else ""


def alive(run: RunHistory) -> str:
    """When, and where, a run was last heard of."""
    return f"Last heard of on {moment(seen(run))}: process {run.status.get('pid')} on {run.status.get('host')}."


# -- facts -------------------------------------------------------------------------------------------------------------


def took(run: RunHistory) -> tuple[str, str, str]:
    """How long the run was at work, over all its starts."""
    spans = sessions(run)
    sure = "" if run.starts else "about "
    several = f", in {len(spans)} starts" if len(spans) > 1 else ""
    begin, end = moment(spans[0][0]), moment(spans[-1][1])
    day, _, hour = end.rpartition(", ")
    until = "" if begin == end else f" to {hour if begin.startswith(day) else end}"
    return "Took", sure + seconds_in_words(sum(b - a for a, b in spans)), f"{begin}{until}{several}"


def sessions(run: RunHistory) -> list[tuple[float, float]]:
    """From when to when the run was at work, for each start; of an old run without a record, estimated."""
    times = [float(line["time"]) for line in run.lines]
    if not run.starts:
        first = min(run.lines, key=lambda line: line["time"])
        paced = next((line for line in run.lines if "step_seconds" in line), first)
        begin = float(paced["time"]) - float(paced.get("step_seconds", 0.0)) * int(paced["step"])
        return [(min(begin, *times), max(seen(run), begin))]
    spans: list[tuple[float, float]] = []
    for number, start in enumerate(run.starts):
        later = run.starts[number + 1 :]
        if not later:
            spans.append((start.time, max(start.time, seen(run))))
            continue
        inside = [time for time in times if start.time <= time < later[0].time]
        spans.append((start.time, max([start.time, stamp(later[0].before.get("time")), *inside])))
    return spans


def seen(run: RunHistory) -> float:
    """When the run was last heard of."""
    return max(stamp(run.status.get("time")), *(float(line["time"]) for line in run.lines), 0.0)


def stamp(text: object) -> float:
    """The seconds of a time in a status; 0 where there is none.

    >>> stamp("1970-01-01T00:01:00+00:00"), stamp(None)
    (60.0, 0.0)
    """
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def moment(seconds: float) -> str:
    """A moment as a person writes it, in the time of this machine."""
    found = datetime.fromtimestamp(seconds, UTC).astimezone()
    return f"{found.day} {found:%b %Y, %H:%M}"


def best(run: RunHistory) -> tuple[str, str, str]:
    """The best validation."""
    found = run.best
    if found is None:
        return "Best validation", "none", "nothing is held out" if holds_nothing_out(run) else "there was none yet"
    since = f"{counted(found.since, 'validation')} since" if found.since else "the last validation"
    return f"Best {found.score}", f"{found.value:.4g}", f"after step {found.step}; {since}"


def holds_nothing_out(run: RunHistory) -> bool:
    """Whether it is known that a run has no validations."""
    return bool(run.starts) and not any(facts.get("held_out") for facts in run.starts[-1].images.values())


def chosen(run: RunHistory) -> tuple[str, str, str]:
    """The checkpoint that a prediction takes."""
    name = "mural predict takes"
    try:
        step = trained_run(run.folder).step
    except MuralError as error:
        reason = "it knows one domain alone" if run.config.targets.images else str(error).partition(": ")[2]
        return name, "nothing", reason or str(error)
    if not run.config.checkpoint.best:
        return name, f"step {step}", "the newest, since checkpoint.best is not set"
    is_best = run.best is not None and run.best.step == step
    return name, f"step {step}", f"the best by {run.config.checkpoint.best}" if is_best else "the newest"


def last_loss(run: RunHistory) -> tuple[str, str, str]:
    """The last loss of training."""
    found = run.of("train")
    if not found:
        return "Training loss", "none", f"logged every {run.config.log.every} steps"
    first, last = found[0], found[-1]
    before = f"; {first['loss']:.4g} at step {first['step']}" if last is not first else ""
    return "Training loss", f"{last['loss']:.4g}", f"at step {last['step']}{before}"

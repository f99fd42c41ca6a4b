"""Runs a pair on the ranks of its plan and writes down what each did: the text of its invariants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import unified_diff
from itertools import groupby
from textwrap import wrap
from typing import Any

import torch

import mural
from law import tensors_of
from mural.shard.halo.fuse import fusing
from ranks import run_on
from replay.pairs import PAIRS, Pair
from replay.watch import in_words, number, watching

STEPS = 2
Sections = dict[str, list[str]]
"""What one rank did, by title."""


def invariants(name: str) -> str:
    """The text of a pair."""
    pair = PAIRS[name]
    return written(pair, run_on(pair.plan.devices, on_rank, name))


def on_rank(name: str) -> Sections:
    """What this rank does in some steps, and without gradients."""
    pair = PAIRS[name]
    model = pair.model()
    torch.manual_seed(7)
    with fusing(pair.fused), watching(model) as watch:
        shapes = [tuple(image.shape[1:]) for image in images_of(pair.batch(0)[0])]
        pm = mural.parallelize(model, pair.plan, pair.loss(model), image=shapes)
        found: Sections = {"held": held(pm)}
        watch.sent()
        before: list[str] = []
        for step in range(1, STEPS + 1):
            loss = pm.step(*pair.batch(step))
            found["losses"] = [*found.get("losses", []), f"{number(loss.item(), pair.exact)}"]
            found[f"gradients of step {step}"] = gradients(pm, pair)
            pm.updated()
            sent = watch.sent()
            found[f"messages of step {step}"] = changed(before, sent) if before else sent
            before = sent
        found["actions"] = filled(f"{action};" for action, _, _ in pm.actions())
        found["boxes"] = [f"{key}: {' '.join(names)}" for key, names in watch.boxes.items()]
        found["draws"] = filled(watch.draws)
        found["results"] = results(pm, pair)
        found["messages of results"] = watch.sent()
    return found


def changed(before: Sequence[str], lines: Sequence[str]) -> list[str]:
    """How lines differ from those of the step before."""
    _, _, *hunks = [*unified_diff(plain(before), plain(lines), n=0, lineterm="")] or ("", "", "as in step 1")
    return hunks


def filled(words: Iterable[str]) -> list[str]:
    """Words in lines."""
    return wrap(" ".join(words), 118, break_on_hyphens=False)


def plain(lines: Sequence[str]) -> list[str]:
    """Lines without what is behind a #."""
    return [line.partition("#")[0].rstrip() for line in lines]


def images_of(image: Any) -> Sequence[Any]:
    """The inputs of a model."""
    return image if isinstance(image, tuple) else (image,)


def held(pm: Any) -> list[str]:
    """The parameters that this rank holds, of which shape."""
    return filled(f"{name}:{'×'.join(map(str, p.shape))}" for name, p in pm.named_parameters())


def gradients(pm: Any, pair: Pair) -> list[str]:
    """The sum of each gradient where it is exact, else the norm of all."""
    if pair.exact:
        sums = ((n, "none" if p.grad is None else number(p.grad.sum().item(), True)) for n, p in pm.named_parameters())
        return filled(f"{n} {value};" for n, value in sums)
    return [f"norm {number(pm.clip_grad_norm_(1e30).item(), False)}"]


def results(pm: Any, pair: Pair) -> list[str]:
    """Shapes and boxes of what the model gives under the plan, without gradients."""
    pm.eval()
    found = tensors_of(pm(pair.batch(0)[0]))
    return [f"{tuple(y.shape)}, here {place(y)}" for y in found]


def place(result: Any) -> str:
    """Where a rank's piece lies."""
    local = getattr(result, "local", result)
    if isinstance(result, mural.ShardedTensor) and local is not None:
        return in_words(result.box)
    return "all" if isinstance(result, torch.Tensor) else "nothing"


def written(pair: Pair, ranks: Sequence[Sections]) -> str:
    """The sections of all ranks, those that are the same on several ranks once."""
    lines = [f"{pair.build} {pair.shape} {pair.target}", *str(pair.plan).splitlines()]
    titles = list(dict.fromkeys(title for sections in ranks for title in sections))
    for title in titles:
        texts = [tuple(sections.get(title, [])) for sections in ranks]
        for text in dict.fromkeys(texts):
            if text:
                who = [rank for rank, other in enumerate(texts) if plain(other) == plain(text)]
                lines += ["", f"[{title}] {spans(who)}", *text]
    return "\n".join(lines) + "\n"


def spans(ranks: Sequence[int]) -> str:
    """Ranks in short.

    >>> spans([0, 1, 2, 5])
    'ranks 0-2 5'
    """
    found = [[n for _, n in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in found]
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(words)}"

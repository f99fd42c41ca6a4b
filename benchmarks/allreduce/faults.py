"""What loses accuracy: sums in other orders, and averages that are wrong in ways that a ring written by hand can be.

Ranks are simulated in one process, since a race that loses data between processes loses other data each time. The hand
written ring passes whole buffers round: in each of P - 1 rounds a rank sends what it got in the round before, and adds
what arrives to its sum.

    correct             the mean; in the order of a ring, of a tree, of a parameter server, of a shuffled ring
    no division         the sum instead of the mean
    divided by P - 1    the number of messages instead of that of ranks
    one round short     the last rank's buffer does not arrive, but counts in the division
    mean at each hop    what arrives and what is there are averaged at once, so that the last rank counts half, the one
                        before a quarter, and most of the others nothing
    overwritten         the send of a round has not begun to read its buffer when the next arrival is copied into it, so
                        it sends that instead; `share` of the values, the rest had left already
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import digits
import torch
from torch import Tensor, nn

from mural.collectives.algorithms import parameter_server, ring, tree
from mural.collectives.simulate import simulate

Averages = Callable[[Sequence[Tensor]], list[Tensor]]
"""What every rank gets, from what every rank brings."""
RATE = 0.2
"""Twice that of `digits`: of forty ranks, each has but nine steps an epoch."""
SHARES = (0.01, 0.1, 0.5, 1.0)


def in_order(make: Callable[[int], Any]) -> Averages:
    """The mean, summed as an algorithm does."""
    return lambda rows: [row / len(rows) for row in simulate(make(len(rows)), rows)]


def shuffled(rows: Sequence[Tensor]) -> list[Tensor]:
    """The mean, summed as a ring over ranks in another order does."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))
    return [row / len(rows) for row in simulate(ring(len(rows)), [rows[i] for i in order])]


def passed_round(rows: Sequence[Tensor], rounds: int, overwritten: float = 0.0) -> list[Tensor]:
    """The sums of a ring of whole buffers after so many rounds.

    Where a send is overwritten, what leaves is what arrives in the same round: its own predecessor's.
    """
    ranks, sums, held = len(rows), [row.clone() for row in rows], [row.clone() for row in rows]
    late = int(overwritten * rows[0].numel())
    for _ in range(rounds):
        arriving = [held[(rank - 1) % ranks].clone() for rank in range(ranks)]
        if late:
            for rank in range(ranks):
                arriving[rank][:late] = held[(rank - 2) % ranks][:late]
        sums = [total + piece for total, piece in zip(sums, arriving, strict=True)]
        held = arriving
    return sums


def halved(rows: Sequence[Tensor]) -> list[Tensor]:
    """The mean of two at each hop of a ring of running means."""
    ranks, means = len(rows), [row.clone() for row in rows]
    for _ in range(ranks - 1):
        means = [(rows[rank] + means[(rank - 1) % ranks]) / 2 for rank in range(ranks)]
    return means


def by_hand(rounds: int = 0, divisor: int = 0, overwritten: float = 0.0) -> Averages:
    """A ring written by hand: so many rounds less, divided by so much less than P, some of it overwritten."""

    def average(rows: Sequence[Tensor]) -> list[Tensor]:
        ranks = len(rows)
        return [row / (ranks - divisor) for row in passed_round(rows, ranks - 1 - rounds, overwritten)]

    return average


def undivided(rows: Sequence[Tensor]) -> list[Tensor]:
    """The sum."""
    return passed_round(rows, len(rows) - 1)


FAULTS: dict[str, Averages] = {
    "order of a ring": in_order(ring),
    "order of a tree": in_order(tree),
    "order of a parameter server": in_order(parameter_server),
    "order of a shuffled ring": shuffled,
    "ring by hand": by_hand(),
    "no division": undivided,
    "divided by P − 1": by_hand(divisor=1),
    "one round short": by_hand(rounds=1),
    "mean at each hop": halved,
    **{f"overwritten: {share:.0%}": by_hand(overwritten=share) for share in SHARES},
}


def trained(average: Averages, ranks: int, width: int, seed: int, what: str, epochs: int) -> list[float]:
    """The accuracy of every rank's network in the end; they differ where the averages do."""
    x, y, test, labels = digits.images("cpu")
    models = [digits.network(width, seed) for _ in range(ranks)]
    mine = [torch.arange(rank, len(y) - len(y) % (ranks * digits.BATCH), ranks) for rank in range(ranks)]
    draws = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(ranks)]
    for _ in range(epochs):
        orders = [part[torch.randperm(len(part), generator=draw)] for part, draw in zip(mine, draws, strict=True)]
        if what == "weights":
            for model, order in zip(models, orders, strict=True):
                digits.epoch(model, x, y, order, None, RATE)
            rows = [torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in models]
            for model, row in zip(models, average(rows), strict=True):
                nn.utils.vector_to_parameters(row.clone(), model.parameters())
        else:
            together(models, x, y, orders, average)
    with torch.no_grad():
        return [(model(test).argmax(1) == labels).float().mean().item() for model in models]


def together(models: list[nn.Sequential], x: Tensor, y: Tensor, orders: list[Tensor], average: Averages) -> None:
    """One epoch of all ranks with gradients averaged in each step."""
    for batches in zip(*(order.split(digits.BATCH) for order in orders), strict=True):
        rows: list[Tensor] = []
        for model, batch in zip(models, batches, strict=True):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
        for model, row in zip(models, average(rows), strict=True):
            parameters = list(model.parameters())
            with torch.no_grad():
                for p, g in zip(parameters, row.split([p.numel() for p in parameters]), strict=True):
                    p -= RATE * g.view_as(p)


def measure(ranks: int, width: int, seeds: list[int], kinds: list[str], epochs: int) -> list[dict[str, Any]]:
    """Every fault, by accuracy on rank 0 and on the worst rank."""
    records: list[dict[str, Any]] = []
    for what in kinds:
        for name, average in FAULTS.items():
            found = [trained(average, ranks, width, seed, what, epochs) for seed in seeds]
            about = {"ranks": ranks, "what": what, "width": width, "fault": name}
            records.append(about | {"accuracy": [each[0] for each in found], "worst": [min(each) for each in found]})
            mean = sum(records[-1]["accuracy"]) / len(seeds)
            print(f"faults: {ranks} ranks, {what}, {name}: {100 * mean:.2f}%", flush=True)
    return records

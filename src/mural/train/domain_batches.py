"""Batches of several domains: the source's lead, and those of targets come along, begun anew as they run out."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from mural.data import Batch, Loader
from mural.data.image_sample import BadSample


@dataclass(frozen=True)
class DomainBatch(Batch):
    """One step's batch of each domain: `image` has one for each, `target` is the source's, or those by name."""

    domains: tuple[Batch, ...] = ()
    counted: tuple[bool, ...] = ()
    """Whether the images of each domain are held-out ones that were not seen in this validation before."""


class DomainLoader:
    """The batches of a source with those of targets, the same ones whatever the plan.

    An epoch is one of the source. Targets go on where they were: which of a target's batches comes with a batch of the
    source follows from the numbers of epoch and step alone, so that a resumed run goes on with the same.
    """

    def __init__(self, loaders: Mapping[str, Loader]):
        self.loaders = loaders
        self.source, *self.targets = loaders.values()
        self.dataset, self.steps_per_epoch = self.source.dataset, self.source.steps_per_epoch

    @property
    def bad(self) -> list[BadSample]:
        """The samples of all domains that were left out."""
        return [bad for loader in self.loaders.values() for bad in loader.bad]

    def epoch(self, number: int, start: int = 0) -> Generator[DomainBatch]:
        """The batches of an epoch of the source, from step `start` on. Collective."""
        with ExitStack() as stack:
            begun = number * self.steps_per_epoch + start
            others = [stack.enter_context(closing(batches_from(target, begun))) for target in self.targets]
            for batch in stack.enter_context(closing(self.source.epoch(number, start))):
                yield together((batch, *(next(other) for other in others)), batch.target)

    def summary(self) -> str:
        """The bad samples that were left out of each domain."""
        return "\n".join(f"{name}: {loader.summary()}" for name, loader in self.loaders.items())

    def close(self) -> None:
        """Close the files that are kept open between steps."""
        for loader in self.loaders.values():
            loader.close()


class HeldOutDomains(DomainLoader):
    """The held-out images of all domains in order; a domain that has run out begins anew, and counts no more."""

    def epoch(self, number: int, start: int = 0) -> Generator[DomainBatch]:
        """A batch of each domain, until every image of all was there. Collective."""
        every = list(self.loaders.values())
        with ExitStack() as stack:
            streams = [stack.enter_context(closing(batches_from(loader, 0))) for loader in every]
            for step in range(max(loader.steps_per_epoch for loader in every)):
                batches = tuple(next(stream) for stream in streams)
                targets = {name: batch.target for name, batch in zip(self.loaders, batches, strict=True)}
                counted = tuple(step < loader.steps_per_epoch for loader in every)
                yield replace(together(batches, targets), counted=counted)


def batches_from(loader: Loader, begun: int) -> Generator[Batch]:
    """The batches of a loader without end, one epoch after the other, from its batch of that number on."""
    while True:
        epoch, start = divmod(begun, loader.steps_per_epoch)
        yield from loader.epoch(epoch, start)
        begun = (epoch + 1) * loader.steps_per_epoch


def together(batches: Sequence[Batch], target: Any) -> DomainBatch:
    """A batch of each domain as one."""
    first = batches[0]
    names = tuple(name for batch in batches for name in batch.names)
    waited = sum(batch.waited for batch in batches)
    image: tuple[Any, ...] = tuple(batch.image for batch in batches)
    return DomainBatch(image, target, names, waited, first.step, first.indices, first.stored, tuple(batches))

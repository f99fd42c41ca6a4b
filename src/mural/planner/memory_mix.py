"""Mixes: which blocks of a model are kept, computed again, sent to the host, or streamed; each with its peak and time.

A block that is computed again frees memory for seconds of computing, so blocks are taken in the order of bytes per
second: with none of them, with the first, with the first two, … What then still has no room leaves for the host. The
step itself is rehearsed for each, without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mural.cost.hardware import Hardware
from mural.engine.memory_room import HOST_SHARE
from mural.engine.offloaded_updates import TENSORS
from mural.engine.offloading import LEAST
from mural.engine.recompute import block_names
from mural.engine.rehearsal import bytes_kept, rehearsed
from mural.memory.offload.step_trace import StepTrace
from mural.memory.offload.swap_plan import SwapChoice
from mural.plans import Offloaded
from mural.report.words import bytes_in_words

Given = tuple[tuple[int, ...], torch.dtype]
CROWDED = 1.15
"""How much longer steps take that stay within a limit by sending memory to the host: torch's allocator is at its end,
and looks for blocks of other sizes. From `mural bench choice`."""
LATE = 0.3
"""Copies may take so much longer: steps that stay within a limit by sending memory to the host take up to 1.2 times
their predicted seconds (`mural bench choice`)."""


@dataclass(frozen=True)
class Mix:
    """What is done with the blocks of a model, and what that takes.

    `recompute` are blocks that are computed again. With `offload`, activations leave as far as the limit asks for it;
    `moved` bytes go to the host and back. With `optimizer`, what the optimizer keeps leaves, too. `stream` is the tile
    of a streamed step.
    """

    peak: int
    seconds: float
    recompute: tuple[str, ...] = ()
    offload: bool = False
    moved: int = 0
    stream: tuple[int, ...] | None = None
    optimizer: bool = False

    def fits(self, room: float) -> bool:
        """Whether it stays within what tensors may take. A streamed step is sized for that, and then fills the rest."""
        return self.stream is not None or self.peak <= room

    @property
    def kinds(self) -> tuple[Offloaded, ...]:
        """What leaves, as a plan names it."""
        found: list[tuple[bool, Offloaded]] = [(self.offload, "activations"), (self.optimizer, "optimizer")]
        return tuple(kind for leaves, kind in found if leaves)

    def __str__(self) -> str:
        count = len(self.recompute)
        words = [f"{count} block{'s' * (count > 1)} computed again" if count else "everything kept"]
        if self.stream is not None:
            words = [f"streamed in tiles of {' × '.join(map(str, self.stream))}"]
        words += [f"{bytes_in_words(self.moved)} to the host and back"] if self.offload else []
        return ", ".join([*words, *(["the optimizer's numbers on the host"] if self.optimizer else [])])


@dataclass(frozen=True)
class MixQuestion:
    """A step of a model on some hardware, of whose memory it may reserve so many bytes."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    given: Sequence[Given]
    hardware: Hardware
    limit: int
    lower: torch.dtype | None = None
    numbers: float = 1.0
    """How many numbers the optimizer keeps for each of a parameter's."""
    traces: dict[frozenset[str], StepTrace] = field(default_factory=dict[frozenset[str], StepTrace], repr=False)
    """Steps that were rehearsed, by the blocks that they compute again; they do not depend on the limit."""

    @property
    def room(self) -> float:
        """The bytes that tensors may take."""
        return TENSORS * self.limit

    @property
    def host_room(self) -> float:
        """The bytes of the host that may be taken."""
        return HOST_SHARE * self.hardware.host_memory

    @property
    def least(self) -> int:
        """The bytes of the smallest block that leaves, as steps on that device have it."""
        return LEAST[self.hardware.kind]

    @cached_property
    def kept_numbers(self) -> int:
        """The bytes of what the optimizer keeps."""
        return bytes_kept(self.model, self.numbers)

    @property
    def travel(self) -> float:
        """The seconds that what the optimizer keeps is on its way, out and back at once."""
        return self.kept_numbers / self.hardware.host.bandwidth

    def beside_numbers(self, mix: Mix) -> Mix:
        """A streamed mix with what the optimizer keeps: on the device, unless that exceeds the limit, as such a step
        fills what it finds.
        """
        if mix.peak + self.kept_numbers <= self.limit or self.kept_numbers < self.least:
            return replace(mix, peak=mix.peak + self.kept_numbers)
        return replace(mix, seconds=mix.seconds + self.travel, optimizer=True)

    def late(self, mix: Mix) -> float:
        """The seconds of a mix if its copies come late."""
        moved = mix.moved + (self.kept_numbers if mix.optimizer else 0)
        return mix.seconds + LATE * moved / self.hardware.host.bandwidth

    def trace(self, recompute: Sequence[str] = ()) -> StepTrace:
        """The step with these blocks computed again."""
        found = self.traces.get(frozenset(recompute))
        if found is None:
            found = self.traces[frozenset(recompute)] = rehearsed(
                self.model, self.loss, self.given, hardware=self.hardware, recompute=tuple(recompute),
                lower=self.lower, numbers=self.numbers, least=self.least,
            )  # fmt: skip
        return found

    def ranked_blocks(self, kept: StepTrace) -> list[str]:
        """The blocks, those first that free most for each second.

        One that needs more than there is while it is computed again, whatever leaves, is not among them.
        """
        worth: dict[str, float] = {}
        for name in block_names(self.model):
            one = self.trace([name])
            more = max(sum(one.seconds) - sum(kept.seconds), 1e-6)
            if self.swaps(one).everything().peak <= self.room:
                worth[name] = (saved_bytes(kept) - saved_bytes(one)) / more
        return sorted((name for name in worth if worth[name] > 0), key=lambda name: -worth[name])

    def mixes(self) -> Iterator[Mix]:
        """The mixes, beginning with all that is kept; if that fits, there are no others."""
        kept = self.trace()
        yield from self._of(kept, ())
        if max(kept.bytes) > self.room:
            ranked = self.ranked_blocks(kept)
            for count in range(1, len(ranked) + 1):
                yield from self._of(self.trace(ranked[:count]), tuple(ranked[:count]))

    def swaps(self, trace: StepTrace) -> SwapChoice:
        """The question what of a step leaves."""
        return SwapChoice(trace.leaving(), {"activations"}, self.hardware.host.bandwidth, self.least, self.host_room)

    def _of(self, trace: StepTrace, recompute: tuple[str, ...]) -> Iterator[Mix]:
        """The mixes with these blocks: as it is, and with as much sent to the host as it takes."""
        yield from self._kept_or_sent(trace, Mix(max(trace.bytes), sum(trace.seconds), recompute))
        if max(trace.bytes) > self.room and self.kept_numbers >= self.least:
            there = replace(trace, bytes=tuple(size - self.kept_numbers for size in trace.bytes))
            plain = Mix(max(there.bytes), sum(trace.seconds) + self.travel, recompute, optimizer=True)
            yield from self._kept_or_sent(there, plain, self.travel)

    def _kept_or_sent(self, trace: StepTrace, plain: Mix, travel: float = 0.0) -> Iterator[Mix]:
        """A mix that keeps activations; if they do not fit, one that sends some of them to the host, too."""
        yield plain
        if plain.peak > self.room:
            plan = self.swaps(trace).eased(self.room)
            seconds = CROWDED * plan.seconds + travel
            yield replace(plain, peak=plan.peak, seconds=seconds, offload=True, moved=plan.moved[0])


def saved_bytes(trace: StepTrace) -> int:
    """The bytes that forward saves for backward."""
    return sum(memory.size for memory in trace.memory if memory.kind == "activations")

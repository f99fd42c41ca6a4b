"""Peak memory of a model or of a stage of it: a walk over its calls, forward and then backward, without running it.

    forward    a call makes its outputs; a tensor goes when its last reader is done, unless backward keeps it
    backward   in reverse: a call makes gradients, then what it kept goes, and the gradients that came in; a tensor
               that several calls read gets the sum of their gradients, added up as they come

Shared memory counts once. Sizes are rounded as the device's allocator does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mural.cost.ledger import Ledger
from mural.cost.memory_effects import Effect, Made
from mural.cost.memory_tally import ROUNDED
from mural.graph import Graph, Node
from mural.graph.nodes import Place, Value, needed_by


@dataclass(frozen=True)
class Peak:
    """The peak of a step in bytes, where it was, and what is there before and after.

    `state` is parameters, buffers and the optimizer's numbers; `kept` is what forward leaves for backward.
    """

    bytes: int
    site: str
    phase: str
    state: int
    kept: int
    gradients: int


@dataclass(frozen=True)
class Walk:
    """A stage, as the walk needs it: nodes `start` to `stop` - 1 of a graph, and the effects of all its nodes."""

    graph: Graph
    effects: Sequence[Effect]
    wanted: Collection[Place]
    start: int
    stop: int
    workspace: Callable[[Node, str], int]
    device: str = "cuda"
    adds_in_place: bool = True
    """Whether autograd adds a gradient to one that nobody else holds; while a dispatch mode watches, it does not."""

    def peak(
        self, training: bool = True, optimizer: float = 0.0, early: bool = False, accumulates: bool = False
    ) -> Peak:
        """The peak of one step, on one micro-batch.

        `optimizer` is how many numbers it keeps for each parameter (Adam 2, momentum 1). Without `training`, nothing
        is kept. `early` says that the gradients of the outputs are there before forward, `accumulates` that those of
        the parameters are, from an earlier micro-batch: they are part of the state, and what backward makes is added.
        """
        step = StepWalk(self, training, accumulates)
        state = step.enter_state(optimizer)
        if early:
            step.enter_gradients()
        step.forward()
        step.leave_forward()
        kept = step.ledger.live - state
        if training:
            step.backward()
        ledger = step.ledger
        return Peak(ledger.peak, *ledger.where, state=state, kept=kept, gradients=step.gradient_bytes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the stage."""
        return self.graph.nodes[self.start : self.stop]


class StepWalk:
    """The walk over one step."""

    def __init__(self, walk: Walk, training: bool = True, accumulates: bool = False) -> None:
        self.walk, self.training, self.accumulates, self.ledger = walk, training, accumulates, Ledger()
        self.rounded = ROUNDED[walk.device]
        self.memory: dict[Place, int | None] = {}
        self.coming: dict[Place, int] = {}
        self.kept: dict[int, list[int | None]] = {}
        self.expected: Counter[Place] = Counter()
        self.gradient_bytes = 0
        made = {place for node in walk.nodes for place in node.makes}
        # What is read from outside is an input of the stage; what is read later, or returned, is an output.
        self.outside = {read for node in walk.nodes for read in node.reads} - made
        self.ends = {place for place in made if walk.graph.last_reads.get(place, -1) >= walk.stop}
        # What nothing reads later gets no gradient: what it kept goes with the last tensor of forward.
        self.needed = needed_by({int(at[0]) for at in self.ends}, walk.nodes)

    def enter_state(self, optimizer: float) -> int:
        """Bytes of parameters, buffers, constants and the optimizer's numbers; then the inputs are there too."""
        inputs: list[Place] = []
        for at in self.outside:
            size = self.state_at(at, optimizer)
            self.memory[at] = None  # never goes
            self.ledger.live += size
            if not size:
                inputs.append(at)
        self.ledger.live += sum(map(self.counters_at, self.walk.nodes))
        state = self.ledger.live
        for at in inputs:
            self.memory[at] = self.ledger.make(self.bytes_at(at))
            self.ledger.hold(self.memory[at])
        return state

    def state_at(self, at: Place, optimizer: float) -> int:
        """The bytes of a parameter or buffer with all that is kept for it; 0 for a tensor that is an input."""
        value = self.walk.graph.given[at[0]] if isinstance(at[0], str) else None
        if value is None or value.role == "input":
            return 0
        size = self.size_of(value)
        gradient = size if self.accumulates and at in self.walk.wanted else 0
        return size + gradient + int(optimizer * size * (value.role == "parameter"))

    def counters_at(self, node: Node) -> int:
        """The bytes of buffers that no call reads, as the number of batches, where they change."""
        return sum(
            self.rounded(size) for call in self.walk.graph.effects_at.get(node.id, ()) for size in sizes_of(call)
        )

    def size_of(self, value: Value) -> int:
        """The bytes of a parameter, buffer or input."""
        return self.rounded(product(value.shape) * value.dtype.itemsize)

    def bytes_at(self, at: Place) -> int:
        """The bytes of a tensor of the graph."""
        source, pick = at
        if not isinstance(source, int):
            return self.size_of(self.walk.graph.given[source])
        node = self.walk.graph.nodes[source]
        return self.rounded(product(node.output_shapes[pick]) * node.dtypes[pick].itemsize)

    def forward(self) -> None:
        """Run all calls; what is no longer read is freed, unless backward keeps it."""
        last: dict[Place, int] = {}
        for node in self.walk.nodes:
            last |= {(node.id, pick): node.id for pick in range(len(node.output_shapes))}
            last |= dict.fromkeys(node.reads, node.id)
        for at, moment in self.walk.graph.passed:
            if at in last:
                last[at] = max(last[at], min(moment, self.walk.stop - 1))
        going: dict[int, list[Place]] = {}
        for at, moment in last.items():
            if at not in self.ends and at not in self.outside:
                going.setdefault(moment, []).append(at)
        for node in self.walk.nodes:
            self.forward_node(node)
            for at in going.get(node.id, ()):
                self.ledger.drop(self.memory[at])

    def forward_node(self, node: Node) -> None:
        """Make the outputs of a call, and hold what its backward will need."""
        ledger, effect, inputs = self.ledger, self.walk.effects[node.id].forward, node.reads
        ledger.touch(effect.peak + self.walk.workspace(node, "forward"), node.site, "forward")
        for pick, made in enumerate(effect.outputs):
            if made.shares is None:
                memory = ledger.make(made.bytes)
            elif made.shares < 0:
                memory = self.memory[node.id, -1 - made.shares]
            else:
                memory = self.memory[inputs[made.shares]]
            self.memory[node.id, pick] = memory
            ledger.hold(memory)
        if self.training:
            kept = [self.memory[inputs[place]] for place in effect.keeps]
            kept += [self.memory[node.id, place] for place in effect.holds]
            if effect.inside:
                kept.append(ledger.make(effect.inside))
            for memory in kept:
                ledger.hold(memory)
            self.kept[node.id] = kept
        ledger.touch(0, node.site, "forward")

    def leave_forward(self) -> None:
        """Release what was kept by calls whose results nobody reads."""
        for number in sorted(self.kept.keys() - self.needed):
            for memory in self.kept.pop(number):
                self.ledger.drop(memory)

    def backward(self) -> None:
        """Run the backward of all calls that gradients reach, in reverse."""
        self.enter_gradients()
        self.ledger.touch(0, "", "backward")
        for node in self.walk.nodes:
            effect = self.walk.effects[node.id].backward
            if effect is not None and node.id in self.needed:
                gradients = zip(node.reads, effect.gradients, strict=True)
                self.expected.update(at for at, gradient in gradients if gradient is not None and at in self.outside)
        for node in reversed(self.walk.nodes):
            self.backward_node(node)

    def enter_gradients(self) -> None:
        """Let the gradients of the outputs be there, unless they are."""
        for at in self.ends:
            if at in self.walk.wanted and at not in self.coming:
                self.coming[at] = self.ledger.make(self.bytes_at(at))
                self.ledger.hold(self.coming[at])
                self.ledger.hold(self.coming[at])  # the caller has it too

    def backward_node(self, node: Node) -> None:
        """Make the gradients of a call's inputs, then release what came in and what was kept."""
        effect, ledger = self.walk.effects[node.id].backward, self.ledger
        mine = [self.coming.pop((node.id, pick), None) for pick in range(len(node.output_shapes))]
        if effect is None or all(memory is None for memory in mine):
            return
        ledger.touch(effect.peak + self.walk.workspace(node, "backward"), node.site, "backward")
        made: dict[int, int] = {}
        for place, gradient in enumerate(effect.gradients):
            if gradient is not None:
                made[place] = self.memory_of(gradient, mine, made)
                ledger.hold(made[place])
        for memory in (*mine, *self.kept.pop(node.id, ())):
            ledger.drop(memory)
        for place, memory in made.items():
            self.deliver(node.reads[place], memory)
        ledger.touch(0, node.site, "backward")

    def memory_of(self, gradient: Made, mine: Sequence[int | None], made: dict[int, int]) -> int:
        """The memory of a gradient: its own, that of a gradient that came in, or that of another input's."""
        if gradient.shares is None:
            return self.ledger.make(gradient.bytes)
        found = made[-1 - gradient.shares] if gradient.shares < 0 else mine[gradient.shares]
        return self.ledger.make(gradient.bytes) if found is None else found

    def deliver(self, at: Place, memory: int) -> None:
        """Add a gradient, which is held once for this, to what came before for the same tensor."""
        ledger, before, whole = self.ledger, self.coming.get(at), self.bytes_at(at)
        if before is None:
            self.coming[at] = memory
        elif self.walk.adds_in_place and ledger.alone(before) and ledger.size(before) == whole:
            ledger.drop(memory)
        else:
            self.replace(at, whole)
            ledger.drop(memory)
        if at in self.outside:
            self.expected[at] -= 1
            if not self.expected[at]:
                self.settle(at, whole)

    def replace(self, at: Place, whole: int) -> None:
        """Put the gradient of a tensor into memory of its own."""
        before = self.coming[at]
        self.coming[at] = self.ledger.make(whole)
        self.ledger.hold(self.coming[at])
        self.ledger.touch(0, "", "backward")
        self.ledger.drop(before)

    def settle(self, at: Place, whole: int) -> None:
        """Leave the gradient of a parameter or an input; one that shares memory with others is copied."""
        self.gradient_bytes += whole
        if self.accumulates and self.memory[at] is None:  # a parameter: it is added to what is there
            self.ledger.drop(self.coming.pop(at))
        elif not self.ledger.alone(self.coming[at]) or self.ledger.size(self.coming[at]) != whole:
            self.replace(at, whole)


def sizes_of(node: Node) -> list[int]:
    """The bytes of each tensor that a call makes."""
    return [product(shape) * dtype.itemsize for shape, dtype in zip(node.output_shapes, node.dtypes, strict=True)]


def product(shape: Sequence[int]) -> int:
    """How many values a shape has."""
    count = 1
    for extent in shape:
        count *= extent
    return count

"""A stretch of a captured forward pass, run again: real modules where all of one lies inside, single calls elsewhere.

    model ─┬─ stem ──────────── whole: the module itself is called
           ├─ layer1 ─┬─ block0 whole
           │          └─ block1 ─┬─ conv1 whole          ── the stretch ends inside of block1,
           │                     ├─ relu call            ── so its first calls are run one by one
           ┈                     ┈

A module that takes or leaves tensors past its arguments and results (through attributes) is never called as a whole.
What ran without gradients although it read values that have some, as under `no_grad`, does so again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mural.errors import PlanError
from mural.graph.nodes import Graph, Node, Ref, Source
from mural.graph.sites import At, Call

Key = tuple[Source, int]
"""A tensor of the graph: who made it, and which of its outputs it is."""
META = torch.device("meta")


@dataclass(frozen=True)
class Step:
    """One call of a replay, and the tensors that nobody needs after it."""

    run: Node | Call
    reads: tuple[Key, ...]
    makes: tuple[Key, ...]
    frees: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Stretch:
    """The calls of the nodes from `start` to `stop` - 1: what they take from outside, do, and give to others.

    `copies` are tensors from outside that a call writes to: it writes to a copy. `opened` are the paths of modules that
    are not called themselves, the model's first.
    """

    start: int
    stop: int
    takes: tuple[Key, ...]
    gives: tuple[Key, ...]
    copies: tuple[Key, ...]
    steps: tuple[Step, ...]
    opened: tuple[str, ...] = ()


def keys_in(tree: Any) -> tuple[Key, ...]:
    """The tensors among what a module was given or gave back."""
    return tuple((at.source, at.pick) for at in pytree.tree_leaves(tree) if isinstance(at, At))


def reads_of(node: Node) -> tuple[Key, ...]:
    """The tensors that a call takes."""
    return tuple(zip(node.inputs, node.picks, strict=True))


class Compiler:
    """Makes stretches of one graph."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.own = {value.name for value in graph.parameters}
        """Names of what the model holds itself."""
        self.readers: dict[Key, list[int]] = {}
        for node in graph:
            for key in reads_of(node):
                self.readers.setdefault(key, []).append(node.id)
        for before, node in graph.effects:
            for key in reads_of(node):
                self.readers.setdefault(key, []).append(before)
        for call in graph.calls:
            for key in keys_in((call.args, dict(call.kwargs))) if call.start == call.stop else ():
                self.readers.setdefault(key, []).append(call.start)
        for value in graph.outputs:
            self.readers.setdefault((value.source, value.pick), []).append(len(graph))
        self.inside: dict[int, list[tuple[int, int, Node | Call]]] = {}
        for index, call in enumerate(graph.calls):
            if call.parent is not None:
                self.inside.setdefault(call.parent, []).append((call.start, index, call))
        for node in graph:
            self.inside.setdefault(node.call, []).append((node.id, len(graph.calls), node))
        for before, node in graph.effects:
            self.inside.setdefault(node.call, []).append((before, -1, node))
        for items in self.inside.values():
            items.sort(key=lambda item: item[:2])
        self.closed = [self._closed(call) for call in graph.calls]

    def _closed(self, call: Call) -> bool:
        """Whether all that a module takes and leaves are its arguments and results."""
        if not call.sealed:
            return False
        given, back = set(keys_in((call.args, dict(call.kwargs)))), set(keys_in(call.outputs))
        nodes = self.graph.nodes[call.start : call.stop]
        taken = {key for node in nodes for key in reads_of(node) if self._outside(key, call.start)}
        made = [(node.id, pick) for node in nodes for pick in range(len(node.output_shapes))]
        left = {key for key in made if any(reader >= call.stop for reader in self.readers.get(key, ()))}
        return taken <= given and left <= back

    def _outside(self, key: Key, start: int) -> bool:
        """Whether a tensor was there before a node, and is not the model's own."""
        source = key[0]
        return source < start if isinstance(source, int) else source not in self.own

    def stretch(self, start: int, stop: int) -> Stretch:
        """The calls from one node to another."""
        opened: dict[str, None] = {}
        steps = list(self._steps(0, start, stop, opened))
        made = {(n.id, pick) for n in self.graph.nodes[start:stop] for pick in range(len(n.output_shapes))}
        wanted = [key for step in steps for key in step.reads]
        gives = [key for key in sorted(made) if any(r >= stop for r in self.readers.get(key, ()))]  # type: ignore[type-var]
        last = stop == len(self.graph)
        if last:  # what earlier stretches leave for the model's result
            wanted += [(v.source, v.pick) for v in self.graph.outputs]
            gives = []
        takes = tuple(dict.fromkeys(key for key in wanted if self._outside(key, start)))
        written = {s for node in self.graph.nodes[start:stop] for s in node.writes}
        results = {(v.source, v.pick) for v in self.graph.outputs} if last else set[Key]()
        return Stretch(
            start,
            stop,
            takes,
            tuple(gives),
            tuple(key for key in takes if key[0] in written),
            tuple(freeing(steps, {*gives, *results})),
            tuple(opened),
        )

    def _steps(self, index: int, start: int, stop: int, opened: dict[str, None]) -> Iterable[Step]:
        """The steps of one module call within a stretch; it is noted as opened."""
        last = stop == len(self.graph)
        opened[self.graph.calls[index].module] = None
        for position, child, item in self.inside.get(index, ()):
            if isinstance(item, Node):
                if start <= position < stop or (last and position == stop):
                    makes = tuple((item.id, pick) for pick in range(len(item.output_shapes)))
                    yield Step(item, tuple(k for k in reads_of(item) if not self._held(k)), makes)
                continue
            if self._within(item, start, stop) and self.closed[child]:
                reads = tuple(k for k in dict.fromkeys(keys_in((item.args, dict(item.kwargs)))) if not self._held(k))
                yield Step(item, reads, keys_in(item.outputs))
            elif self._within(item, start, stop) or (item.start < stop and item.stop > start):
                yield from self._steps(child, start, stop, opened)

    def _within(self, call: Call, start: int, stop: int) -> bool:
        """Whether all of a module's call lies in a stretch; one without nodes runs before the node that follows."""
        if call.start == call.stop:
            return start <= call.start < stop or call.start == stop == len(self.graph)
        return start <= call.start and call.stop <= stop

    def _held(self, key: Key) -> bool:
        return isinstance(key[0], str) and key[0] in self.own


def freeing(steps: Sequence[Step], kept: set[Key]) -> list[Step]:
    """The steps, each with the tensors that no later step reads."""
    needed = set(kept)
    found: list[Step] = []
    for step in reversed(steps):
        used = {*step.reads, *step.makes}
        frees = tuple(key for key in used if key not in needed)
        needed |= used
        found.append(Step(step.run, step.reads, step.makes, frees))
    return found[::-1]


class Replay:
    """Runs a stretch on the model's modules, parameters and buffers as they are now."""

    def __init__(self, graph: Graph, model: nn.Module, stretch: Stretch):
        self.graph, self.model, self.stretch = graph, model, stretch
        self.modules = dict(model.named_modules())
        trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self.stopped = [stopped(step.run, graph, trained) for step in stretch.steps]

    def __call__(self, given: Mapping[Key, Tensor], device: torch.device) -> dict[Key, Tensor]:
        """What the stretch gives, and for the last one what the model's result consists of."""
        values = dict(given)
        for key in self.stretch.copies:
            values[key] = values[key].clone()
        for step, still in zip(self.stretch.steps, self.stopped, strict=True):
            with torch.no_grad() if still else nullcontext():
                if isinstance(step.run, Node):
                    self._call(step.run, values, device)
                else:
                    self._module(step.run, values)
            for key in step.frees:
                values.pop(key, None)
        return values

    def result(self, values: Mapping[Key, Tensor]) -> Any:
        """The model's result, in the form in which the model returns it."""
        return self._filled(self.graph.calls[0].outputs, values)

    def _module(self, call: Call, values: dict[Key, Tensor]) -> None:
        args, kwargs = self._filled((call.args, dict(call.kwargs)), values)
        result = self.modules[call.module](*args, **kwargs)
        wanted, found = pytree.tree_leaves(call.outputs), pytree.tree_leaves(result)
        if len(wanted) != len(found):
            raise PlanError(
                f"module {call.module!r} gave {len(found)} values, but {len(wanted)} when it was captured: its result "
                f"may depend on shapes and training mode alone"
            )
        for at, value in zip(wanted, found, strict=True):
            if not isinstance(at, At):
                continue
            key = (at.source, at.pick)
            if isinstance(at.source, int) and at.source >= call.start:
                values[key] = value
            elif value is not self._value(key, values):
                raise PlanError(
                    f"module {call.module!r} handed on a tensor when it was captured, and gives another one now: a "
                    f"forward hook may look at what such a module is given, but not replace it"
                )

    def _call(self, node: Node, values: dict[Key, Tensor], device: torch.device) -> None:
        tensors = [self._value(key, values) for key in reads_of(node)]

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return tensors[leaf.index]
            return device if isinstance(leaf, torch.device) and leaf == META else leaf

        args, kwargs = pytree.tree_map(filled, (node.args, dict(node.kwargs)))
        if node.func is None:
            raise PlanError(f"{node.site} cannot be run again: the graph was made without its function")
        result = node.func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        made = made or [tensors[i] for i in node.returns]
        for pick, tensor in enumerate(made):
            values[node.id, pick] = tensor

    def _filled(self, tree: Any, values: Mapping[Key, Tensor]) -> Any:
        """A module's arguments or results, with the tensors themselves."""
        return pytree.tree_map(
            lambda leaf: self._value((leaf.source, leaf.pick), values) if isinstance(leaf, At) else leaf, tree
        )

    def _value(self, key: Key, values: Mapping[Key, Tensor]) -> Tensor:
        if key in values:
            return values[key]
        name = key[0]
        if isinstance(name, int):
            site = self.graph.nodes[name].site if name < len(self.graph) else "a call beside the model's dataflow"
            raise PlanError(f"the result of {site} is needed, but no earlier stage gave it: move the cut")
        if name in self.graph.held:
            return self.graph.held[name]
        return attribute(self.model, name)


def check_hooks(model: nn.Module, stretches: Iterable[Stretch]) -> None:
    """Raise for a forward hook that would not be called, as its module is not."""
    opened = {path for stretch in stretches for path in stretch.opened}
    for path, module in model.named_modules():
        if path in opened and (module._forward_hooks or module._forward_pre_hooks):
            raise PlanError(
                f"module {path!r} has a forward hook, but is not called as a whole: its parts lie in several stages, "
                f"or exchange tensors past it. Hang the hook on a module inside of a stage, or move the cut"
            )


def check_result(graph: Graph) -> None:
    """Raise for a result in which tensors may be that the graph does not know."""
    for leaf in pytree.tree_leaves(graph.calls[0].outputs):
        inside = [value for value in getattr(leaf, "__dict__", {}).values() if isinstance(value, Tensor)]
        if inside and not isinstance(leaf, At):
            raise PlanError(
                f"the model returns a {type(leaf).__name__}, whose tensors cannot be seen: return tensors, or tuples, "
                f"lists and dicts of them, or register the class by torch.utils._pytree.register_pytree_node"
            )


def stopped(run: Node | Call, graph: Graph, trained: Container[Source]) -> bool:
    """Whether a call ran without gradients although it read values that have some: parameters, or what calls made."""
    nodes = [run] if isinstance(run, Node) else graph.nodes[run.start : run.stop]
    if any(any(node.gradients) for node in nodes):
        return False
    reads = (key for node in nodes for key in reads_of(node))
    return any(
        source in trained if isinstance(source, str) else source < len(graph) and graph.nodes[source].gradients[pick]
        for source, pick in reads
    )


def attribute(model: nn.Module, name: str) -> Tensor:
    """A parameter, buffer or other tensor that the model holds, by its path; a number is an index."""
    found: Any = model
    for part in name.split("."):
        found = found[int(part)] if isinstance(found, (list, tuple)) else getattr(found, part)
    return found

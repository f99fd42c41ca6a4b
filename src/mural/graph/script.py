"""The script of a model in stages: the calls that its forward makes, each with its stage, as data.

    model ─┬─ stem ──────────── closed: one call, of stage 0
           ├─ layer1 ─┬─ block0 closed, of stage 0
           │          └─ block1 ─┬─ conv1   closed, of stage 0     ── a cut goes through block1 and layer1: they are
           │                     ├─ relu    a bare call, of stage 1   open, and their forward runs on every rank
           ┈                     ┈

A module that takes or leaves tensors other than by its arguments and results (through attributes) is open too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.utils import _pytree as pytree

from mural.graph.nodes import Graph, Node, Source
from mural.graph.sites import At, ModuleCall

Key = tuple[Source, int]
"""A tensor of the graph: who made it, and which of its outputs it is."""


@dataclass(frozen=True)
class ScriptCall:
    """One call outside of closed modules: of a torch function, or of a closed module; its stage, and what it reads.

    `writes` says that a closed module writes to what it is given, in place.
    """

    run: Node | ModuleCall
    stage: int
    reads: tuple[Key, ...]
    writes: bool = False


@dataclass(frozen=True)
class Stretch:
    """The nodes from `start` to `stop` - 1: what their stage takes from others, and gives to them.

    `copies` are tensors from outside that a call writes to: it writes to a copy.
    """

    start: int
    stop: int
    takes: tuple[Key, ...]
    gives: tuple[Key, ...]
    copies: tuple[Key, ...]


@dataclass(frozen=True)
class Script:
    """What the forward of a model does, call by call, and what each stage takes and gives."""

    graph: Graph
    items: tuple[ScriptCall, ...]
    opened: frozenset[str]
    stretches: tuple[Stretch, ...]

    @cached_property
    def called_apart(self) -> frozenset[str]:
        """The closed modules that several stages call."""
        stages: dict[str, set[int]] = {}
        for item in self.items:
            if isinstance(item.run, ModuleCall):
                stages.setdefault(item.run.module, set()).add(item.stage)
        return frozenset(path for path, found in stages.items() if len(found) > 1)


def keys_in(tree: Any) -> tuple[Key, ...]:
    """The tensors among what a module was given or gave back."""
    return tuple((at.source, at.pick) for at in pytree.tree_leaves(tree) if isinstance(at, At))


def reads_of(node: Node) -> tuple[Key, ...]:
    """The tensors that a call takes."""
    return tuple(zip(node.inputs, node.picks, strict=True))


def script_of(graph: Graph, bounds: Sequence[int], held: Mapping[str, frozenset[int]] | None = None) -> Script:
    """The script of a graph whose stage s has the nodes from `bounds[s]` to `bounds[s + 1]` - 1.

    `held` are the stages that hold each parameter and buffer, where that is settled: a module is closed only if its
    stage holds all that is in it, as it may read more of it another time.
    """
    return _Writer(graph, bounds, held or {}).script()


class _Writer:
    """Writes the script of one graph."""

    def __init__(self, graph: Graph, bounds: Sequence[int], held: Mapping[str, frozenset[int]]):
        self.graph, self.bounds = graph, bounds
        self.holders: dict[str, frozenset[int]] = {}  # the stages that hold all that is in a module
        for name, stages in held.items():
            parts = name.split(".")
            for length in range(1, len(parts)):
                path = ".".join(parts[:length])
                self.holders[path] = self.holders.get(path, stages) & stages
        self.inputs = {value.name for value in graph.inputs}
        self.opened: set[str] = set()
        self.readers = readers_of(graph)
        self.inside: dict[int, list[tuple[int, int, Node | ModuleCall]]] = {}
        for index, call in enumerate(graph.calls):
            if call.parent is not None:
                self.inside.setdefault(call.parent, []).append((call.start, index, call))
        for position, node in (*enumerate(graph), *graph.effects):
            self.inside.setdefault(node.call, []).append((position, len(graph.calls), node))
        for items in self.inside.values():  # as they happened: a module's call begins before the node that follows
            items.sort(key=lambda item: (item[2].time, item[1]))

    def script(self) -> Script:
        items = tuple(self._items(0))
        stages = range(len(self.bounds) - 1)
        takes = [self._takes(stage, items) for stage in stages]
        stretches = tuple(self._stretch(stage, takes) for stage in stages)
        return Script(self.graph, items, frozenset(self.opened), stretches)

    def _stage(self, position: int) -> int:
        return bisect_right(self.bounds, min(position, len(self.graph) - 1)) - 1

    def _items(self, index: int) -> Iterable[ScriptCall]:
        """What a call of an open module does."""
        self.opened.add(self.graph.calls[index].module)
        for position, child, item in self.inside.get(index, ()):
            if isinstance(item, Node):
                yield ScriptCall(item, self._stage(position), tuple(k for k in reads_of(item) if not self._held(k)))
                continue
            stage = self._stage(item.start)
            alone = stage == self._stage(max(item.start, item.stop - 1))
            if alone and stage in self.holders.get(item.module, (stage,)) and self._closed(item):
                given = keys_in((item.args, dict(item.kwargs)))
                read = self._read_in(child)
                reads = tuple(k for k in dict.fromkeys(given) if k in read and not self._held(k))
                yield ScriptCall(item, stage, reads, keys_in(item.left) != given)
            else:
                yield from self._items(child)

    def _read_in(self, index: int) -> set[Key]:
        """What the calls in a module read: of the features that a decoder is given it may leave some."""
        found: set[Key] = set()
        for _, child, item in self.inside.get(index, ()):
            found |= set(reads_of(item)) if isinstance(item, Node) else self._read_in(child)
        return found

    def _closed(self, call: ModuleCall) -> bool:
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
        return source < start if isinstance(source, int) else source in self.inputs

    def _held(self, key: Key) -> bool:
        return isinstance(key[0], str) and key[0] not in self.inputs

    def _takes(self, stage: int, items: Sequence[ScriptCall]) -> tuple[Key, ...]:
        """What the calls of a stage read that was there before its first one."""
        wanted = [key for item in items if item.stage == stage for key in item.reads]
        if stage == len(self.bounds) - 2:  # what earlier stretches leave for the model's result
            wanted += [(v.source, v.pick) for v in self.graph.outputs]
        return tuple(dict.fromkeys(key for key in wanted if self._outside(key, self.bounds[stage])))

    def _stretch(self, stage: int, takes: Sequence[tuple[Key, ...]]) -> Stretch:
        start, stop = self.bounds[stage], self.bounds[stage + 1]
        later = {key for taken in takes[stage + 1 :] for key in taken}
        made = [(n.id, pick) for n in self.graph.nodes[start:stop] for pick in range(len(n.output_shapes))]
        written = {s for node in self.graph.nodes[start:stop] for s in node.writes}
        copies = tuple(key for key in takes[stage] if key[0] in written)
        return Stretch(start, stop, takes[stage], tuple(key for key in made if key in later), copies)


def readers_of(graph: Graph) -> dict[Key, list[int]]:
    """Where each tensor is read: at nodes, by calls that do nothing but hand it on, and as a result of the model."""
    readers: dict[Key, list[int]] = {}
    for node in graph:
        for key in reads_of(node):
            readers.setdefault(key, []).append(node.id)
    for before, node in graph.effects:
        for key in reads_of(node):
            readers.setdefault(key, []).append(before)
    for call in graph.calls:
        for key in keys_in((call.args, dict(call.kwargs))) if call.start == call.stop else ():
            readers.setdefault(key, []).append(call.start)
    for value in graph.outputs:
        readers.setdefault((value.source, value.pick), []).append(len(graph))
    return readers

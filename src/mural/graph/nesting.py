"""Nesting: where the modules, units and layers of a graph begin and end, read off the calls of modules.

A unit is looked for by opening modules from the outside. A module that calls others which call others opens if

- it is a `Sequential`, which says nothing but that its children follow each other, or
- each module it calls reads the one before it, and it is called only once in the model (an encoder) or all it calls
  is composite too, three of them or composite inside (a dense block of layers, a stage of transformer blocks).

What does not open is a unit: a residual unit has leaves next to its shortcut, the branches of an Inception module do
not read each other, and neither do those of an AmoebaNet cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from mural.graph.nodes import Graph
from mural.graph.sites import ModuleCall


@dataclass(frozen=True)
class NestedSpan:
    """The nodes from `start` to `stop` - 1 under a name; `calls` are the calls of modules that they are, if any."""

    name: str
    kind: str
    start: int
    stop: int
    calls: tuple[int, ...] = ()


def modules(graph: Graph) -> list[NestedSpan]:
    """The children of the model, or of what it wraps."""
    nesting = Nesting(graph)
    return _stretched(nesting.joined(nesting.listed(nesting.top)), 0, len(graph))


def units(graph: Graph) -> list[NestedSpan]:
    """The units within the model's children."""
    nesting = Nesting(graph)
    return [unit for module in modules(graph) for unit in nesting.opened(module)]


def layers(graph: Graph) -> list[NestedSpan]:
    """The modules that call no other, and the calls of functions outside of these."""
    return Nesting(graph).leaves(0)


class Nesting:
    """The calls of modules as a tree. A call without nodes, as that of an identity, is left out."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.children: dict[int, list[int]] = {i: [] for i in range(len(graph.calls))}
        for i, call in enumerate(graph.calls):
            if call.parent is not None and call.stop > call.start:
                self.children[call.parent].append(i)
        self.times = Counter(call.kind for call in graph.calls if call.stop > call.start)

    @cached_property
    def top(self) -> int:
        """The call whose children are the model's modules: that of the model, or of the one module it wraps."""
        at = 0
        while len(self.children[at]) == 1 and self.children[self.children[at][0]]:
            at = self.children[at][0]
        return at

    def pieces(self, index: int) -> list[NestedSpan]:
        """What happens in a call, in order: calls of modules, and of functions by themselves."""
        call, found = self.graph.calls[index], list[NestedSpan]()
        at = call.start
        for child in self.children[index]:
            inner = self.graph.calls[child]
            found += self._bare(at, inner.start)
            found.append(NestedSpan(inner.label, inner.kind, inner.start, inner.stop, (child,)))
            at = inner.stop
        return found + self._bare(at, call.stop)

    def _bare(self, start: int, stop: int) -> list[NestedSpan]:
        return [NestedSpan(node.site, node.op, node.id, node.id + 1) for node in self.graph.nodes[start:stop]]

    def leaves(self, index: int) -> list[NestedSpan]:
        """The layers in a call."""
        found: list[NestedSpan] = []
        for piece in self.pieces(index):
            inner = [i for i in piece.calls if self.children[i]]
            found += self.leaves(inner[0]) if inner else [piece]
        return found

    def listed(self, index: int) -> list[NestedSpan]:
        """The pieces of a call, with the items of each list that run one after another as one piece."""
        pieces = self.pieces(index)
        owners = [self._list_of(index, piece) for piece in pieces]
        runs: list[tuple[str, list[int]]] = []
        for i, owner in enumerate(owners):
            if not pieces[i].calls:
                continue
            if runs and owner and runs[-1][0] == owner:
                runs[-1][1].append(i)
            else:
                runs.append((owner, [i]))
        times = Counter(owner for owner, _ in runs)
        whole = [at for owner, at in runs if owner and times[owner] == 1 and len(at) > 1]
        if len(runs) == 1:
            return pieces  # a list of everything says nothing
        for at in reversed(whole):
            inside = pieces[at[0] : at[-1] + 1]
            calls = tuple(call for piece in inside for call in piece.calls)
            pieces[at[0] : at[-1] + 1] = [NestedSpan(owners[at[0]], "", inside[0].start, inside[-1].stop, calls)]
        return pieces

    def _list_of(self, index: int, piece: NestedSpan) -> str:
        """The path of the list that a module is in, "" if in none: a list is never called itself."""
        if not piece.calls:
            return ""
        path = self.graph.calls[piece.calls[0]].module
        outer = self.graph.calls[index].module
        prefix = f"{outer}." if outer and path.startswith(f"{outer}.") else ""
        owner = prefix + path.removeprefix(prefix).partition(".")[0]
        return "" if owner == path or any(call.module == owner for call in self.graph.calls) else owner

    def joined(self, pieces: list[NestedSpan]) -> list[NestedSpan]:
        """The pieces, each call of a function in the module before or after it; unchanged if there is no module."""
        if not any(piece.calls for piece in pieces):
            return pieces
        found: list[NestedSpan] = []
        head: int | None = None  # where functions began that belong to the next module
        for piece in pieces:
            if piece.calls:
                found.append(piece if head is None else replace(piece, start=head))
                head = None
            elif head is None and found and self._reads_only(piece.start, found[-1].start):
                found[-1] = replace(found[-1], stop=piece.stop)
            else:
                head = piece.start if head is None else head
        return _stretched(found, found[0].start, pieces[-1].stop)

    def _reads_only(self, node: int, start: int) -> bool:
        """Whether a node reads something, and nothing that was made before `start`."""
        sources = [source for source in self.graph.nodes[node].needs if isinstance(source, int)]
        return bool(sources) and min(sources) >= start

    def opened(self, span: NestedSpan) -> list[NestedSpan]:
        """The units of a span."""
        if len(span.calls) > 1:  # a list: its items, and the functions between them
            inside = [p for p in self.pieces(self._parent(span.calls[0])) if span.start <= p.start < span.stop]
            parts = self.joined(inside)
        elif span.calls and self.opens(span.calls[0]):
            parts = self.joined(self.pieces(span.calls[0]))
        else:
            return [span]
        return _stretched([unit for part in parts for unit in self.opened(part)], span.start, span.stop)

    def _parent(self, index: int) -> int:
        return self.graph.calls[index].parent or 0

    def opens(self, index: int) -> bool:
        """Whether units are to be looked for inside a call."""
        children = self.children[index]
        composite = [child for child in children if self.children[child]]
        kind = self.graph.calls[index].kind
        if not composite or kind == "Sequential":
            return bool(composite)
        repeats = len(children) > 2 or all(self.height(child) > 1 for child in children)
        once = self.times[kind] == 1
        return self.chained(index) and (once or (composite == children and repeats))

    def height(self, index: int) -> int:
        """How many levels of modules are in a call."""
        return 1 + max(map(self.height, self.children[index])) if self.children[index] else 0

    def chained(self, index: int) -> bool:
        """Whether each module that is called reads, perhaps through functions in between, the one before it."""
        calls = [self.graph.calls[child] for child in self.children[index]]
        bare = {piece.start for piece in self.pieces(index) if not piece.calls}
        return all(
            any(before.start <= source < before.stop for source in self._sources(after, bare))
            for before, after in pairwise(calls)
        )

    def _sources(self, call: ModuleCall, bare: Iterable[int]) -> set[int]:
        """What a call reads from outside, followed through the functions around it."""
        bare = set(bare)
        waiting = [node.id for node in self.graph.nodes[call.start : call.stop]]
        found: set[int] = set()
        while waiting:
            for source in self.graph.nodes[waiting.pop()].needs:
                if isinstance(source, int) and source < call.start and source not in found:
                    found.add(source)
                    if source in bare:
                        waiting.append(source)
        return found


def _stretched(spans: list[NestedSpan], start: int, stop: int) -> list[NestedSpan]:
    """The spans with the first from `start` and the last up to `stop`."""
    if not spans:
        return spans
    spans = [replace(spans[0], start=start), *spans[1:]]
    return [*spans[:-1], replace(spans[-1], stop=stop)]

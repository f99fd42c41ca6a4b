"""A model split into modules that run one after the other, each a stretch of the captured forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mural.errors import PlanError
from mural.graph.cut_points import resolve_cuts
from mural.graph.follow import Follower
from mural.graph.module_calls import paths_of
from mural.graph.nodes import Graph
from mural.graph.script import Key, Script, script_of


class StageModule(nn.Module):
    """A stage of a model: takes the tensors named in `takes`, in that order, and gives those in `gives`.

    The last one gives what the model returns. It shares modules, parameters and buffers with the model, and runs for
    inputs of the captured shapes, in the captured training mode.

    >>> from mural.graph import capture
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    >>> first, second = split(capture(model, (1, 3, 8, 8)), model, ["2"])
    >>> first.takes, first.gives, second.takes
    (('input',), ('1',), ('1',))
    >>> image = torch.ones(1, 3, 8, 8)
    >>> bool((second(first(image)) == model(image)).all())
    True
    """

    def __init__(self, model: nn.Module, script: Script, stage: int):
        super().__init__()
        self.__dict__["model"] = model  # not a module of this one: it has parts of it alone
        self.script, self.stage, self.stretch = script, stage, script.stretches[stage]
        stretch = self.stretch
        self.takes = tuple(self._name(key) for key in stretch.takes)
        self.gives = tuple(self._name(key) for key in stretch.gives)

    def _name(self, key: Key) -> str:
        """A tensor's name: an input's own, else its call-site, with its number among several results."""
        source, pick = key
        if isinstance(source, str):
            return source
        node = self.script.graph.nodes[source]
        return node.site if len(node.output_shapes) == 1 else f"{node.site}[{pick}]"

    def forward(self, *given: Tensor) -> Any:
        """The tensors in `gives`: one alone, several as a tuple; the last stage's are the model's result."""
        stretch = self.stretch
        if len(given) != len(self.takes):
            raise PlanError(f"this stage takes {len(self.takes)} tensors {self.takes}, but {len(given)} were given")
        device = next((t.device for t in given), torch.device("cpu"))
        model = self.__dict__["model"]
        follower = Follower(
            self.script, self.stage, dict(zip(stretch.takes, given, strict=True)), device, paths_of(model)
        )
        result = follower.run(model)
        if stretch.stop == len(self.script.graph):
            return result
        found = tuple(follower.made[key] for key in stretch.gives)
        return found[0] if len(found) == 1 else found

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this stage reads, under the names that they have in the model."""
        return self._held(self.__dict__["model"].named_parameters(prefix, recurse, remove_duplicate), prefix)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this stage reads or writes, under the names that they have in the model."""
        return self._held(self.__dict__["model"].named_buffers(prefix, recurse, remove_duplicate), prefix)

    def _held(self, named: Iterator[tuple[str, Any]], prefix: str) -> Iterator[tuple[str, Any]]:
        graph, stretch = self.script.graph, self.stretch
        last = stretch.stop == len(graph)
        nodes = list(graph.nodes[stretch.start : stretch.stop])
        nodes += [n for at, n in graph.effects if stretch.start <= at < stretch.stop or (last and at == stretch.stop)]
        names = {source for node in nodes for source in node.inputs}
        start = f"{prefix}." if prefix else ""
        return ((name, tensor) for name, tensor in named if name.removeprefix(start) in names)

    def train(self, mode: bool = True) -> StageModule:
        """Refused: a stage is that of one training mode."""
        if mode != self.__dict__["model"].training:
            raise PlanError("a stage runs in the mode that was captured: set the model's, and capture it again")
        return self


def split(graph: Graph, model: nn.Module, cuts: Sequence[str | int]) -> tuple[StageModule, ...]:
    """The stages of a model, which begin at these blocks, call-sites or nodes."""
    names = [graph.nodes[cut].site if isinstance(cut, int) else cut for cut in cuts]
    starts = [0, *resolve_cuts(graph, names), len(graph)]
    script = script_of(graph, starts)
    return tuple(StageModule(model, script, stage) for stage in range(len(starts) - 1))

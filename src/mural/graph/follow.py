"""A stage's part of a model's own forward: open modules run as they are, and what other stages do is skipped.

Every rank runs the forward of the open modules (`script.py`) in Python as it is now: its branches, attributes, contexts
and hooks. What happens at each call depends on its stage:

    of this stage     it is made: a closed module is called with all that is in it, a torch function runs
    of another one    it is not: shapes stand for its results, or tensors that were sent here where this stage reads any

The calls have to be those of the script, one after the other. A rehearsal, in which all calls are of other stages, says
whether they still are, before anything is computed or sent; else the model is captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils import _pytree as pytree

from mural.errors import PlanError
from mural.graph.alike import PLAIN, alike, at_of, loose, ref_of, tensors_in
from mural.graph.module_calls import intercepted
from mural.graph.nodes import Node, Ref
from mural.graph.script import Key, Script, ScriptCall
from mural.graph.sites import At, ModuleCall
from mural.graph.without_memory import Absent, AbsentValue
from mural.shard.functions import seeing_functions
from mural.shard.table import KINDS, name_of

HOOKS = frozenset(["register_hook", "register_post_accumulate_grad_hook"])


class Changed(PlanError):
    """The model makes other calls than those that its stages were made of."""


class Unused:
    """The handle of a hook on a tensor of another stage, which registers the hook."""

    def remove(self) -> None:
        """Nothing is registered here."""


class Follower(TorchFunctionMode):
    """Runs the forward of a model as a stage does; without a stage it rehearses, and compares each call.

    `given` are the tensors from other stages, and the model's inputs, as far as this stage takes them, and `paths` the
    paths of the model's modules (`paths_of`). Afterwards `made` has what it gives to others.
    """

    def __init__(
        self,
        script: Script,
        stage: int | None,
        given: Mapping[Key, Tensor],
        device: torch.device,
        paths: Mapping[int, str],
    ):
        super().__init__()
        self.script, self.stage, self.device, self.paths = script, stage, device, paths
        self.here = dict(given)
        self.wanted: frozenset[Key] = frozenset()
        if stage is not None:
            stretch = script.stretches[stage]
            self.wanted = frozenset(stretch.gives)
            self.here |= {key: given[key].clone() for key in stretch.copies}
        self.made: dict[Key, Tensor] = {}
        self.at = 0
        self.inside = False

    def run(self, model: nn.Module) -> Any:
        """What the model returns: tensors where this stage has them, absent ones elsewhere."""
        graph = self.script.graph
        inputs = [Absent((v.name, 0), v.shape, v.dtype, self.device, False) for v in graph.inputs]
        with self._following(), self:
            result = model(*inputs)
        if self.at != len(self.script.items):
            raise self._changed("ends before", "")
        wanted = graph.calls[0].outputs
        if self.stage is None and not alike(wanted, result, at_of):
            raise self._changed("returns something other than", "")
        return self._present(result)

    # -- calls of torch functions -------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.call(func, func, args, kwargs or {})

    def call(self, func: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a function, carried out by `run`."""
        if self.inside:
            return run(*args, **kwargs)
        item = self._next()
        if item is None or not isinstance(item.run, Node) or item.run.func != func:
            return self._beside(func, run, args, kwargs)
        node = item.run
        if self.stage is None and not alike((node.args, dict(node.kwargs)), (args, kwargs), ref_of(node), loose(node)):
            raise self._changed("calls with other arguments", name_of(func))
        self.at += 1
        if item.stage == self.stage:
            return self._made(node, run, args, kwargs)
        return self._passed(node, args, kwargs)

    def _made(self, node: Node, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of this stage."""
        before = tensors_in((args, kwargs)) if any(s is not None for s in node.same) else []
        args, kwargs = self._present((args, kwargs))
        result = self._alone(run, args, kwargs)
        found = tensors_in(result)
        if not found and node.returns:
            found = [tensors_in((args, kwargs))[i] for i in node.returns]
        if len(found) != len(node.output_shapes):
            raise self._changed("gets another number of results from", node.site)
        for pick, tensor in enumerate(found):
            if (node.id, pick) in self.wanted:
                self.made[node.id, pick] = tensor
            old = node.same[pick]
            place = None if old is None else before[old]
            if isinstance(place, Absent):
                place.key = (node.id, pick)
                self.here[place.key] = tensor
        return result

    def _passed(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The result of a call of another stage."""
        before = tensors_in((args, kwargs)) if any(s is not None for s in node.same) else []

        def output(pick: int) -> Tensor:
            old = node.same[pick]
            if old is None:
                return self._absent(node, pick)
            place = before[old]
            if isinstance(place, Absent):
                place.key = (node.id, pick)
            return place

        if isinstance(node.result, Ref):
            return output(node.result.index)
        if not node.result and node.returns:
            for pick in range(len(node.returns)):
                output(pick)
            return node.result
        return pytree.tree_map_only(Ref, lambda ref: output(ref.index), node.result)

    def _absent(self, node: Node, pick: int) -> Absent:
        return Absent((node.id, pick), node.output_shapes[pick], node.dtypes[pick], self.device, flows(node, pick))

    def _beside(self, func: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is not in the script: one that asks for shapes and types, or registers hooks."""
        name = name_of(func).partition(".")[0]
        given = tensors_in((args, kwargs))
        absent = any(isinstance(tensor, Absent) for tensor in given)
        if absent and KINDS.get(name) == "gradient" and name_of(func) != "requires_grad.__get__":
            held = given[0] if not isinstance(given[0], Absent) else self.here.get(given[0].key)
            if name in HOOKS:  # a hook is registered where the tensor is made
                return Unused()
            return given[0] if held is None or name != "grad" else None
        try:
            result = self._alone(run, args, kwargs)
        except AbsentValue as error:
            raise self._changed("makes another call,", name) from error
        if KINDS.get(name) != "gradient" and any(not any(t is g for g in given) for t in tensors_in(result)):
            raise self._changed("makes another call,", name)
        return result

    # -- calls of modules ---------------------------------------------------------------------------------------------

    def module(self, _: nn.Module, path: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a module of the model."""
        item = self._next()
        if item is None or not isinstance(item.run, ModuleCall) or item.run.module != path:
            if path in self.script.opened:
                return plain(*args, **kwargs)
            raise self._changed("calls", path)
        call = item.run
        if self.stage is None and not alike((call.args, dict(call.kwargs)), (args, kwargs), at_of):
            raise self._changed("calls with other arguments", path)
        self.at += 1
        if item.stage != self.stage:
            return self._passed_module(call, args, kwargs, item.writes)
        given = args, kwargs
        args, kwargs = self._present(given)
        result = self._alone(plain, args, kwargs)
        self._take(call, result)
        if item.writes:
            self._rebind(call, given, (args, kwargs))
        return result

    def _rebind(self, call: ModuleCall, given: Any, present: Any) -> None:
        """Absent tensors that a module wrote to in place are their next version from now on."""
        pairs = zip(tensors_in(given), tensors_in(present), call.left, strict=True)
        for absent, tensor, at in pairs:
            if isinstance(absent, Absent) and at is not None and (at.source, at.pick) != absent.key:
                absent.key = (at.source, at.pick)
                if tensor is not absent:
                    self.here[absent.key] = tensor

    def _take(self, call: ModuleCall, result: Any) -> None:
        """Keep what a module of this stage gives to others, and check that it is what they expect."""
        wanted, found = pytree.tree_leaves(call.outputs), pytree.tree_leaves(result)
        if len(wanted) != len(found):
            raise self._changed(f"gets {len(found)} values instead of {len(wanted)} from", call.module)
        nodes = self.script.graph.nodes
        for at, value in zip(wanted, found, strict=True):
            if not isinstance(at, At):
                continue
            if not isinstance(at.source, int) or at.source < call.start or at.source >= len(nodes):
                continue
            shape, dtype = nodes[at.source].output_shapes[at.pick], nodes[at.source].dtypes[at.pick]
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                raise self._changed(f"gets {described(value)} instead of {shape}, {dtype} from", call.module)
            if (at.source, at.pick) in self.wanted:
                self.made[at.source, at.pick] = value

    def _passed_module(self, call: ModuleCall, args: Any, kwargs: Any, writes: bool) -> Any:
        """The result of a closed module of another stage: what it was given and hands on, and absent tensors."""
        given = tensors_in((args, kwargs))
        if writes:
            self._rebind(call, given, given)
        handed = {(at.source, at.pick): x for at, x in zip(call.left, given, strict=True) if at is not None}

        def output(at: Any) -> Any:
            if not isinstance(at, At):
                return at
            key = at.source, at.pick
            if key in handed:
                return handed[key]
            if isinstance(at.source, int):
                return self._absent(self.script.graph.nodes[at.source], at.pick)
            raise self._changed("gets a tensor of the model itself from", call.module)

        return output(call.outputs) if isinstance(call.outputs, At) else pytree.tree_map(output, call.outputs)

    # -- both ---------------------------------------------------------------------------------------------------------

    def _next(self) -> ScriptCall | None:
        return self.script.items[self.at] if self.at < len(self.script.items) else None

    def _present(self, tree: Any) -> Any:
        """The tree with the tensors that were sent here instead of their placeholders."""
        if isinstance(tree, Absent):
            return self.here.get(tree.key, tree)
        kind = type(tree)
        if kind in PLAIN or isinstance(tree, Tensor):
            return tree
        if kind is tuple or kind is list:
            return kind([self._present(leaf) for leaf in tree])
        if kind is dict:
            return {key: self._present(leaf) for key, leaf in tree.items()}
        if pytree.tree_is_leaf(tree):
            return tree
        return pytree.tree_map_only(Absent, lambda leaf: self.here.get(leaf.key, leaf), tree)

    def _alone(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a call gives when it runs without being followed."""
        popped = _get_current_function_mode() is self
        if popped:
            _pop_mode()
        self.inside = self.modules.paused = True
        try:
            return run(*args, **kwargs)
        finally:
            self.inside = self.modules.paused = False
            if popped:
                _push_mode(self)

    @contextmanager
    def _following(self) -> Generator[None]:
        """See the calls of modules, custom Functions and checkpoints while the block runs."""
        generator = checkpoints._checkpoint_without_reentrant_generator

        def function(found: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.call(found.apply, apply, args, kwargs)

        def region(function: Any, *args: Any, **kwargs: Any) -> Any:
            return (
                generator(function, *args, **kwargs) if self.inside else self._region(generator, function, args, kwargs)
            )

        checkpoints._checkpoint_without_reentrant_generator = region
        try:
            with intercepted(self.paths, self.module) as self.modules, seeing_functions(function):
                yield
        finally:
            checkpoints._checkpoint_without_reentrant_generator = generator

    def _region(self, generator: Any, function: Any, args: Any, kwargs: Any) -> Any:
        """A checkpoint in an open module: its region is run again in backward, so all of it has to be one stage's."""
        item, start = self._next(), self.at
        if item is not None and item.stage == self.stage:
            args, kwargs = self._present((args, kwargs))
            inner = generator(function, *args, **kwargs)
        else:
            inner = iter((None,))
        yield next(inner)
        stages = {item.stage for item in self.script.items[start : self.at]}
        if len(stages) > 1:
            raise PlanError(
                f"a cut goes through a region of torch.utils.checkpoint, which is in stages {sorted(stages)}: it is "
                f"run again in backward, and has to be one stage's. Move the cut"
            )
        next(inner, None)

    def _changed(self, what: str, call: str) -> Changed:
        item = self._next()
        expected = "the end" if item is None else item.run.site if isinstance(item.run, Node) else item.run.label
        return Changed(
            f"the model {what} {call or 'what it did'}, where {expected} came when its stages were made: what it calls "
            f"may depend only on shapes, and on what it holds before a step"
        )


def is_followed() -> bool:
    """Whether the calling code belongs to an open module, part of which is in other stages."""
    return isinstance(_get_current_function_mode(), Follower)


def flows(node: Node, pick: int) -> bool:
    """Whether an output has a gradient, as far as this rank would keep one."""
    return node.gradients[pick] and torch.is_grad_enabled() and node.dtypes[pick].is_floating_point


def described(value: Any) -> str:
    """A value in the words of an error."""
    return f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__

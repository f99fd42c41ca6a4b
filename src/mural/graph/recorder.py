"""The recorder: sees each torch call of a forward pass on meta tensors, and notes it as a node."""

from __future__ import annotations

import linecache
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mural.errors import MuralError, ShapeError, UnsupportedOp
from mural.graph.meta_results import KnownResults
from mural.graph.module_calls import ModuleCalls
from mural.graph.nodes import Graph, Node, Ref, Role, Saved, Source, Value, needed_by, reached_from
from mural.graph.origins import Origins, Read, bytes_of, memory_of, state_of
from mural.graph.read_values import KnownValues, Unknown
from mural.graph.side_effects import SideEffects, refusing_inits
from mural.graph.sites import At, sites
from mural.graph.user_lines import OUTSIDE, frames_of_torch, raised_by_torch
from mural.graph.without_memory import META, MOVES, statistics_written, staying, staying_named, twin_of
from mural.shard import functions, scripted
from mural.shard.autocasting import casts
from mural.shard.ops.reduce.losses import check_pair
from mural.shard.table import KINDS, TABLE, name_of

VALUES = frozenset([
    "item", "tolist", "numpy", "equal", "allclose", "__contains__", "__array__",
    "__bool__", "__int__", "__float__", "__complex__", "__index__",
])  # fmt: skip
"""The calls that hand values of a tensor to Python."""
BACKWARD: Callable[..., Any] = torch.autograd.graph._engine_run_backward  # type: ignore[attr-defined]
UNSEEN = torch._C.DisableTorchFunction
"""What the recorder asks tensors itself passes by all modes: they take ten times as long as such a question."""
BELOW = tuple(f"{OUTSIDE[0]}/{name}" for name in ("_refs", "_decomp", "_prims", "_meta_registrations"))
"""Where torch writes an operation out in others, for meta tensors: what calls from there was not seen itself."""


class Called(NamedTuple):
    """A call on meta tensors, its name and the kind of its rule."""

    func: Callable[..., Any]
    name: str
    kind: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder(TorchFunctionMode):
    """Notes the calls that are made while it is active.

    `twins` are the meta tensors that stand in for others, by the `id` of the other; more are added when a call
    brings a tensor with memory. `constants` names the tensors that may come without having been made by a call.
    Python may read the values of `real` tensors, by name; without them, those that are made of numbers alone.
    """

    def __init__(
        self, twins: Mapping[int, Tensor], constants: Mapping[int, str], real: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self._twins = dict(twins)
        self._real = real
        self._constants = constants
        self._kept: list[Tensor] = []  # whose `id` is in `_twins`
        self._origins = Origins()
        self._values: dict[str, Value] = {}
        self._nodes: list[Node] = []
        self._saving: list[Tensor] = []  # what autograd saved in the call that runs
        self._held: dict[str, Tensor] = {}  # constants with memory, by name
        self._outside = torch.is_grad_enabled(), casts()
        self._inside = False  # whether a call runs that is noted as one: what it calls in turn is not
        self.modules = ModuleCalls(self._at, lambda: len(self._nodes))
        self.refused: UnsupportedOp | None = None
        self.effects = SideEffects(twins.values(), self._save, self._where)
        self._writes: Counter[tuple[str, tuple[str, ...]]] | None = None  # of backward, while it is asked for

    def enter_value(self, name: str, tensor: Tensor, role: Role = "constant") -> None:
        """Let a tensor be known by a name; one that has a name already keeps it."""
        if self._origins.read(tensor) is None:
            self._values[name] = Value(name, tuple(tensor.shape), tensor.dtype, name, role=role)
            self._origins.enter(tensor, name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = name_of(func)
        if name in VALUES:
            return self._values_read(name, func, args, kwargs or {})
        kind = KINDS.get(name.partition(".")[0]) if func in TABLE else None
        called = Called(func, name, kind, *self._given(args, kwargs or {}))
        run = (lambda *args, **_: args[0]) if name in MOVES else func
        return self._run(
            called, lambda: run(*staying(name, called.args), **staying_named(name, called.args, called.kwargs))
        )

    def _function(self, function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a custom autograd.Function, which is one node; its gradients are those after `apply`."""
        called = Called(function.apply, function.__name__, functions.KIND, *self._given(args, kwargs))
        return self._run(called, lambda: apply(*called.args, **called.kwargs))

    def _run(self, called: Called, run: Callable[[], Any]) -> Any:
        """The result of a call, which is noted unless it happens inside another."""
        if self._inside:
            return self._result(called, run)
        if torch.is_inference_mode_enabled():
            raise self._refusal(
                f"{called.name} runs in torch.inference_mode, {self._where()}, whose tensors do not tell when they are "
                f"written to: use torch.no_grad"
            )
        if self._writes is not None:
            return self._again(called, run, self._writes)
        self._saving, self._inside = [], True
        try:
            with UNSEEN():
                states = [(tensor, state_of(tensor)) for tensor in tensors_in((called.args, called.kwargs))]
                self.effects.begin_call(called.name, [*called.args, *called.kwargs.values()], len(self._nodes))
            result = self._result(called, run)
            with UNSEEN():
                written = [tensor for tensor, state in states if state_of(tensor) != state]
                for tensor in written:
                    self.effects.write(tensor)
                written += statistics_written(called.func, called.args, called.kwargs)
                self._note(called, [tensor for tensor, _ in states], result, written)
                self.effects.end_call()
        finally:
            self._inside = False
        return result

    def _again(self, called: Called, run: Callable[[], Any], writes: Counter[tuple[str, tuple[str, ...]]]) -> Any:
        """The result of a call in backward, whose writes are counted; a checkpoint may end in it, when it has run."""
        self._inside = True
        with UNSEEN():
            states = [(tensor, state_of(tensor)) for tensor in tensors_in((called.args, called.kwargs))]
        try:
            return self._result(called, run)
        finally:
            self._inside = False
            with UNSEEN():
                written = [tensor for tensor, state in states if state_of(tensor) != state]
                written += statistics_written(called.func, called.args, called.kwargs)
                writes[called.name, names_in(self._owners(written))] += 1

    def _owners(self, written: Sequence[Tensor]) -> tuple[Source, ...]:
        return tuple(dict.fromkeys(source for t in written for source in self._origins.owners(t)))

    def repeat(self, result: Any) -> None:
        """Find out what backward writes to buffers once more: what torch's checkpoint runs again.

        Where nothing in a checkpoint writes, or there is no loss, there is nothing to find out. A call of which it
        cannot be told, because another one writes to the same buffers, has -1 repetitions.
        """
        inside = [node for node in self._nodes if node.again and names_in(node.writes)]
        loss = next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)), None)
        if not inside or loss is None or not loss.requires_grad:
            return
        writes, calls, refused = Counter[tuple[str, tuple[str, ...]]](), [*self.modules.calls], self.refused
        self._writes = writes
        try:
            with UNSEEN():
                ones = torch.ones_like(loss)
            # Not torch.autograd.backward, which is a call like others: what it calls in turn would not be seen.
            BACKWARD((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            known = True
        except (RuntimeError, MuralError):
            known = False
        finally:
            self._writes, self.modules.calls[:], self.refused = None, calls, refused
            with UNSEEN():
                self.effects.forget()
        alike = Counter((node.op, names_in(node.writes)) for node in self._nodes)
        for node in inside:
            key = node.op, names_in(node.writes)
            clear = known and (alike[key] == 1 or not writes[key])
            self._nodes[node.id] = replace(node, repeated=writes[key] if clear else -1)

    def _result(self, called: Called, run: Callable[[], Any]) -> Any:
        if called.kind == "loss":
            check_pair(called.name, called.args, called.kwargs)
        try:
            return run()
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, NotImplementedError) or "meta tensors" in str(error):
                raise self._value_needed(called.name) from error
            if isinstance(error, MuralError):
                raise
            shapes = [tuple(tensor.shape) for tensor in tensors_in((called.args, called.kwargs))]
            raise ShapeError(f"{called.name} of shapes {shapes}: {str(error).splitlines()[0]}") from error

    def _note(self, called: Called, read: list[Tensor], result: Any, written: list[Tensor]) -> None:
        """Add a node for a call that made or wrote tensors; a call that only asks for something adds none."""
        made = tensors_in(result)
        returns = () if made else tuple(next(i for i, t in enumerate(read) if t is tensor) for tensor in written)
        made = made or written
        name = called.name
        if not made or called.kind == "gradient":
            return
        number, call = len(self._nodes), self.modules.innermost
        reads = [self._read(tensor, name) for tensor in read]
        node = Node(
            id=number,
            site="",
            op=name,
            kind=called.kind,
            module=self.modules.calls[call].module,
            inputs=tuple(r.source for r in reads),
            picks=tuple(r.pick for r in reads),
            after=tuple(sorted({node for r in reads for node in r.after})),
            input_shapes=tuple(tuple(tensor.shape) for tensor in read),
            output_shapes=tuple(tuple(tensor.shape) for tensor in made),
            dtypes=tuple(tensor.dtype for tensor in made),
            input_dtypes=tuple(tensor.dtype for tensor in read),
            gradients=tuple(tensor.requires_grad for tensor in made),
            writes=self._owners(written),
            call=call,
            returns=returns,
            func=called.func,
            args=with_refs(called.args, count := Counter(refs=0)),
            kwargs=with_refs(called.kwargs, count),
            result=with_refs(result, Counter(refs=0)),
            same=tuple(next((i for i, t in enumerate(read) if t is tensor), None) for tensor in made),
            detached=self._outside[0] and not torch.is_grad_enabled(),
            casts=tuple(each for each in casts() if each not in self._outside[1]),
            again=self.effects.again,
        )
        for tensor in written:
            self._origins.write(tensor, number)
        for pick, tensor in enumerate(made):
            self._origins.enter(tensor, number, pick)
        self._nodes.append(replace(node, saved=tuple(map(self._saved, self._saving))))

    def _save(self, tensor: Tensor) -> Tensor:
        self._saving.append(tensor)
        self.effects.saving.append(tensor)
        return tensor

    def _saved(self, tensor: Tensor) -> Saved:
        owners = self._origins.owners(tensor)
        if not owners:
            self._kept.append(tensor)  # so that no other memory gets its number
        return Saved(memory_of(tensor), bytes_of(tensor), owners[0] if owners else None)

    @contextmanager
    def watching(self, model: nn.Module) -> Generator[None]:
        """Record what the model does; raise what was refused, even if it was caught."""
        saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        try:
            watching = (
                scripted.refusing_compiled(self._compiled),
                functions.seeing_functions(self._function, self.effects.function),
                refusing_inits(self._value_needed),
            )
            with (
                KnownResults(),
                self.modules.following(model),
                META,
                saving,
                self,
                watching[0],
                watching[1],
                watching[2],
            ):
                yield
        except Exception as error:
            if self.refused is None and raised_by_torch(error):
                first = str(error).splitlines()[0]
                refusal = UnsupportedOp(
                    f"while the calls of the model were recorded, torch raised: {first} The model may run without a "
                    f"plan, but what it does there cannot be seen"
                )
                raise refusal.with_traceback(error.__traceback__) from error  # which says in which layer
            if self.refused is None or error is self.refused:
                raise
            raise self.refused from error
        if self.refused is not None:
            raise self.refused

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a call, without memory."""
        with UNSEEN():
            return pytree.tree_map_only(Tensor, self._on_meta, (args, kwargs))

    def _on_meta(self, tensor: Tensor) -> Tensor:
        """The tensor that stands in for this one: itself if it has no memory."""
        twin = self._twins.get(id(tensor))
        if twin is None and tensor.is_meta:
            return tensor
        if twin is None:
            twin = self._twins[id(tensor)] = twin_of(tensor)
            name = self._constants.get(id(tensor), f"constant:{len(self._held) + 1}")
            self._held[name] = tensor
            self.enter_value(name, twin)
        return twin

    def _at(self, tensor: Tensor) -> At | None:
        """Where a tensor that a module is given or gives back comes from."""
        with UNSEEN():
            read = self._origins.read(self._on_meta(tensor))
        return None if read is None else At(read.source, read.pick, read.after)

    def _read(self, tensor: Tensor, name: str) -> Read:
        """Where a tensor comes from; one that came from nowhere raises, so that no edge is lost."""
        if self._origins.read(tensor) is None and id(tensor) in self._constants:
            self.enter_value(self._constants[id(tensor)], tensor)
        read = self._origins.read(tensor)
        if read is None or any(frame.f_code.co_filename.startswith(BELOW) for frame in frames_of_torch()):
            raise self._refusal(
                f"{name} of a tensor of shape {tuple(tensor.shape)} comes after a call that was not seen, "
                f"{self._where()}: torch.jit or a C++ operator made it. Capture the model in plain Python"
            )
        return read

    def _values_read(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call hands to Python, if no image reaches the tensors that it is asked of."""
        constants = {} if self._real is None else self._held
        known = KnownValues(self._nodes, {**constants, **(self._real or {})})
        try:
            with UNSEEN():
                given = pytree.tree_map_only(
                    Tensor, lambda tensor: known.of(self._origins.read(self._on_meta(tensor))), (args, kwargs)
                )
                return func(*given[0], **given[1])
        except Unknown:
            raise self._value_needed(name) from None

    def _value_needed(self, name: str) -> UnsupportedOp:
        return self._refusal(
            f"{name} needs the values of a tensor, but a model is captured on shapes alone, {self._where()}. "
            f"Decide on shapes, or compute both sides and choose by torch.where"
        )

    def _compiled(self, why: str) -> UnsupportedOp:
        return self._refusal(f"{why} ({self._where()})")

    def _refusal(self, message: str) -> UnsupportedOp:
        """An error that is raised in the end even if the model, or torch's own C++, catches it."""
        self.refused = self.refused or UnsupportedOp(message)
        return self.refused

    def _where(self) -> str:
        """The user's line that is running, and its module."""
        *_, frame = frames_of_torch()
        file, line = frame.f_code.co_filename, frame.f_lineno
        module = self.modules.calls[self.modules.innermost].label
        inside = f" in module {module!r}" if module else ""
        return f"at {file}:{line}{inside}: `{linecache.getline(file, line).strip()}`"

    def made_of(self, inputs: Sequence[str], tensor: Tensor) -> bool:
        """Whether a tensor depends on inputs, or on what calls wrote to."""
        names: set[Source] = {*inputs, *(source for node in self._nodes for source in node.writes)}
        read = self._origins.read(tensor)
        reached = names | reached_from(names, self._nodes)
        return read is not None and any(source in reached for source in (read.source, *read.after))

    @property
    def operations(self) -> list[str]:
        """The calls so far, by the names of their operations."""
        return [node.op for node in self._nodes]

    def graph(self, inputs: Sequence[str], result: Any) -> Graph:
        """What was recorded.

        A call on parameters alone stays only if something reads it: counting batches is not part of the dataflow.
        """
        leaves = pytree.tree_flatten_with_path(result)[0]
        outputs = [self._output(pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
        self.modules.end(0, result)
        self.effects.end()
        ends = {source for output in outputs for source in (output.source, *output.after) if isinstance(source, int)}
        kept = sorted(needed_by(reached_from(set(inputs), self._nodes) | ends, self._nodes))
        beside = sorted(set(range(len(self._nodes))) - set(kept))
        new = {old: i for i, old in enumerate([*kept, *beside])}
        calls = self.modules.renumbered(kept, new)
        names = sites([(self._nodes[i].call, self._nodes[i].op) for i in kept], calls)

        def renumbered(sources: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(new.get(source, source) for source in sources)

        def final(old: int, site: str = "") -> Node:
            node = self._nodes[old]
            saved = tuple(replace(s, owner=renumbered([s.owner])[0]) for s in node.saved)
            moved = {name: renumbered(getattr(node, name)) for name in ("inputs", "after", "writes")}
            return replace(node, id=new[old], site=site, saved=saved, time=old, **moved)

        nodes = tuple(map(final, kept, names))
        used = {source for node in nodes for source in node.inputs} | {output.source for output in outputs}
        return Graph(
            nodes=nodes,
            inputs=tuple(self._values[name] for name in inputs),
            parameters=tuple(v for name, v in self._values.items() if name in used and name not in inputs),
            outputs=tuple(replace(o, source=renumbered([o.source])[0], after=renumbered(o.after)) for o in outputs),
            calls=calls,
            effects=tuple((bisect_left(kept, old), final(old)) for old in beside),
            held=self._held,
            besides=tuple(self.effects.found),
            reseeded=self.effects.reseeded,
        )

    def _output(self, key: str, tensor: Tensor) -> Value:
        read = self._read(self._on_meta(tensor), "the output")
        return Value(f"output{key}", tuple(tensor.shape), tensor.dtype, read.source, read.pick, read.after, "output")


def names_in(sources: Sequence[Source]) -> tuple[str, ...]:
    """The names among sources: inputs, parameters and buffers."""
    return tuple(source for source in sources if isinstance(source, str))


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the arguments or results of a call."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def with_refs(tree: Any, count: Counter[str]) -> Any:
    """The arguments of a call with a `Ref` for each tensor, numbered on from a count."""

    def ref(_: Tensor) -> Ref:
        count["refs"] += 1
        return Ref(count["refs"] - 1)

    return pytree.tree_map_only(Tensor, ref, tree)

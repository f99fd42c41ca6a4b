"""The runner: carries out a seat's list of actions, with messages concurrent with the computation.

receive   make buffers and post what the other seat's ranks will send
forward   wait for what the stage takes, run it, keep what backward needs
send      begin to send what an action made
backward  wait for the gradients of what the stage gave, run backward, keep the gradients of what it took
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from mural.comm.channels import Channels
from mural.comm.failure.agree import any_rank
from mural.comm.messages import Transfer
from mural.errors import PlanError
from mural.geometry import Box, slices, volume
from mural.graph.script import Key
from mural.pipeline.delivery import HEADER_BYTES, TensorForm, delivery
from mural.pipeline.route import RANDOM
from mural.pipeline.schedule import Action, Work
from mural.pipeline.stage import Stage
from mural.pipeline.transfers import Parcel, Program, Receive, Send, made_by, needed_by
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.shard.generators import generators_kept, random_state, seed_generators, set_random_state
from mural.shard.layout import Layout

Ends = list[tuple[Tensor, Tensor | None]]
"""Tensors that a backward begins with, and their gradients inside backward."""

Name = tuple[Key, int]
"""A tensor that crosses: its value, the seat that makes it."""
Telling = tuple[Name, Work, int]
"""What is sent once: a tensor's form ("forward") or whether it has a gradient, and the seat on the other side."""


class StepJob(Protocol):
    """What one step is about: its inputs, and what happens after the last stage."""

    @property
    def microbatches(self) -> int:
        """How many micro-batches follow each other."""
        ...

    def stage(self, replica: int, stage: int) -> Stage:
        """A stage of a replica on this rank."""
        ...

    def inputs(self, stage: int, microbatch: int) -> Mapping[Key, Tensor]:
        """What a stage takes of the model's inputs."""
        ...

    def arrived(self, microbatch: int, result: Any) -> None:
        """Take the model's result for a micro-batch."""
        ...

    def ends(self, microbatch: int, result: Any) -> Ends:
        """Where the backward of a micro-batch begins."""
        ...


@dataclass(frozen=True)
class Seats:
    """The meshes of all seats, as this rank sees them; `own` is the number of its own, and `aligns` what the cuts of an
    image are multiples of on each.
    """

    meshes: tuple[Mesh, ...]
    own: int
    aligns: tuple[int, ...]

    def ranks(self, seat: int) -> tuple[int, ...]:
        """The ranks of a seat."""
        mesh = self.meshes[seat]
        return mesh.ranks or tuple(range(mesh.world))


@dataclass
class LearnedForms:
    """What was learned of the tensors that cross between stages: their forms.

    By value and the seat that makes it, as replicas may make it on other grids. A form is that of the whole batch.
    """

    forms: dict[Name, TensorForm] = field(default_factory=dict[Name, TensorForm])
    told: set[Telling] = field(default_factory=set[Telling])
    heard: set[Telling] = field(default_factory=set[Telling])
    reached: dict[tuple[Name, int], bool] = field(default_factory=dict[tuple[Name, int], bool])
    """Whether the backward of a seat that uses a tensor reached it: if not, autograd leaves no gradient at all."""
    complete: bool = False


@dataclass
class Arrival:
    """A tensor on its way to this rank: messages, and their places in the piece."""

    form: TensorForm
    layout: Layout
    posts: list[tuple[Transfer, Box]]


class Runner:
    """Runs programs on one rank.

    A program is run for the first time with `learning`: each value is preceded by its form, and no receive is posted
    ahead, as nobody knows its size yet.
    """

    def __init__(self, channels: Channels | None, device: torch.device):
        self.channels, self.device = channels, device
        self.arrivals: dict[Parcel, Arrival] = {}
        self.handed: dict[Parcel, Tensor] = {}
        self.spans: list[tuple[Action, float, float]] = []
        """When each action of the last run began, with all that it needs, and ended."""
        self.began = 0.0
        self.left: Counter[int] = Counter()
        """How many backwards of each stage have not begun on this rank."""
        self.random = random_state(device)
        """The random state after the last stage, which the loss begins with: the same for all micro-batches."""

    def run(self, program: Program, seats: Seats, job: StepJob, known: LearnedForms, learning: bool, seed: int) -> None:
        """Carry out this seat's list."""
        self.program, self.seats, self.job, self.known = program, seats, job, known
        self.learning, self.seed, self.rank = learning, seed, seats.meshes[seats.own].rank
        self.spans = []
        self.left = Counter(a.stage for a in program.seats[seats.own] if isinstance(a, Action) and a.kind == "backward")
        if learning and self.channels is not None:
            self.channels.meet(pairs_of(program, seats))
        for step in program.seats[seats.own]:
            if isinstance(step, Receive):
                self._receive(step.parcel)
            elif isinstance(step, Send):
                self._send(step.parcel)
            else:
                (self._forward if step.kind == "forward" else self._backward)(step)
                self.spans.append((step, self.began, perf_counter()))
        if self.channels is not None:
            self.channels.finish()

    def forget(self) -> None:
        """Release what a step that raised left."""
        self.arrivals.clear()
        self.handed.clear()

    # -- actions ------------------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        given: dict[Key, Tensor] = dict(self.job.inputs(action.stage, action.microbatch))
        wanted: set[Key] = set()
        state: Tensor | None = None
        for parcel in needed_by(action, self.program.edges):
            value = self._arrived(parcel)
            if parcel.edge.value[0] == RANDOM:
                state = value
                continue
            given[parcel.edge.value] = value
            if parcel.edge.gradient and torch.is_grad_enabled():
                wanted.add(parcel.edge.value)
        self.began = perf_counter()
        stage = self.job.stage(action.replica, action.stage)
        with generators_kept(self.device):
            if state is None:
                seed_generators(self.seed, self.device)
            else:
                set_random_state(state, self.device)
            made, result = stage.forward(action.microbatch, given, wanted)
            made[RANDOM, action.stage] = random_state(self.device)
        if action.stage == self.program.schedule.stages - 1:
            self.random = made[RANDOM, action.stage]
            self.job.arrived(action.microbatch, result)
        self._hand(action, made)

    def _backward(self, action: Action) -> None:
        grads: dict[Key, Tensor] = {}
        for parcel in needed_by(action, self.program.edges):
            grad = self._arrived(parcel)
            grad = grad.local if isinstance(grad, ShardedTensor) else grad
            if self._absent(parcel, grad):
                continue
            key = parcel.edge.value
            grads[key] = grads[key] + grad if key in grads else grad
        self.began = perf_counter()
        self.left[action.stage] -= 1
        stage = self.job.stage(action.replica, action.stage)
        ends: Ends = []
        if action.stage == self.program.schedule.stages - 1:
            ends = self.job.ends(action.microbatch, stage.again(action.microbatch))
        made, reached = stage.backward(action.microbatch, grads, ends)
        for parcel in made_by(action, self.program.edges):
            self.known.reached[self._name(parcel), self.seats.own] = parcel.edge.value in reached
        self._hand(action, made)

    def _absent(self, parcel: Parcel, grad: Tensor) -> bool:
        """Whether there is no gradient, rather than one of zeros: optimizers skip parameters without one."""
        name, source = self._name(parcel), self._seat(parcel, parcel.source)
        if self.known.reached.get((name, source), True):
            return False
        return not any_rank(self.seats.meshes[self.seats.own], bool(grad.any()))[0]

    def _hand(self, action: Action, made: Mapping[Key, Tensor]) -> None:
        """Keep what an action made for the stages that need it."""
        for parcel in made_by(action, self.program.edges):
            self.handed[parcel] = made[parcel.edge.value]
            if parcel.work == "forward":
                form = TensorForm.of(made[parcel.edge.value])
                if self.known.forms.setdefault(self._name(parcel), form) != form:
                    raise PlanError(
                        f"{parcel} has another type or other cuts than in an earlier step of the same shapes, and the "
                        f"stages that take it expect those: a model may not change the type of what it hands on"
                    )

    # -- messages -----------------------------------------------------------------------------------------------------

    def _seat(self, parcel: Parcel, stage: int) -> int:
        return self.program.schedule.seat_of[parcel.replica, stage]

    def _name(self, parcel: Parcel) -> Name:
        return parcel.edge.value, self._seat(parcel, parcel.edge.producer)

    def _layouts(self, parcel: Parcel, form: TensorForm) -> tuple[Layout, Layout]:
        """How the tensor is cut on the seat that makes it, and on the one that needs it."""
        producer = self._seat(parcel, parcel.edge.producer)
        consumer = self._seat(parcel, parcel.target if parcel.work == "forward" else parcel.source)
        time = parcel.microbatch, self.job.microbatches
        meshes = (self.seats.meshes[s].at_time(*time) for s in (producer, consumer))
        aligns = (self.seats.aligns[s] for s in (producer, consumer))
        made, used = (form.layout(mesh, align) for mesh, align in zip(meshes, aligns, strict=True))
        return (made, used) if parcel.work == "forward" else (used, made)

    def _receive(self, parcel: Parcel) -> None:
        channels = self._channels()
        name, source = self._name(parcel), self._seat(parcel, parcel.source)
        if (name, parcel.work, source) not in self.known.heard:
            self.known.heard.add((name, parcel.work, source))
            teller, _ = self._counterparts(source, self.seats.own)
            size = HEADER_BYTES if parcel.work == "forward" else 1
            header = channels.wait(channels.post(f"news of {parcel}", teller, size, torch.empty(0, dtype=torch.uint8)))
            if parcel.work == "forward":
                self.known.forms[name] = TensorForm.unpacked(header)
            else:
                self.known.reached[name, source] = bool(header[0])
        form = self.known.forms[name]
        have, need = self._layouts(parcel, form)
        like = torch.empty(0, dtype=form.type, device="cpu" if parcel.edge.value[0] == RANDOM else self.device)
        moves = [move for move in delivery(self.rank, have, need) if move.destination == self.rank]
        posts = [(channels.post(str(parcel), move.source, volume(move.box), like), move.box) for move in moves]
        self.arrivals[parcel] = Arrival(form, need, posts)

    def _send(self, parcel: Parcel) -> None:
        channels = self._channels()
        tensor = self.handed.pop(parcel)
        name, target = self._name(parcel), self._seat(parcel, parcel.target)
        if (name, parcel.work, target) not in self.known.told:
            self.known.told.add((name, parcel.work, target))
            for listener in self._counterparts(self.seats.own, target)[1]:
                channels.send(f"news of {parcel}", listener, self._news(parcel))
        have, need = self._layouts(parcel, self.known.forms[name])
        local = (tensor.local if isinstance(tensor, ShardedTensor) else tensor).detach()
        for move in delivery(self.rank, have, need):
            if move.source == self.rank:
                channels.send(str(parcel), move.destination, local[slices(move.box, have.box)].reshape(-1).contiguous())
        channels.collect()

    def _news(self, parcel: Parcel) -> Tensor:
        """What the other side has to know before the first such message."""
        name = self._name(parcel)
        if parcel.work == "forward":
            return self.known.forms[name].packed()
        return torch.tensor([self.known.reached[name, self.seats.own]], dtype=torch.uint8)

    def _arrived(self, parcel: Parcel) -> Tensor:
        """What another stage made, as this seat holds it."""
        if parcel in self.handed:
            return self.handed.pop(parcel)
        if parcel not in self.arrivals:
            raise PlanError(f"{parcel} is needed, but was neither made on this seat nor received before")
        arrival, channels = self.arrivals.pop(parcel), self._channels()
        layout, form = arrival.layout, arrival.form
        if len(arrival.posts) == 1 and arrival.posts[0][1] == layout.box:
            return form.tensor(channels.wait(arrival.posts[0][0]).view(layout.local_shape), layout)
        piece = torch.empty(layout.local_shape, dtype=form.type, device=self.device)
        for awaited, part in arrival.posts:
            target = piece[slices(part, layout.box)]
            target.copy_(channels.wait(awaited).view(target.shape))
        return form.tensor(piece, layout)

    def _counterparts(self, source: int, target: int) -> tuple[int, list[int]]:
        """Which rank of one seat sends forms to this rank of the other, and which ranks this rank sends them to."""
        givers, takers = self.seats.ranks(source), self.seats.ranks(target)
        told = {taker: givers[i % len(givers)] for i, taker in enumerate(takers)}
        return told.get(self.rank, -1), [taker for taker, giver in told.items() if giver == self.rank]

    def _channels(self) -> Channels:
        if self.channels is None:
            raise PlanError("a program with messages needs several ranks")
        return self.channels


def pairs_of(program: Program, seats: Seats) -> set[tuple[int, int]]:
    """The ranks between which a program may send messages."""
    sends = {(seat, step.peer) for seat, row in enumerate(program.seats) for step in row if isinstance(step, Send)}
    return {pair for source, target in sends for pair in product(seats.ranks(source), seats.ranks(target))}

"""Federated averaging: clinics train on data that never leaves them, and share only a weighted mean of their weights.

    shared model ──► local steps on own samples ──► Σ samples · weights ÷ Σ samples, over a ring ──► shared model

The clinics of a round form a process group. If one leaves in the middle, the attempt ends, and the others begin another
without it: the round lacks its samples, but does not wait. One that comes back gets the shared model before it trains.
An error in a clinic's own training is raised there, unchanged; for the others, that clinic has left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from mural.collectives import all_reduce, broadcast
from mural.collectives.team import team_of
from mural.errors import PeerError, PlanError
from mural.federated.masks import Key, from_fixed, masked, to_fixed
from mural.federated.roster import ClinicTurn, HostGone, MemberGone, Patience, Roster, RoundAttempt, store_at

ATTEMPTS = 20
"""How often a round is tried again before its error is raised."""
Local = Callable[[nn.Module, int], int]
"""Trains the model in place for the round of this number, and returns the number of samples; 0 to sit it out."""


@dataclass(frozen=True)
class Round:
    """A round that this clinic took part in."""

    number: int
    attempt: int
    members: tuple[str, ...]
    samples: int
    """The samples of all members together."""

    def words(self) -> str:
        """The round as text.

        >>> Round(3, 0, ("Accra", "Lomé"), 120).words()
        'round 3: Accra, Lomé; 120 samples'
        """
        again = f" at attempt {self.attempt + 1}" if self.attempt else ""
        return f"round {self.number}{again}: {', '.join(self.members)}; {self.samples} samples"


@dataclass
class Federation:
    """One clinic's part in a federation.

    ```python
    clinic = Federation("Accra", "10.0.0.5:29400", Patience(expected=5, quorum=3), masked=True)
    clinic.run(model, rounds=20, local=train_on_my_samples)
    ```

    With `masked`, no clinic sees another's weights, only the sum; this needs three clinics or more, and the package
    `cryptography` (`pip install "mural-train[federated]"`).
    """

    name: str
    address: str
    patience: Patience
    host: bool = False
    """Whether this clinic holds the meeting place; if it leaves, the federation ends."""
    masked: bool = False
    timeout: float = 60.0
    """Seconds after which a member that does not answer counts as gone."""
    say: Callable[[str], None] = print
    """Called with a line about every round."""
    history: list[Round] = field(default_factory=list[Round])

    version: int = 0
    """The number of rounds in this clinic's model."""

    def __post_init__(self) -> None:
        if self.patience.quorum < 1 or self.patience.expected < self.patience.quorum:
            raise PlanError(f"{self.patience}: give 1 ≤ quorum ≤ expected")
        if self.masked and self.patience.quorum < 3:
            raise PlanError(
                f"masked with quorum = {self.patience.quorum}: with two clinics, each could compute the other's "
                f"update from the sum and its own: set quorum to 3 or more"
            )
        self.trained: tuple[Tensor, int] | None = None

    def run(self, model: nn.Module, rounds: int, local: Local) -> nn.Module:
        """The shared model after that many rounds; this clinic takes part in those that it is present for.

        A clinic that was away in the last rounds ends with an earlier model: `version` says so. If an error ends the
        run, `model` is the shared one after the last round that this clinic took part in, not half of a round.
        """
        self.key = Key() if self.masked else None  # a new one: turns begin at 0, and a mask must never hide two updates
        public = self.key.public if self.key else ""
        roster = Roster(store_at(self.address, self.host, self.timeout), self.patience)
        self.base, self.trained = read(model), None
        me = ClinicTurn(self.name, self.version, public, form_of(model), self.masked)
        try:
            self._rounds(roster, me, model, rounds, local)
        except BaseException as error:
            with suppress(RuntimeError):  # a failed device takes no values; its own error is the one to raise
                write(model, self.base)
            if isinstance(error, HostGone):
                raise HostGone(
                    f"the meeting place {self.address} is gone ({error}): its host has left, and the federation ends. "
                    f"{self.name} keeps the model of version {self.version}; to go on, start the host, then run again"
                ) from None  # torch's error is a page of C++ frames
            raise
        return model

    def _rounds(self, roster: Roster, me: ClinicTurn, model: nn.Module, rounds: int, local: Local) -> None:
        """Take turns until all rounds are done, then leave."""
        turn = roster.latest()
        while turn.round < rounds:
            try:
                members = roster.meet(turn, replace(me, version=self.version))
                if members is None:
                    self.say(f"{turn} goes on without {self.name}: waiting for the next")
                    turn = roster.await_later(turn)
                    continue
                self._take(turn, members, roster, model, local)
                self.say(self.history[-1].words())
                turn = RoundAttempt(turn.round + 1)
            except MemberGone:
                if turn.attempt == ATTEMPTS:
                    raise
                self.say(f"{turn}: a member has left; once more with those who are there")
                turn = RoundAttempt(turn.round, turn.attempt + 1)
            if turn.round < rounds:  # after the last round the host may be gone, and nothing is lost
                roster.advance(turn)
                turn = max(turn, roster.latest())
        if self.history:
            roster.leave(turn, len(self.history[-1].members), self.host)

    def _take(
        self, turn: RoundAttempt, members: Sequence[ClinicTurn], roster: Roster, model: nn.Module, local: Local
    ) -> None:
        """Take a turn with its members."""
        try:
            mine = check_alike(members, self.name)
        except PlanError:
            roster.leave(turn, len(members), self.host)  # without the store, the others would never see why
            raise
        with together(roster.store, turn, mine, len(members), self.timeout) as group:
            self._catch_up(turn, members, model, group)
            if self.trained is None:  # a failed attempt has trained already
                samples = local(model, turn.round)
                self.trained = read(model), check_samples(samples)
            total = self._sum(turn, members, mine, group)
        if total[-1] > 0:
            self.base = total[:-1] / total[-1]
        write(model, self.base)
        self.version, self.trained = turn.round + 1, None
        self.history.append(Round(turn.round, turn.attempt, tuple(m.name for m in members), int(total[-1])))

    def _catch_up(
        self, turn: RoundAttempt, members: Sequence[ClinicTurn], model: nn.Module, group: dist.ProcessGroup | None
    ) -> None:
        """Send the shared model to clinics that have been away; at the very beginning, the first member's."""
        newest = max(member.version for member in members)
        if group is None or (newest and all(member.version == newest for member in members)):
            return
        source = next(i for i, member in enumerate(members) if member.version == newest)
        with noticing(turn):
            found = broadcast(self.base.clone(), source, group)
        if not torch.equal(found, self.base):
            write(model, found)
            self.base, self.version, self.trained = found, newest, None

    def _sum(
        self, turn: RoundAttempt, members: Sequence[ClinicTurn], mine: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        """The sum over members of their weights times their samples and, in the last entry, of their samples."""
        if self.trained is None:
            raise PlanError("a clinic has to train before its weights are added to others'")
        values, samples = self.trained
        update = torch.cat([values * samples, values.new_tensor([samples])])
        if group is None:
            return update
        if self.key:
            publics = {number: member.public for number, member in enumerate(members)}
            update = masked(to_fixed(update, len(members)), mine, self.key, publics, str(turn))
        with noticing(turn):
            total = all_reduce(update, "ring", group)
        return from_fixed(total) if self.key else total


@contextmanager
def together(
    store: Store, turn: RoundAttempt, rank: int, size: int, timeout: float
) -> Generator[dist.ProcessGroup | None]:
    """A process group of the members of a turn; None for one alone."""
    if size == 1:
        yield None
        return
    place = PrefixStore(f"group/{turn.round}/{turn.attempt}", store)
    try:
        with noticing(turn):
            dist.init_process_group("gloo", store=place, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
            all_reduce(torch.zeros(1), "ring", dist.group.WORLD)  # a roll call: from here on, connections show who left
        yield dist.group.WORLD
    except BaseException as error:
        if dist.is_initialized() and not isinstance(error, MemberGone):
            # Connections stay open for as long as this process lives: tell the others, but not why.
            with suppress(RuntimeError):
                team_of(dist.group.WORLD).refuse(PeerError("this clinic has left"))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def noticing(turn: RoundAttempt) -> Generator[None]:
    """A block with messages to members and nothing else: what torch raises in it means that one is gone."""
    try:
        yield
    except RuntimeError as error:  # torch raises these for lost peers, and for many other reasons
        raise MemberGone(f"{turn}: a member is gone: {str(error).splitlines()[0]}") from error


def floating(model: nn.Module) -> list[Tensor]:
    """What is averaged: all parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def read(model: nn.Module) -> Tensor:
    """The values of a model as one flat CPU tensor, in float64, so that sums of weights times samples stay exact."""
    return torch.cat([t.detach().reshape(-1).to("cpu", torch.float64) for t in floating(model)] or [torch.zeros(0)])


@torch.no_grad()
def write(model: nn.Module, values: Tensor) -> None:
    """Write flat values into a model; counters become the nearest whole number."""
    tensors = floating(model)
    for tensor, part in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_((part if tensor.is_floating_point() else part.round()).view(tensor.shape))


def form_of(model: nn.Module) -> str:
    """A digest of the names, shapes and types of a model's values; models with equal digests can be averaged."""
    parts = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in model.state_dict().items()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def check_alike(members: Sequence[ClinicTurn], name: str) -> int:
    """The position of a clinic among the members; raises unless names are unique, and models and masks match."""
    names = [member.name for member in members]
    if names.count(name) > 1:
        raise PlanError(f"two clinics are called {name!r}: give each its own name")
    mine = names.index(name)
    if others := [m.name for m in members if m.form != members[mine].form]:
        raise PlanError(
            f"the model of {name} has other parameters than that of {', '.join(others)}: all must train the same"
        )
    if others := [m.name for m in members if m.masked != members[mine].masked]:
        raise PlanError(
            f"{name} has masked={members[mine].masked}, but {', '.join(others)} masked={not members[mine].masked}: "
            f"masks cancel only if all have them; set masked=True in every clinic, or in none"
        )
    return mine


def check_samples(samples: object) -> int:
    """The number of samples that a clinic trained on; raises unless it is a valid number."""
    if not isinstance(samples, int) or samples < 0:
        raise PlanError(f"local training returned {samples!r}: return the number of samples that it used, or 0")
    return samples

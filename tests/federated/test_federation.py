"""Federations of real processes: the weighted mean of local training, whoever leaves and comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from clinics import local_steps, model_of

from mural.errors import PeerError, TrainingError
from mural.federated import Federation, Patience
from mural.federated.federation import read, write
from mural.federated.roster import store_at
from mural.ranks import free_port

HERE = Path(__file__).parent


class Clinics:
    """Processes, one for each clinic, with one meeting place."""

    def __init__(self, out: Path, **settings: Any):
        self.out, self.processes = out, dict[int, subprocess.Popen[bytes]]()
        patience = {"expected": 3, "quorum": 1, "seconds": 4}
        common = {"out": str(out), "address": f"127.0.0.1:{free_port()}", "patience": patience, "rounds": 3}
        self.settings = common | {"masked": False, "timeout": 60.0, **settings}

    def start(self, clinic: int, **settings: Any) -> None:
        given = self.settings | {"clinic": clinic, "host": clinic == 0} | settings
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        command = [sys.executable, str(HERE / "clinics.py"), json.dumps(given)]
        with (self.out / f"{clinic}.txt").open("w") as log:
            self.processes[clinic] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def await_file(self, name: str) -> None:
        end = time.monotonic() + 90
        while not (self.out / name).exists():
            assert time.monotonic() < end, f"{name} is missing; {self.words()}"
            time.sleep(0.05)

    def result(self, clinic: int) -> Any:
        code = self.processes[clinic].wait(timeout=120)
        assert code == 0, self.words()
        return torch.load(self.out / f"{clinic}.pt")

    def words(self) -> str:
        return "\n".join(file.read_text()[-1500:] for file in sorted(self.out.glob("*.txt")))


@pytest.fixture
def clinics(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Clinics]:
    found = Clinics(tmp_path, **getattr(request, "param", {}))
    yield found
    for process in found.processes.values():
        process.kill()
        process.wait()


def expected(rounds: list[list[int]], first: int) -> torch.nn.Module:
    """The model after rounds with these clinics each, in one process."""
    model = model_of(seed=first)
    for members in rounds:
        base, total, samples = read(model), torch.zeros(()), 0
        for clinic in members:
            write(model, base)
            count = local_steps(model, clinic)
            total, samples = total + read(model) * count, samples + count
        write(model, total / samples)
    return model


def first_of(result: Any, candidates: list[int]) -> int:
    """The clinic whose weights the first round began with: that which came first."""
    states = {clinic: expected([h[2] for h in numbered(result)], clinic).state_dict() for clinic in candidates}
    close = [
        clinic
        for clinic, state in states.items()
        if all(torch.allclose(state[k].double(), v.double(), atol=1e-7) for k, v in result["state"].items())
    ]
    assert len(close) == 1, "the result is no weighted mean of local training from any clinic's weights"
    return close[0]


def numbered(result: Any) -> list[tuple[int, int, list[int], int]]:
    return [(n, a, [int(m.split()[1]) for m in members], s) for n, a, members, s in result["history"]]


@pytest.mark.slow
@pytest.mark.parametrize("clinics", [{"rounds": 1}], indirect=True, ids=str)
def test_an_error_of_local_training_is_raised_as_it_is_and_the_others_carry_on(clinics: Clinics) -> None:
    """It counted as a member that left: the clinic tried 20 times, and never said what was wrong."""
    lines: list[str] = []
    clinics.start(1, fails=0, lingers=60)
    clinics.await_file("starts-1")
    patience = Patience(expected=2, quorum=1, seconds=1.5)
    mine = Federation("clinic 0", clinics.settings["address"], patience, host=True, say=lines.append)
    mine.run(model_of(seed=0), 1, lambda model, _: local_steps(model, 0))
    assert (clinics.out / "error-1").read_text().startswith("RuntimeError: mat1 and mat2 shapes")
    assert clinics.processes[1].poll() is None  # it is there still, with open connections: it said that it left
    assert [(r.number, r.attempt, r.members) for r in mine.history] == [(0, 1, ("clinic 0",))]
    assert lines[0] == "round 0: a member has left; once more with those who are there"


def test_errors_of_local_training_leave_the_model_of_the_last_round() -> None:
    model = model_of(seed=0)
    mine = Federation("a", f"127.0.0.1:{free_port()}", Patience(1), host=True, say=lambda _: None)
    kept: list[torch.Tensor] = []

    def local(model: torch.nn.Module, number: int) -> int:
        if number == 1:
            kept.append(read(model))
        count = local_steps(model, 0)
        if number == 1:
            raise TrainingError("the loss is no number")
        return count

    with pytest.raises(TrainingError, match="the loss is no number"):
        mine.run(model, 3, local)
    assert mine.version == 1
    assert torch.equal(read(model), kept[0])


def test_every_run_has_a_key_of_its_own() -> None:
    """One key for two runs hid two updates behind one mask: their difference was plain."""
    keys: list[str] = []
    mine = Federation("a", f"127.0.0.1:{free_port()}", Patience(1), host=True, say=lambda _: None)
    mine.masked = True  # alone, against the rule: enough to see the keys
    for _ in range(2):
        mine.run(model_of(seed=0), 1, lambda model, _: local_steps(model, 0))
        keys.append(mine.key.public)
    assert keys[0] != keys[1]


def test_without_its_host_the_federation_ends_in_words() -> None:
    address = f"127.0.0.1:{free_port()}"
    store = store_at(address, holds=True, timeout=5)
    model = model_of(seed=0)
    values = read(model)
    mine = Federation("a", address, Patience(expected=2, quorum=2), timeout=5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mine.run, model, 3, lambda model, _: local_steps(model, 0))
        while not store.check(["0/0/here"]):
            time.sleep(0.02)
        del store
        with pytest.raises(PeerError, match=f"meeting place {address} is gone .* keeps the model of version 0"):
            waiting.result(10)
    assert torch.equal(read(model), values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "clinics", [{}, {"masked": True, "patience": {"expected": 3, "quorum": 3, "seconds": 4}}], indirect=True, ids=str
)
def test_the_weighted_mean_of_local_training(clinics: Clinics) -> None:
    for clinic in range(3):
        clinics.start(clinic)
    results = [clinics.result(clinic) for clinic in range(3)]
    assert all(h[3] == 6 + 11 + 16 for result in results for h in result["history"])
    first_of(results[0], [0, 1, 2])
    for other in results[1:]:
        assert all(torch.equal(v, other["state"][k]) for k, v in results[0]["state"].items())


@pytest.mark.slow
@pytest.mark.parametrize("clinics", [{"rounds": 6}], indirect=True, ids=str)
def test_a_clinic_drops_out_and_comes_back(clinics: Clinics) -> None:
    clinics.start(0, slow=3, seconds=12.0)
    clinics.start(1)
    clinics.start(2, dies=1)
    assert clinics.processes[2].wait(timeout=120) == 7
    clinics.await_file("began-1-3")
    clinics.start(2)
    results = [clinics.result(clinic) for clinic in range(3)]
    members = [h[2] for h in numbered(results[0])]
    assert (members[0], members[1], members[-1]) == ([0, 1, 2], [0, 1], [0, 1, 2])
    assert [r["version"] for r in results] == [6, 6, 6]
    assert numbered(results[0])[1][1] > 0  # round 1 took a second attempt
    for other in results[1:]:
        assert all(torch.equal(v, other["state"][k]) for k, v in results[0]["state"].items())
    first_of(results[0], [0, 1, 2])

"""The search for kills: `mural train` under plans of all families, of which random processes are killed at any moment.

    run ── kill ── the ranks start again, or the run ends with an error and is started anew ── kill ── … ── end

At the end the weights, losses and steps are those of an undisturbed run, to the bit, and nothing is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from runs import run_config, write_images
from test_faults import end, log_of, ranks_of, saving, started, steps_seen, until, weights

from hunt.findings import Finding, Tally
from mural.train import Config

NAME = "kills"
STEPS, LIMIT = 8, 300.0
EACH = 13.0
"""Seconds for a kill, about: of 9 minutes, 40."""
PLANS: dict[str, dict[str, Any]] = {
    "spatial": {"spatial": [2, 1]},
    "data": {"data": 2},
    "stages": {"stage": 2},
    "micro-batches in stages": {"stage": 2, "microbatches": 2, "schedule": "1f1b", "batchnorm": "micro"},
    "gems": {"stage": 2, "microbatches": 2, "schedule": "gems", "batchnorm": "micro"},
    "channels": {"channel": 2, "channel_layers": "all"},
    "streamed": {"stream": [24, 24]},
    "streamed on ranks": {"stream": [24, 24], "spatial": [1, 2]},
    "offloaded": {"data": 2, "offload": ["activations", "optimizer"]},
    "recomputed": {"spatial": [2, 1], "recompute": "all"},
    "rings": {"data": 2, "all_reduce": "ring"},
}
MOMENTS = ("start", "step", "step", "save", "save")


class Broken(Exception):
    """What a run did that it should not."""


@dataclass
class Ground:
    """A folder with images, and undisturbed runs on them."""

    folder: Path
    whole: dict[str, Config]

    @classmethod
    def of(cls, folder: Path) -> Ground:
        """Images in a folder."""
        write_images(folder / "images")
        return cls(folder, {})

    def config(self, plan: str, name: str, restarts: int = 0) -> Config:
        """A run of some steps that saves after each."""
        return run_config(
            self.folder / "images", self.folder / name, train__steps=STEPS, checkpoint__every=1, plan=PLANS[plan],
            launch__restarts=restarts,
        )  # fmt: skip

    def undisturbed(self, plan: str) -> Config:
        """The run under a plan that nobody disturbs."""
        if plan not in self.whole:
            config = self.config(plan, f"whole {plan}")
            with started(config) as process:
                if process.wait(LIMIT) != 0:
                    raise Broken(f"the undisturbed run failed\n{log_of(config)[-2000:]}")
            self.whole[plan] = config
        return self.whole[plan]


def session(leader: int) -> list[int]:
    """The processes that a run started and that still run."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def losses(config: Config) -> dict[int, float]:
    """The loss of each step; of one that was taken twice, the last."""
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {told["step"]: told["loss"] for told in found if "loss" in told}


def leftovers(leader: int, ranks: Sequence[int]) -> list[str]:
    """Processes of a run that ended, and the shared memory of its ranks; they have some seconds to go."""
    left: list[str] = []
    for _ in range(100):
        shared = [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in ranks)]
        left = [*(f"process {pid}" for pid in session(leader)), *shared]
        if not left:
            break
        time.sleep(0.1)
    for pid in session(leader):
        end(pid, signal.SIGKILL)
    return left


def wait_for_moment(d: Random, config: Config, process: Any) -> str:
    """Wait for a random moment; its name."""
    moment, step = d.choice(MOMENTS), d.randrange(0, STEPS - 2)
    if config.plan.devices > 1:
        until(lambda: ranks_of(process.pid), process, "ranks")
    if moment == "start":
        time.sleep(d.random() * 5)
        return moment
    until(lambda: steps_seen(config) >= step, process, f"step {step}")
    if moment == "save":
        until(lambda: saving(config) or steps_seen(config) >= STEPS - 1, process, "a save")
    time.sleep(d.random() * 0.1)
    return f"{moment} {step}"


def hurt(d: Random, config: Config, kills: int) -> list[str]:
    """Run until the end, with so many kills; each in a line."""
    told: list[str] = []
    while True:
        ranks: list[int] = []
        with started(config) as process:
            for _ in range(min(kills - len(told), config.launch.restarts or 1)):
                try:
                    moment = wait_for_moment(d, config, process)
                except AssertionError:  # it was done before
                    break
                ranks += (there := ranks_of(process.pid))
                parent = not config.launch.restarts and d.random() < 0.2
                if config.launch.restarts and not there:  # they are being started again
                    continue
                victim = process.pid if parent or not there else d.choice(there)
                end(victim, signal.SIGKILL)
                told.append(f"{'the launcher' if victim == process.pid else 'a rank'} at {moment}")
            try:
                code = process.wait(LIMIT)
            except Exception as error:
                raise Broken(f"no end in {LIMIT:.0f} s after {told}\n{log_of(config)[-3000:]}") from error
            if left := leftovers(process.pid, ranks):
                raise Broken(f"left after {told}: {left}")
        if code == 0:
            return told
        check_error(code, told, log_of(config))
        if len(told) > 3 * kills + 3:
            raise Broken(f"does not end: {told}\n{log_of(config)[-2000:]}")


def check_error(code: int, told: Sequence[str], log: str) -> None:
    """A run that ended without being killed itself says which rank was, in mural's words."""
    if code == -signal.SIGKILL:
        return
    if "SIGKILL" not in log or "Traceback" in log:
        raise Broken(f"ended with {code} after {told}, without a clear error\n{log[-3000:]}")


def compare(config: Config, whole: Config) -> None:
    """The run ended with the bits of an undisturbed one."""
    mine, theirs = weights(config), weights(whole)
    if wrong := [name for name in theirs if not torch.equal(mine[name], theirs[name])]:
        raise Broken(f"other weights: {wrong[:5]} of {len(wrong)}")
    if losses(config) != losses(whole):
        raise Broken(f"other losses: {losses(config)}, undisturbed {losses(whole)}")


def killed_run(d: Random, ground: Ground, plan: str, name: str, kills: int) -> list[str]:
    """A run under a plan with some kills, next to an undisturbed one; the kills in lines."""
    config = ground.config(plan, name)
    if config.plan.devices > 1 and d.random() < 0.5:  # a single rank is the launcher itself, and nobody starts it again
        config = ground.config(plan, name, restarts=kills)
    whole = ground.undisturbed(plan)
    told = hurt(d, config, kills)
    compare(config, whole)
    return told


def search(
    seed: int, seconds: float, report: Callable[[str], None], most: int | None = None, plans: Sequence[str] = ()
) -> Tally:
    """Kill until the time is over: at most 40 times in 9 minutes, fewer in less."""
    d, until_then, exact = Random(seed), time.monotonic() + seconds, 0
    most = most or max(1, round(seconds / EACH))
    order = d.sample(names := list(plans or PLANS), len(names))
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="mural-kills-") as folder:
        ground = Ground.of(Path(folder))
        for number in range(most):
            if time.monotonic() > until_then or exact + len(findings) >= most:
                break
            plan = order[number % len(order)]
            kills = min(d.choice([2, 3, 4]), most - exact - len(findings))
            try:
                told = killed_run(Random(f"{seed}.{number}"), ground, plan, f"run {number}", kills)
                exact += len(told)
                report(f"{plan}: {'; '.join(told)}: the same bits")
            except (Broken, AssertionError) as error:
                kind = "hung" if "no end in" in str(error) else "incorrect" if "other " in str(error) else "crashed"
                findings.append(Finding(NAME, kind, f"{seed}.{number} {plan}", str(error)))
                report(f"{kind}: {seed}.{number} {plan}: {error}")
    return Tally(NAME, exact, 0, tuple(findings))

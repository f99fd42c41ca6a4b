"""Steps of a run under its plan, compared with plain autograd on one device: what `mural check` shows."""

from __future__ import annotations

import torch

from mural.check import Comparison, check
from mural.train.config import Config
from mural.train.factory import make_model
from mural.train.local_ranks import on_local_ranks
from mural.train.start import start
from mural.train.training_run import Run


def check_run(config: Config) -> Comparison:
    """How far the plan is from one device on the first batch of a run; nothing is trained."""
    return on_local_ranks(compare, config)


def compare(_: int, config: Config) -> Comparison:
    """The comparison, on this rank."""
    with start(config) as run:
        return compare_first_batch(run)


def compare_first_batch(run: Run) -> Comparison:
    """The comparison on the first batch, which every rank takes whole. Collective."""
    batches = run.loader.epoch(0)
    batch = next(iter(batches))
    with torch.no_grad():
        image, target = batch.whole()
    batches.close()
    # The run's own model is divided already, so that no rank may have all of it.
    model = make_model(run.config.model, run.config.seed).to(run.pm.device)
    state, terms = run.pm.state_dict(), run.pm.loss_terms.state_keys()
    model.load_state_dict({name: value for name, value in state.items() if name not in terms})
    with run.watchdog.pause():
        return check(model, run.config.plan, image, target, run.pm.loss)

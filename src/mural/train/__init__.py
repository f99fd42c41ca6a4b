"""Training runs: a configuration, the loop, checkpoints, what is seen of it."""

from mural.train.config import Config
from mural.train.loop import Trainer
from mural.train.run_check import check_run
from mural.train.training_run import Result

__all__ = ["Config", "Result", "Trainer", "check_run"]

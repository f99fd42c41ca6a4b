"""The demo: one U-Net trained in one process and on a grid of local ranks, compared step by step."""

from mural.demo.course import run_demo
from mural.demo.settings import MOST_STEPS, Settings, parse_grid

__all__ = ["MOST_STEPS", "Settings", "parse_grid", "run_demo"]

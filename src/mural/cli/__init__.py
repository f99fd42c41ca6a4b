"""The command line: each verb parses its options, then calls one public function."""

from mural.cli import bench, data, demo, doctor, graph, profile, train
from mural.cli.app import app, main

__all__ = ["app", "bench", "data", "demo", "doctor", "graph", "main", "profile", "train"]

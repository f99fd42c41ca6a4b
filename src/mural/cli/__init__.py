"""The command line: each verb parses its options, then calls one public function."""

from mural.cli import (
    bench_verb,
    convert_verb,
    demo_verb,
    doctor_verb,
    graph_verb,
    init_verb,
    plan_verb,
    predict_verb,
    profile_verb,
    report_verb,
    train_verbs,
)
from mural.cli.app import app, main

__all__ = [
    "app",
    "bench_verb",
    "convert_verb",
    "demo_verb",
    "doctor_verb",
    "graph_verb",
    "init_verb",
    "main",
    "plan_verb",
    "predict_verb",
    "profile_verb",
    "report_verb",
    "train_verbs",
]

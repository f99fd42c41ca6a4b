"""Drawings of a model's graph: a page that folds out, DOT, or plain text."""

"""Offload: what it costs to keep a model, its optimizer or its activations on the host, next to what was published."""

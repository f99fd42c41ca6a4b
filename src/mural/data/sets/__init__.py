"""Datasets: which samples there are, on disk, in memory, computed, or brought along."""

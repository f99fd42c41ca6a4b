"""What document 004 published: Caffe over MPI with CUDA, a batch of 200 a process, 4,000 iterations."""

ITERATIONS = 4000
BATCH = 200

SECONDS = {1: 75.042, 2: 75.71, 3: 81.68, 4: 82.67}
"""Seconds on a GPU by the number of processes (its third table)."""

BY_BATCH = {10: (17, 106), 50: (30, 483), 100: (42, 1018), 200: (81, 2018), 400: (150, None), 800: (315, None)}
"""Seconds of two processes by their batch: on a GPU, and on the CPU (its first two tables; the CPU failed at 400)."""

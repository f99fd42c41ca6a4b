"""Training runs: the loop, its configuration, and the checkpoints that it resumes from."""

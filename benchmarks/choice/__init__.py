"""Choice: whether `mural.plan`, before anything runs, takes the fastest mix of keep, recompute, offload and stream."""

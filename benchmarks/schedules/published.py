"""What was published, as document 000 cites it: HyPar-Flow (ISC 2020) and GEMS (SC 2020), both on ResNet v2."""

HYBRID_OVER_DATA = 1.6
"""HyPar-Flow, ResNet-1001-v2 on CPU nodes: hybrid of data and stages over Horovod's data parallelism, at best."""

SCALING_EFFICIENCY = 0.9732
"""GEMS with data parallelism, ResNet-1k on 1,024 V100 GPUs."""

HOURS_BEFORE, HOURS_AFTER = 7.0, 28 / 60
"""GEMS, ResNet-110-v2 on tiles of 1024 × 1024 from whole-slide images: training before and after."""

SPEEDUP = HOURS_BEFORE / HOURS_AFTER
"""What the hours amount to."""

"""What the benchmarks share: cases, ranks as processes, the search for the largest image, replay, results, tables."""

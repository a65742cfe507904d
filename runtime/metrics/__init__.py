"""What a run measures of itself: step time, throughput, FLOPs, waiting for data, and how these differ by rank."""

"""Measurements of a run: step time, throughput, FLOPs, waiting for data, and the differences between ranks."""

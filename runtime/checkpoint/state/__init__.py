"""State in a checkpoint: how it lies there, whose it is, how it is staged, random numbers, whether it fits the run."""

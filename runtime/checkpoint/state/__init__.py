"""State in a checkpoint: whose it is, how it is staged, random numbers and whether it fits the run."""

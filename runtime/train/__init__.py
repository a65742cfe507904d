"""Training loop: optimizers, schedulers, accumulation, random numbers and the preparation of what a script passes."""

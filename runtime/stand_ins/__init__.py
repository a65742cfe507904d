"""Stand-ins: ``import accelerate`` gives the runtime, for programs that cannot be changed. Torch-free until used."""

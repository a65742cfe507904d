"""DeepSpeed: its plug-in, the rules of its configuration, and the engine that trains with it."""

"""Handling of preemption, stalls and spikes, to keep a run and its promises when the platform takes machines away."""

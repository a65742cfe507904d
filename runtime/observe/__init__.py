"""Observation of a run: metrics, stalls, spikes and profiles."""

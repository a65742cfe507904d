"""Weights of models: sizes, placement, loading and offloading."""

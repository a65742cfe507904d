"""Loaders of a run: every rank reads its share, keeps its position, and can go on from there."""

"""Checkpoints: complete or not there, verified before anything is loaded."""

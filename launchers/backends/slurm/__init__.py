"""Slurm: jobs are submitted with ``sbatch`` where the cluster is entered, and every node of a job runs one agent."""

from orc.launchers.backends.slurm.backend import SlurmBackend

BACKEND = SlurmBackend

__all__ = ["BACKEND", "SlurmBackend"]

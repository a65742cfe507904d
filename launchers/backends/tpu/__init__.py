"""Cloud TPU: a pod is made for each attempt, its worker machines run the agents over SSH, and it is deleted after."""

from orc.launchers.backends.tpu.backend import TpuBackend

BACKEND = TpuBackend

__all__ = ["BACKEND", "TpuBackend"]

"""Documented path of the prepared optimizer: re-exports of `orc.runtime.train.optimizer`."""

from orc.runtime.train.optimizer import AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]

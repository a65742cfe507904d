"""Documented path of the prepared scheduler: re-exports of `orc.runtime.train.scheduler`."""

from orc.runtime.train.scheduler import AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]

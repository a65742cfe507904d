"""Documented path of local SGD: re-exports of `orc.runtime.train.local_sgd`."""

from orc.runtime.train.local_sgd import LocalSGD

__all__ = ["LocalSGD"]

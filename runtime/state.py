"""Documented path of the state of a process: re-exports of `orc.runtime.core.state`."""

from orc.runtime.core.state import AcceleratorState, GradientState, PartialState

__all__ = ["AcceleratorState", "GradientState", "PartialState"]

"""Logging in many processes: by default only the main process speaks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orc.runtime.core.config import resolve
from orc.runtime.core.context import current_context, peek_context
from orc.runtime.launch.environment import detect

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # not generic in the oldest Python of a rank
    _Adapter = logging.LoggerAdapter


class MultiProcessAdapter(_Adapter):
    """A logger with two more keywords on every call.

    ``main_process_only`` (default `True`): log on rank 0 only. ``in_order`` (default `False`): with
    ``main_process_only=False``, the processes log one after the other; all of them must make the call.
    *logger* and *extra* are those of `logging.LoggerAdapter`.
    """

    def __init__(self, logger: logging.Logger, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(logger, extra)
        self._said: set[tuple[str, str]] = set()

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log *msg* if it is this process's turn.

        Args:
            level: a level of `logging`.
        """
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)
        if self.extra:
            kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        if main_only or not in_order:
            if not main_only or process_rank() == 0:
                self.logger.log(level, msg, *args, **kwargs)
            return
        ctx = current_context()
        for turn in range(ctx.world_size):
            if turn == ctx.rank:
                self.logger.log(level, msg, *args, **kwargs)
            ctx.barrier()

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """A warning that this adapter logs the first time only; with other arguments it is another warning.

        Args:
            msg: the message.
        """
        key = str(msg), repr(args)
        if key not in self._said:
            self._said.add(key)
            self.warning(msg, *args, **{"stacklevel": 3, **kwargs})


def process_rank() -> int:
    """The rank of this process. The environment has it already before the rendezvous."""
    context = peek_context()
    return detect(os.environ).rank if context is None else context.rank


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger for *name* whose records can be limited to the main process.

    Args:
        name: usually ``__name__``.
        log_level: ``DEBUG``, ``INFO``, ``WARNING``, ``ERROR`` or ``CRITICAL``; ``ORC_LOG_LEVEL`` or
            ``ACCELERATE_LOG_LEVEL`` when not given, otherwise the logger stays as it is configured.

    Raises:
        ConfigError: an unknown level.
    """
    level = resolve({"log_level": log_level}, os.environ).log_level
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level)
        logger.root.setLevel(level)
    return MultiProcessAdapter(logger, {})

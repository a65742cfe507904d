"""Moments that options take: a date, a date and time, or how long ago."""

from __future__ import annotations

import datetime
import time
from typing import Any

import click

_AGO = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class _Moment(click.ParamType["float | None"]):
    """Moment, in seconds since the epoch."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        if text[:-1].isdigit() and text[-1:] in _AGO and len(text) < 8:
            return time.time() - int(text[:-1]) * _AGO[text[-1]]
        try:
            return datetime.datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            self.fail(f"{text!r} is no time: 2026-01-31, 2026-01-31T12:00, or 7d, 12h, 30m ago.", param, ctx)


MOMENT = _Moment()

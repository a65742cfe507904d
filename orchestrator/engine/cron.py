"""Times of a cron expression in a time zone. Pure.

Expressions have the five fields of cron. Where clocks are changed they do as Debian's cron does: what is due at a time
that is skipped is due right after, what is due at a time that comes twice is due the first time, and expressions with
``*`` as the minute or hour follow the clock.
"""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from orc.launchers.errors import SpecError

_FIELDS = "minute hour day-of-month month day-of-week"


def check(cron: str, timezone: str) -> None:
    """Raise `SpecError` for an expression or a time zone that is none, and for one that is never due."""
    tz = _zone(timezone)
    if len(cron.split()) != 5:
        what = f"{cron!r} is no cron expression: it has {len(cron.split())} fields"
        raise SpecError(what, hint=f"write five: {_FIELDS}; for example '0 3 * * mon-fri'")
    _next(cron, datetime.now(tz))


def due_after(cron: str, timezone: str, after: float) -> float:
    """Return the first time after *after* at which *cron* is due; both in seconds since the epoch."""
    return _next(cron, datetime.fromtimestamp(after, _zone(timezone))).timestamp()


def newest_due(cron: str, timezone: str, first: float, now: float) -> float:
    """Return the newest time up to *now* at which *cron* was due; *first*, at which it was, if there is none."""
    moment = datetime.fromtimestamp(now + 1.0, _zone(timezone))
    return max(_next(cron, moment, backwards=True).timestamp(), first)


def shown(moment: float, timezone: str = "") -> str:
    """Return a time for people, in the time zone of this machine unless *timezone* names another."""
    tz = _zone(timezone) if timezone else None
    return datetime.fromtimestamp(moment, tz).astimezone(tz).strftime("%Y-%m-%d %H:%M:%S %Z")


def _zone(name: str) -> ZoneInfo:
    from zoneinfo import ZoneInfoNotFoundError, available_timezones

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        from orc.launchers.spec.problems import nearest

        near = nearest(name, available_timezones())
        raise SpecError(f"unknown time zone {name!r}{near}", hint="an IANA name, like Europe/Berlin") from None


def _next(cron: str, after: datetime, *, backwards: bool = False) -> datetime:
    from cronsim import CronSim, CronSimError

    # In UTC the library takes the plain way only for this very object.
    moment = after.astimezone(UTC) if str(after.tzinfo) == "UTC" else after
    try:
        return next(CronSim(cron, moment, reverse=backwards))
    except CronSimError as error:
        raise SpecError(f"{cron!r} is no cron expression: {error}", hint=f"five fields: {_FIELDS}") from None
    except StopIteration:
        raise SpecError(f"{cron!r} is never due") from None

"""Cron expressions are due when people expect it, in their time zone, where clocks are changed, too."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from orc.launchers.errors import SpecError
from orc.orchestrator.engine import cron

BERLIN = "Europe/Berlin"


def at(text: str, zone: str = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def shown(moment: float, zone: str = BERLIN) -> str:
    return datetime.fromtimestamp(moment, ZoneInfo(zone)).isoformat()


@pytest.mark.parametrize(
    ("expression", "after", "due"),
    [
        ("0 3 * * mon-fri", "2026-06-05T12:00", ["2026-06-08T03:00:00+02:00", "2026-06-09T03:00:00+02:00"]),
        # 02:30 does not exist on 29 March: it is due right after the gap, once.
        ("30 2 * * *", "2026-03-28T12:00", ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]),
        # 02:30 comes twice on 25 October: it is due the first time.
        ("30 2 * * *", "2026-10-24T12:00", ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]),
        # What follows the clock follows it through the hour that comes twice.
        ("*/30 2 * * *", "2026-10-25T02:00", ["2026-10-25T02:30:00+02:00", "2026-10-25T02:00:00+01:00"]),
    ],
)
def test_an_expression_is_due_in_its_time_zone(expression, after, due):
    found, moment = [], at(after)
    for _ in due:
        moment = cron.due_after(expression, BERLIN, moment)
        found.append(shown(moment))
    assert found == due


def test_the_newest_time_that_was_due_is_found_after_a_long_absence():
    first = at("2020-01-01T03:00")
    assert shown(cron.newest_due("0 3 * * *", BERLIN, first, at("2026-06-05T12:00"))) == "2026-06-05T03:00:00+02:00"
    assert cron.newest_due("0 3 * * *", BERLIN, first, first) == first
    assert cron.newest_due("0 3 * * *", BERLIN, first, first + 60) == first


@pytest.mark.parametrize(
    ("expression", "zone", "said"),
    [
        ("0 3 * *", "UTC", "has 4 fields"),
        ("0 0 3 * * *", "UTC", "has 6 fields"),
        ("61 3 * * *", "UTC", "Bad minute"),
        ("0 3 * * *", "Europe/Berln", "did you mean 'Europe/Berlin'?"),
        ("0 3 * * *", "../../etc/passwd", "unknown time zone"),
        ("0 0 30 2 *", "UTC", "Bad day-of-month"),
    ],
)
def test_what_is_no_expression_or_zone_is_refused(expression, zone, said):
    with pytest.raises(SpecError, match=said.replace("?", r"\?")):
        cron.check(expression, zone)

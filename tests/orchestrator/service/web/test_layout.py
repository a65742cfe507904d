"""Where things stand on the page of a job, at every width: nothing lies over anything, and what is empty is absent."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("playwright", reason="playwright is in the extra dev")
from playwright.sync_api import Page, expect

from orc.orchestrator.views import JobView

expect.set_options(timeout=30_000)  # of every expectation: none is about speed

WIDTHS = (1280, 800, 390)
# What charts draw on, and what else is in their card.
CHARTS_OVER_EACH_OTHER = """() => {
  const boxes = [...document.querySelectorAll('#charts figure')].flatMap((figure) => ['figcaption', '.uplot', 'canvas']
    .map((part) => [figure, part, figure.querySelector(part).getBoundingClientRect()]));
  const card = document.querySelector('#charts').getBoundingClientRect();
  const name = ([figure, part]) => `${part} of ${figure.dataset.metric}`;
  const outside = (box) => box.left < card.left - 1 || box.right > card.right + 1 || !box.width;
  const over = boxes.filter(([, , box]) => outside(box)).map(name);
  for (const [i, one] of boxes.entries()) for (const other of boxes.slice(0, i)) {
    const [a, b] = [one[2], other[2]];
    const apart = a.left >= b.right || b.left >= a.right || a.top >= b.bottom || b.top >= a.bottom;
    if (one[0] !== other[0] && !apart) over.push(`${name(one)} over ${name(other)}`);
  }
  return over;
}"""
SETTLED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"


@pytest.fixture(scope="module")
def trained(service) -> JobView:
    """A job that has ended and left a curve of each measurement that orc takes, and of some of its own."""
    job = service.submit("print('done')", launcher="python")
    service.wait_for(job.id, "SUCCEEDED")
    measured = ("samples_per_s", "step_s", "step_s_min", "step_s_max", "slowest_step_s", "data_wait", "data_wait_max")
    with (service.home / "state" / "jobs" / job.id / "metrics.jsonl").open("a") as lines:
        for step in range(10, 60, 10):
            values = dict.fromkeys(measured, 1 / step) | {"loss": 5 / step, "val_accuracy": 0.5, "lr": 0.1}
            lines.write(json.dumps({"at": 1e9, "attempt": 1, "restart": 0, "step": step, **values}) + "\n")
    return job


def charts_of(page: Page) -> list[str]:
    page.locator("#charts canvas").last.wait_for()
    return page.evaluate("[...document.querySelectorAll('#charts figure')].map((one) => one.dataset.metric)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_chart_lies_over_another_at_any_width(page: Page, service, trained, scheme):
    page.emulate_media(color_scheme=scheme)
    for first in WIDTHS:  # when the page is opened
        page.set_viewport_size({"width": first, "height": 800})
        page.goto(f"{service.url}/jobs/{trained.id}")
        assert len(charts_of(page)) > 3
        assert page.evaluate(CHARTS_OVER_EACH_OTHER) == [], first
        for width in WIDTHS:  # and when its window changes
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate(SETTLED)
            assert page.evaluate(CHARTS_OVER_EACH_OTHER) == [], f"{first} to {width}"

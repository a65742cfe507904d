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
    measured = (
        "mfu",
        "samples_per_s",
        "step_s",
        "step_s_min",
        "step_s_max",
        "slowest_step_s",
        "data_wait",
        "data_wait_max",
    )
    memory = {"memory_allocated": 3 << 30, "memory_reserved": 4 << 30, "memory_peak": 5 << 30}
    with (service.home / "state" / "jobs" / job.id / "metrics.jsonl").open("a") as lines:
        for step in range(10, 60, 10):
            values = dict.fromkeys(measured, 1 / step) | {"loss": 5 / step, "val_accuracy": 0.5, "lr": 0.1, **memory}
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


def test_charts_begin_with_the_loss_then_what_orc_does_not_measure_and_spreads_have_none_of_their_own(visit, trained):
    page = visit(f"/jobs/{trained.id}")
    assert charts_of(page) == [
        *("loss", "val_accuracy", "lr"),
        *("samples_per_s", "step_s", "slowest_step_s", "data_wait", "mfu", "memory_allocated"),
    ]
    expect(page.get_by_role("img", name="step time (s): 0.02 at step 50")).to_be_visible()
    expect(page.get_by_role("img", name="memory of the fullest GPU: 3 GiB at step 50")).to_be_visible()


def test_a_log_is_as_high_as_its_lines_up_to_a_bound_and_absent_without_any(service, visit, trained):
    page = visit(f"/jobs/{trained.id}")
    log = page.locator("#log")
    expect(log.locator(".l")).to_have_text("done")
    assert log.bounding_box()["height"] < 60
    long = service.submit("print('line\\n' * 500)")
    silent = service.submit("pass")
    for job in (long, silent):
        service.wait_for(job.id, "SUCCEEDED")
    visit(f"/jobs/{long.id}")
    expect(log.locator(".l").last).to_be_visible()
    assert 300 < log.bounding_box()["height"] < 900
    visit(f"/jobs/{silent.id}")
    expect(page.locator("#log-note")).to_have_text("nothing printed")
    expect(log).to_be_hidden()


def test_facts_are_called_by_the_words_of_the_cluster(visit, trained):
    facts = visit(f"/jobs/{trained.id}").locator("#facts")
    expect(facts.locator("dt")).to_have_text(
        ["Owner", "Cluster", "Size", "Created", "Elapsed", "Directory", "Job file", "Snapshots"]
    )

"""Ten situations in which the page is looked at: what stands where, and what is absent."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is in the extra dev")
from playwright.sync_api import Locator, Page, Route, expect

from orc.launchers.spec.groups import load_jobs
from orc.orchestrator.clients import groups
from orc.orchestrator.views import JobView

expect.set_options(timeout=30_000)  # of every expectation: none is about speed

SPEAKS = """
import json, os, pathlib, time
rank = int(os.environ["RANK"])
print(f"2026-01-01T00:00:0{rank}Z first of {rank}", flush=True)
print(f"2026-01-01T00:00:1{9 - rank}Z second of {rank}", flush=True)
if rank == 0:
    told = {"step": 300, "epoch": 1, "samples": 50, "of": 100, "loss": 0.25, "at": 1e9}
    pathlib.Path(os.environ["ORC_ATTEMPT_DIR"], "node-0", "progress.json").write_text(json.dumps(told))
time.sleep(600)
"""
SHIFTS = """() => {
  window.shifts = [];
  const note = (list) => shifts.push(...list.getEntries().filter((one) => !one.hadRecentInput).map((one) => one.value));
  new PerformanceObserver(note).observe({ type: 'layout-shift' });
}"""
IN_VIEW = """() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"""


@pytest.fixture(scope="module")
def measure(service) -> Callable[..., None]:
    """Writes lines of metrics of a job."""

    def write(job: str, lines: list[Mapping[str, Any]]) -> None:
        folder = service.home / "state" / "jobs" / job
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"restart": 0, "at": 1e9 + line["step"], **line}) + "\n" for line in lines)

    return write


@pytest.fixture(scope="module")
def ended(service, measure) -> list[JobView]:
    """Two jobs of different code and arguments that have ended; the second went on from step 20 in an attempt 2."""
    jobs = [service.submit(f"print({lr})", args={"lr": lr}) for lr in (0.1, 0.2)]
    for number, job in enumerate(jobs, 1):
        service.wait_for(job.id, "SUCCEEDED")
        curves = [{"step": step, "loss": number / step, "val_loss": 2 * number / step} for step in range(10, 60, 10)]
        measure(
            job.id, [{"attempt": 1, **line, "step_s": 0.5, "step_s_min": 0.4, "step_s_max": 0.7} for line in curves]
        )
        if number == 2:
            measure(job.id, [{"attempt": 2, **line} for line in curves[1:]])
    return jobs


@pytest.fixture(scope="module")
def running(service, measure) -> JobView:
    """A job of three ranks that runs, in its second epoch of four."""
    job = service.submit(SPEAKS, launcher="torchrun", resources={"procs_per_node": 3}, args={"epochs": 4})
    service.wait_for(job.id, "RUNNING")
    measure(job.id, [{"attempt": 1, "step": 300, "loss": 0.25, "step_s": 0.5, "samples_per_s": 64}])
    ranks = {str(rank): {"step": 300 - rank, "step_s": 0.5, "data_wait": 0.1 * rank} for rank in range(3)}
    (service.home / "state" / "jobs" / job.id / "ranks.json").write_text(
        json.dumps({"at": 1e9, "attempt": 1, "ranks": ranks})
    )
    return job


@pytest.fixture(scope="module")
def failed(service) -> JobView:
    """A job that failed today."""
    job = service.submit("raise ValueError('out of luck')")
    service.wait_for(job.id, "FAILED")
    return job


@pytest.fixture(scope="module")
def waiting(service, running) -> JobView:
    """A job that waits for the one that runs."""
    return service.submit("pass", depends_on=[f"{running.id}:any"])


def cards(page: Page) -> list[str]:
    """The visible parts of a job's page, in their order."""
    page.locator("#events li").first.wait_for()
    found = page.locator("#job > div > .card:visible")
    return found.evaluate_all("(all) => all.map((e) => e.id || e.querySelector('h2, summary').textContent)")


def figures(page: Page) -> Locator:
    return page.locator("#headline > div")


def test_1_an_empty_list_says_how_jobs_come(visit):
    page = visit("/?q=no-such-job")
    expect(page.locator("#empty")).to_have_text("No job matches.")
    expect(page.locator("#chips button").first).to_have_text("All 0")


def test_2_the_list_tells_how_far_jobs_are_what_they_wait_for_and_why_they_failed(
    visit, service, ended, running, failed, waiting
):
    page = visit("/")
    row = page.locator("#rows tr").filter(has=page.get_by_role("link", name=running.id, exact=True))
    expect(row.locator(".c-progress")).to_contain_text(re.compile(r"37 %\s*epoch 1 · step 300"))
    expect(row.locator("progress")).to_have_attribute("value", "0.375")
    expect(row.locator(".c-loss")).to_have_text("0.25")
    expect(row.locator(".c-size")).to_have_text("1 node")
    expect(row.locator(".c-duration")).to_contain_text(re.compile(r"\d"))
    expect(page.locator("#rows tr", has_text=failed.id).last).to_contain_text("ValueError: out of luck")
    for element, shown in (("#waiting-now", (waiting.id, running.id)), ("#failed-now", (failed.id, "ValueError"))):
        for text in shown:
            expect(page.locator(f"{element} li").first).to_contain_text(text)
    expect(page.locator("#clusters-now")).to_contain_text(re.compile("local.*1 running, 1 waiting"))
    chips = page.locator("#chips button")
    expect(chips).to_have_text(
        ["All 5", "Running 1", "Waiting 1", "Failed 1", "Failed today 1", "Succeeded 2", "Cancelled 0"]
    )


def test_a_cluster_that_is_slow_to_answer_is_asked_for_its_queue_once(service, visit, page, running):
    asked = []
    lab = {"name": "lab", "kind": "slurm", "has_queue": True, "error": "no route to host"}
    page.route("**/api/v1/clusters", lambda route: route.fulfill(json={"clusters": [lab]}))
    page.route("**/clusters/lab/queue", lambda route: asked.append(route))  # it never answers
    visit("/")
    for _ in range(2):
        job = service.submit("pass", depends_on=[running.id])
        expect(page.locator("#waiting-now")).to_contain_text(job.id)
    expect(page.locator("#clusters-now li")).to_have_text("labdoes not answer · idle")
    assert len(asked) == 1


def test_3_chips_and_columns_are_chosen_and_stay(visit, ended, running, failed, waiting):
    page = visit("/")
    page.locator("#chips button", has_text="Failed today").click()
    expect(page.locator("#rows tr")).to_have_count(1)
    expect(page).to_have_url(re.compile(r"\?state=FAILED&ended=today$"))
    page.get_by_text("Columns", exact=True).click()
    page.get_by_label("Owner", exact=True).last.uncheck()
    page.get_by_label("Attempts", exact=True).check()
    page.reload()
    expect(page.locator("#rows tr")).to_have_count(1)
    expect(page.locator("#chips button[aria-pressed=true]")).to_have_text("Failed today 1")
    expect(page.locator("#head .c-owner")).to_be_hidden()
    expect(page.locator("#head .c-attempts")).to_be_visible()
    page.evaluate("localStorage.clear()")


def test_4_a_job_that_waits_begins_with_what_for(visit, waiting, running):
    page = visit(f"/jobs/{waiting.id}")
    expect(page.locator("#diagnosis")).to_contain_text(running.id)
    expect(page.locator("#links")).to_contain_text(f"{running.id} (any)")
    assert cards(page) == ["diagnosis", "Timeline", "plan", "spec"]


def test_5_a_job_that_runs_begins_with_its_figures_then_curves_ranks_and_log(visit, running):
    page = visit(f"/jobs/{running.id}")
    expect(figures(page).locator("dt")).to_have_text(["Progress", "Loss", "Speed", "Time left", "Use"])
    expect(figures(page).nth(0)).to_contain_text(re.compile(r"37 %\s*epoch 1 · step 300"))
    expect(figures(page).nth(2)).to_contain_text(re.compile(r"2 steps/s\s*64 samples/s"))
    expect(figures(page).nth(3)).to_contain_text("4 min 10 s")  # 500 steps of half a second
    expect(page.locator("button.rank").last).to_contain_text("step 298 · 0.5 s · waits 20 %")
    assert cards(page) == ["headline", "charts-card", "ranks-card", "log-card", "Timeline", "plan", "spec"]


def test_6_a_job_that_failed_says_why_below_its_figures(visit, failed):
    page = visit(f"/jobs/{failed.id}")
    expect(page.locator("#diagnosis strong")).to_contain_text("ValueError: out of luck")
    expect(page.locator("#log .l").last).to_contain_text("ValueError")
    assert cards(page) == ["headline", "diagnosis", "ranks-card", "log-card", "Timeline", "plan", "spec"]


def test_7_charts_share_what_belongs_together_and_mark_attempts(visit, ended):
    page = visit(f"/jobs/{ended[1].id}")
    charts = page.locator("#charts figure")
    expect(charts).to_have_count(2)
    expect(charts.first).to_have_attribute("aria-label", "loss: loss 0.04, val_loss 0.08 at step 50")
    expect(page.locator("#charts-note")).to_have_text("attempt 2 went on at step 20")
    heights = charts.evaluate_all("(all) => all.map((e) => e.querySelector('canvas').getBoundingClientRect().height)")
    assert heights[0] > heights[1]
    # The pointer of one chart is that of all.
    charts.first.locator(".u-over").hover(position={"x": 1, "y": 50})
    expect(charts.last).to_have_attribute("aria-label", "step time (s): 0.5 at step 10")
    page.mouse.move(0, 0)
    page.get_by_label("Axis").select_option("time")
    expect(charts.first).to_have_attribute("aria-label", re.compile("val_loss 0.08 after 40 s"))
    page.get_by_label("Smoothing").fill("0.5")
    expect(charts.first).to_have_attribute("aria-label", re.compile(r"loss 0\.0(?!4\b)\d+"))
    page.get_by_label("Log scale").check()
    page.reload()
    expect(page.get_by_label("Log scale")).to_be_checked()
    expect(charts.first).to_have_attribute("aria-label", re.compile("after 40 s"))
    page.evaluate("localStorage.clear()")


def test_8_many_ranks_are_a_heat_map_by_state_step_and_speed(visit, page, running):
    def of_many(route: Route) -> None:
        answer = route.fetch()
        if route.request.url.endswith("/ranks"):
            told = {str(rank): {"step": 1000 - rank, "step_s": 0.1} for rank in range(512)}
            route.fulfill(json={"at": 1e9, "ranks": told})
        else:
            job = answer.json()
            job["spec"]["resources"] |= {"nodes": 64, "procs_per_node": 8}
            route.fulfill(json=job)

    page.route(re.compile(rf"/api/v1/jobs/{running.id}(/ranks)?$"), of_many)
    visit(f"/jobs/{running.id}")
    cells = page.locator("#ranks button.cell")
    expect(cells).to_have_count(512)
    expect(cells.first).to_have_attribute("data-state", "running")
    page.get_by_label("Ranks by").select_option("Step")
    expect(cells.first).to_have_attribute("data-level", "4")
    expect(cells.last).to_have_attribute("data-level", "0")
    expect(page.get_by_role("button", name="rank 511: running · step 489 · 0.1 s")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_9_the_logs_of_all_ranks_are_one_by_time_with_a_colour_for_each(visit, running):
    page = visit(f"/jobs/{running.id}")
    page.get_by_label("Log of").select_option("all ranks by time")
    lines = page.locator("#log .l")
    times = [(0, "00", "first"), (1, "01", "first"), (2, "02", "first"), (2, "17", "second"), (1, "18", "second")]
    expect(lines).to_have_text(
        [f"rank {rank} 2026-01-01T00:00:{at}Z {which} of {rank}" for rank, at, which in times]
        + ["rank 0 2026-01-01T00:00:19Z second of 0"]
    )
    colours = lines.locator(".of").evaluate_all("(all) => all.slice(0, 3).map((e) => getComputedStyle(e).color)")
    assert len(set(colours)) == 3
    page.get_by_label("Log of").select_option("rank 1")
    expect(lines).to_have_count(2)


def test_speeds_of_ranks_follow_while_a_job_runs_and_the_focus_stays(service, visit, running):
    page = visit(f"/jobs/{running.id}")
    rank = page.locator("#ranks [data-rank='2']")
    expect(rank).to_contain_text("step 298")
    rank.focus()
    told = {"at": 1e9, "attempt": 1, "ranks": {"2": {"step": 400}}}
    (service.home / "state" / "jobs" / running.id / "ranks.json").write_text(json.dumps(told))
    expect(rank).to_contain_text("step 400", timeout=30_000)
    expect(rank).to_be_focused()


def test_10_jobs_are_compared_by_curves_specification_and_code(visit, ended):
    page = visit("/?q=digits&state=SUCCEEDED")
    expect(page.locator("#compare")).to_have_attribute("aria-disabled", "true")
    page.locator("#rows tr").first.wait_for()
    for _ in ended:
        page.keyboard.press("j")
        page.keyboard.press("x")
    page.get_by_role("link", name="Compare 2").click()
    table = page.locator("#differences tbody tr")
    expect(table.filter(has_text="args --lr")).to_have_text(re.compile(r"0\.[12]\s*0\.[12]"))
    expect(table.filter(has_text="Lowest loss").locator("strong")).to_have_text("0.02")
    expect(page.locator("#charts figure").first).to_have_attribute("aria-label", re.compile("(.*digits-){4}"))
    expect(page.locator("#code")).to_contain_text("train.py (changed)")
    expect(page.locator("#code ins").last).to_have_text(re.compile(r"\+print\(0\.[12]\)"))


def test_a_sweep_is_drawn_with_an_axis_for_each_parameter_and_its_best_run(service, visit, measure):
    file = service.job_file("pass", sweep={"grid": {"env.LR": ["0.1", "0.2"], "env.OPT": ["adam", "<b>sgd</b>"]}})
    with service.client() as client:
        sweep = groups.submit(client.session, load_jobs(file))
    for number, member in enumerate(sweep.members):
        measure(member.job.id, [{"attempt": 1, "step": 1, "loss": 1.0 / (number + 1)}])
    page = visit(f"/groups/{sweep.id}")
    best = sweep.members[-1].job.id
    expect(page.locator("#runs p")).to_contain_text(f"Best run: {best} with a loss of 0.25")
    expect(page.locator("#runs svg .name")).to_have_text(["env.LR", "env.OPT", "best loss"])
    expect(page.locator("#runs svg a")).to_have_count(4)
    expect(page.locator("#runs svg a.best")).to_have_attribute("href", f"/jobs/{best}")
    expect(page.locator("#runs svg text", has_text="<b>sgd</b>")).to_be_visible()
    expect(page.locator("#members tbody tr")).to_have_count(4)
    expect(page.locator("#members tbody tr").last).to_contain_text(f"{best}0.2<b>sgd</b>")
    expect(page.locator("#members strong")).to_have_text("0.25")


def test_nothing_moves_while_states_and_figures_change_in_a_list_of_10_000_jobs(service, visit, running, failed):
    with sqlite3.connect(next((service.home / "state").glob("*.db"))) as database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(jobs)")]
        row = database.execute("SELECT * FROM jobs WHERE id = ?", (failed.id,)).fetchone()
        old = dict(zip(columns, row, strict=True))
        rows = [
            tuple((old | {"id": f"old-{n:06d}", "name": "old", "created_at": 1e9 - n, "ended_at": 1e9}).values())
            for n in range(10_000)
        ]
        database.executemany(f"INSERT INTO jobs VALUES ({', '.join('?' * len(columns))})", rows)
    job = service.submit(SPEAKS)
    service.wait_for(job.id, "RUNNING")
    page = visit("/")
    row_of = page.locator("#rows tr").filter(has=page.get_by_role("link", name=job.id, exact=True))
    expect(row_of.locator(".c-progress")).to_contain_text("step 300")
    expect(page.locator("#rows tr")).to_have_count(50)
    page.evaluate(SHIFTS)
    with service.client() as client:
        client.cancel([job.id], grace_s=0)
    expect(row_of.locator(".state")).to_have_text("cancelled")
    page.evaluate(IN_VIEW)
    assert sum(page.evaluate("window.shifts")) < 0.01

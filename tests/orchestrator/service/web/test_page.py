"""The page in a real browser, against a real service with real jobs of this machine."""

from __future__ import annotations

import getpass
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

pytest.importorskip("playwright", reason="playwright is in the extra dev")
from playwright.sync_api import Browser, Page, expect

from orc.launchers.spec import load_job
from orc.orchestrator.views import JobView

expect.set_options(timeout=30_000)  # of every expectation: none is about speed

TALKS = """
import os, pathlib, time
print("rank", os.environ["RANK"], "begins", flush=True)
number = 0
while not pathlib.Path(os.environ["RELEASE"]).exists():
    print(f"line {number}", flush=True)
    number += 1
    time.sleep(0.05)
print("the end", flush=True)
"""
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
FAILS = f"""
import json, os, sys, time
for number in range(3000):
    print("line", number, flush=number % 100 == 0)
print("\\x1b[31mred\\x1b[0m {HOSTILE} \\x1b]0;title\\x07 \\u202egnp.exe", flush=True)
raise RuntimeError("out of luck {HOSTILE}")
"""
ACCESSIBLE = """() => {
  const shown = (e) => e.checkVisibility() && !e.closest('dialog:not([open])');
  const bad = [];
  for (const e of document.querySelectorAll(
      'a, button, input, select, summary, [role=img], dialog, section, table, form[role]')) {
    if (!shown(e)) continue;
    const by = e.getAttribute('aria-labelledby');
    const name = e.getAttribute('aria-label') || (by && document.getElementById(by)?.textContent)
      || e.labels?.[0]?.textContent
      || (['INPUT', 'SELECT', 'SECTION', 'TABLE'].includes(e.tagName) ? '' : e.textContent);
    if (!name?.trim()) bad.push('no name: ' + e.outerHTML.slice(0, 120));
  }
  const levels = [...document.querySelectorAll('h1, h2, h3, h4')].filter(shown).map((e) => Number(e.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1) bad.push('h1: ' + levels);
  levels.forEach((level, i) => i && level > levels[i - 1] + 1 && bad.push('headings skip: ' + levels));
  const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
  ids.forEach((id, i) => ids.indexOf(id) !== i && bad.push('id twice: ' + id));
  for (const e of document.querySelectorAll('th:not([scope])')) bad.push('th without scope: ' + e.outerHTML);
  if (!document.documentElement.lang || !document.title) bad.push('lang, title');
  return bad;
}"""


@pytest.fixture(scope="module")
def release(service) -> Iterator[Path]:
    """The talking job ends when this file exists."""
    path = service.home / "release"
    yield path
    path.touch()


@pytest.fixture(scope="module")
def failed(service) -> JobView:
    """A job whose rank 1 failed, with texts from outside wherever there are some."""
    resources = {"nodes": 1, "procs_per_node": 2}
    return service.submit(FAILS, resources=resources, launcher="torchrun", tags={"note": HOSTILE})


@pytest.fixture(scope="module")
def talking(service, release, failed) -> JobView:
    """A job that prints on and on."""
    return service.submit(TALKS, env={"RELEASE": str(release)}, tags={"kind": "talking"})


@pytest.fixture(scope="module", autouse=True)
def _ended(service, failed, talking) -> None:
    service.wait_for(talking.id, "RUNNING")
    service.wait_for(failed.id, "FAILED")


def state_of(page: Page, job: JobView):
    row = page.locator("#rows tr").filter(has=page.get_by_role("link", name=job.id, exact=True))
    return row.locator(".state")


ELSEWHERE = ("/.//elsewhere.example/", "//elsewhere.example/", "/\\elsewhere.example", "\\\\elsewhere.example/x")
ELSEWHERE += ("https://elsewhere.example", "https:elsewhere.example", "/\t/elsewhere.example", "/%2F/elsewhere.example")
ELSEWHERE += (
    "javascript:document.title='run'",
    "data:text/html,x",
    "http://[",
    "/..//elsewhere.example",
    "@elsewhere.example",
)


@pytest.mark.parametrize("given", ELSEWHERE)
def test_logging_in_leads_to_this_service_alone(service, chromium: Browser, given):
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{service.url}/login?{urlencode({'next': given})}")
    page.get_by_label("Token").fill(service.token("vera", "viewer"))
    with page.expect_navigation(url=lambda url: "/login" not in url, wait_until="commit") as left:
        page.keyboard.press("Enter")
    assert urlsplit(left.value.url).netloc == urlsplit(service.url).netloc
    assert page.title() != "run"
    context.close()


def test_a_stranger_has_to_log_in_and_a_viewer_changes_nothing(service, chromium: Browser, talking):
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{service.url}/jobs/{talking.id}")
    expect(page).to_have_url(re.compile(r"/login\?next="))
    page.get_by_label("Token").fill("orc_wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("token")
    page.get_by_label("Token").fill(service.token("vera", "viewer"))
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{service.url}/jobs/{talking.id}")
    expect(page.locator("#user")).to_have_text("vera (viewer)")
    expect(page.locator("#state")).to_have_text("running")
    expect(page.get_by_role("button", name="Clone with changes")).to_be_hidden()
    expect(page.get_by_role("link", name="Access")).to_be_hidden()
    assert [cookie["httpOnly"] for cookie in context.cookies()] == [True]
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(re.compile("/login"))
    assert context.cookies() == []
    context.close()


def test_a_job_appears_and_changes_its_state_by_itself(service, visit):
    page = visit("/")
    page.locator("#rows tr").first.wait_for()
    gate = service.home / "gate"
    job = service.submit(TALKS, env={"RELEASE": str(gate)})
    expect(state_of(page, job)).to_have_text("running")
    gate.touch()
    expect(state_of(page, job)).to_have_text("succeeded")


def test_filters_search_and_the_page_after_are_asked_of_the_service(service, visit, failed, talking):
    with sqlite3.connect(next((service.home / "state").glob("*.db"))) as database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(jobs)")]
        values = dict(
            zip(columns, database.execute("SELECT * FROM jobs WHERE id = ?", (failed.id,)).fetchone(), strict=True)
        )
        for number in range(60):
            old = {**values, "id": f"old-{number:06d}", "name": "old", "created_at": 1e9 - number, "owner": HOSTILE}
            database.execute(f"INSERT INTO jobs VALUES ({', '.join('?' * len(columns))})", tuple(old.values()))
    page = visit("/")
    more = page.get_by_role("button", name="Show older jobs")
    more.click()
    expect(page.locator("#rows tr", has_text="old-000059")).to_be_visible()
    assert page.locator("#rows img, #rows script").count() == 0
    expect(more).to_be_hidden()
    page.locator("#chips button[data-state=FAILED]").first.click()
    page.get_by_label("Search names and ids").fill(failed.id)
    expect(page.locator("#rows tr")).to_have_count(1)
    expect(page.locator("#rows .tag")).to_have_text(f"note={HOSTILE}")
    page.reload()  # what is chosen stands in the address
    expect(page.locator("#rows tr")).to_have_count(1)
    page.get_by_label("Search names and ids").fill("no-such-job")
    expect(page.locator("#empty")).to_have_text("No job matches.")
    page.get_by_role("button", name="Clear").click()
    expect(state_of(page, talking)).to_be_visible()


def test_a_failed_job_says_first_why_and_text_from_outside_stays_text(visit, failed):
    page = visit(f"/jobs/{failed.id}")
    diagnosis = page.locator("#diagnosis")
    expect(diagnosis.get_by_role("heading")).to_have_text("Why it failed")
    expect(diagnosis).to_contain_text("crash")
    expect(diagnosis).to_contain_text(re.compile(r"rank [01] on .* exited with 1"))
    expect(diagnosis.locator("pre")).to_contain_text(f"RuntimeError: out of luck {HOSTILE}")
    log = page.locator("#log")
    expect(log).to_contain_text("Traceback")
    expect(log.locator(".a1", has_text="red")).to_be_visible()
    line = log.locator(".l", has_text=f"red {HOSTILE}").first
    expect(line).to_contain_text("\\u202e")
    expect(line).not_to_contain_text("title")
    expect(page.locator("#ranks button[data-rank]")).to_have_count(2)
    expect(page.locator("#ranks button[data-state=failed]", has_text="exit 1").first).to_be_visible()
    expect(page.locator("#events li").first).to_contain_text("the job has failed")
    assert page.locator("main img, main script").count() == 0


def test_a_log_is_searched_and_read_back_to_its_beginning(visit, failed):
    page = visit(f"/jobs/{failed.id}")
    expect(page.locator("#log")).to_contain_text("Traceback")
    page.keyboard.press("/")
    page.keyboard.type("LINE 17")
    page.keyboard.press("Enter")
    expect(page.locator("#found")).to_contain_text("lines with")
    page.get_by_role("button", name="line 1700", exact=True).click()
    expect(page.locator("#log .found")).to_have_text("line 1700")
    earlier = page.get_by_role("button", name="Earlier")
    while earlier.is_enabled():
        earlier.click()
    expect(page.locator("#log .l").first).to_have_text("line 0")


def test_a_log_is_followed_until_somebody_scrolls_and_then_again(visit, talking):
    page = visit(f"/jobs/{talking.id}")
    log = page.locator("#log")

    def printed() -> list[int]:
        return [int(n) for n in re.findall(r"line (\d+)", "\n".join(log.locator(".l").all_text_contents()))]

    expect(log.locator(".l", has_text="line 40").first).to_be_attached()
    expect(log.locator(".l", has_text=f"line {printed()[-1] + 5}").first).to_be_attached()
    page.evaluate("document.querySelector('#log').scrollTop = 0")
    expect(page.get_by_role("button", name="Follow")).to_have_attribute("aria-pressed", "false")
    expect(page.locator("#log-note")).to_contain_text("paused")
    paused = printed()[-1]
    page.keyboard.press("f")
    expect(log.locator(".l", has_text=f"line {paused + 5}").first).to_be_attached()
    numbers = printed()
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))  # nothing twice, nothing left out


def test_a_long_log_keeps_a_bounded_window_of_lines(visit):
    page = visit("/clusters")
    kept = page.evaluate(
        """async () => {
          const { LogWindow } = await import('/static/log_window.js');
          const shown = new LogWindow(document.createElement('div'));
          let end = 0;
          for (let n = 0; n < 60000; n += 3) {
            const text = `line ${n}\\nline ${n + 1}\\n\\nline ${n + 2}`.padEnd(60) + '\\n';
            end += text.length;
            shown.append(text.slice(0, 11), end - text.length + 11);
            shown.append(text.slice(11), end);
          }
          return [shown.lines, shown.element.lastChild.lastChild.textContent.trim(), shown.end === end];
        }"""
    )
    assert kept[0] <= 4100
    assert kept[1:] == ["line 59999", True]


def test_a_clone_shows_what_changes_before_it_is_sent(service, visit, failed):
    page = visit(f"/jobs/{failed.id}")
    page.get_by_role("button", name="Clone with changes").click()
    expect(page.locator("#diff")).to_contain_text("nothing")
    page.get_by_label("Key", exact=True).fill("grace")
    page.get_by_label("New value").fill("7")
    expect(page.locator("#diff del")).to_contain_text("- grace: 2")
    expect(page.locator("#diff ins")).to_have_text("+ grace: 7")
    page.get_by_label("Key", exact=True).fill("graec")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.locator("#clone-problem")).to_contain_text("grace")  # the nearest key
    page.get_by_label("Key", exact=True).fill("grace")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url(re.compile(rf"/jobs/(?!{failed.id})"))
    expect(page.locator("#links")).to_contain_text(failed.id)
    with service.client() as client:
        assert client.job(page.url.rpartition("/")[2]).spec["grace"] == 7.0


def test_a_running_job_is_cancelled_from_its_page(service, visit, release):
    job = service.submit(TALKS, env={"RELEASE": str(release)})
    page = visit(f"/jobs/{job.id}")
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_label("Grace in seconds").fill("0")
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("#state")).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_hidden()


def test_curves_of_a_training_go_on_while_it_runs(service, visit, talking):
    file = service.home / "state" / "jobs" / talking.id / "metrics.jsonl"
    with file.open("a") as lines:
        for step in range(10, 40, 10):
            line = {"at": 1e9 + step, "attempt": 1, "restart": 0, "step": step, "loss": 5.0 / step, "step_s": 0.1}
            lines.write(json.dumps(line) + "\n")
        lines.flush()
        page = visit(f"/jobs/{talking.id}")
        expect(page.get_by_role("img", name="loss: 0.1667 at step 30")).to_be_visible()
        expect(page.get_by_role("img", name="step time (s): 0.1 at step 30")).to_be_visible()
        lines.write(json.dumps({**line, "step": 50, "loss": 0.01}) + "\n")
    expect(page.get_by_role("img", name="loss: 0.01 at step 50")).to_be_visible()


def test_everything_can_be_reached_with_the_keyboard(visit):
    page = visit("/")
    page.locator("#rows tr").nth(2).wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    second = page.locator("#rows [data-row]").nth(1)
    expect(second).to_be_focused()
    page.keyboard.press("k")
    expect(page.locator("#rows [data-row]").first).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_label("Search names and ids")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/jobs/*")
    page.keyboard.press("g")
    page.wait_for_url("**/")


def test_tokens_are_made_shown_once_and_revoked_and_the_audit_log_says_so(service, visit):
    page = visit("/admin")
    page.get_by_label("User").fill("grace")
    page.get_by_role("button", name="Create token").click()
    expect(page.locator("#created pre")).to_have_text(re.compile(r"orc_\S{30,}"))
    page.evaluate("window.confirm = () => true")
    page.get_by_role("button", name=re.compile("of grace$")).click()
    expect(page.locator("#tokens tr", has_text="grace")).to_contain_text("revoked")
    expect(page.locator("#audit tbody tr").first).to_contain_text(getpass.getuser())


def test_schedules_are_paused_and_deleted_and_quotas_set_and_removed(service, visit):
    with service.client() as client:
        made = client.create_schedule(load_job(service.job_file("print(1)")), "0 3 * * *", name="<b>nightly</b>")
    page = visit("/schedules")
    row = page.locator("#schedules tbody tr")
    expect(row).to_contain_text("<b>nightly</b>")  # as text
    page.get_by_role("button", name="Pause <b>nightly</b>").click()
    expect(row).to_contain_text("paused")
    with service.client() as client:
        assert [one.enabled for one in client.schedules() if one.id == made.id] == [False]
    page.get_by_role("button", name="Resume <b>nightly</b>").click()
    expect(row).not_to_contain_text("paused")
    page.evaluate("window.confirm = () => true")
    page.get_by_role("button", name="Delete <b>nightly</b>").click()
    expect(page.locator("#schedules")).to_contain_text("No job is submitted by the clock")
    page.get_by_label("Name").fill("grace")
    page.get_by_label("Amount").fill("8")
    page.get_by_role("button", name="Set quota").click()
    expect(page.locator("#quotas tbody tr")).to_have_text(re.compile("user\\s*grace\\s*gpus\\s*8"))
    page.get_by_role("button", name="Remove the quota of gpus of grace").click()
    expect(page.locator("#quotas")).to_contain_text("Nobody's use is limited")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_every_width_and_have_names_for_everything(service, page: Page, failed, talking, scheme):
    page.emulate_media(color_scheme=scheme)
    for path, ready in (
        ("/", "#rows tr"),
        (f"/jobs/{failed.id}", "#log .l"),
        ("/clusters", "#clusters .card"),
        ("/schedules", "#quotas .empty"),
        ("/admin", "#tokens td"),
        ("/groups/none", ".error"),
        (f"/compare?job={failed.id}&job={talking.id}", "#differences td"),
    ):
        page.goto(service.url + path)
        page.locator(ready).first.wait_for()
        dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        ground = [int(n) for n in re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))]
        assert (sum(ground[:3]) < 200) == dark == (scheme == "dark"), path
        assert page.evaluate(ACCESSIBLE) == [], path
        for width in (1280, 375):
            page.set_viewport_size({"width": width, "height": 800})
            # Curves are drawn anew after the window has changed.
            expect(page.locator("html"), path).to_have_js_property("scrollWidth", width)


def test_the_theme_can_be_switched_and_stays(visit):
    page = visit("/clusters")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Switch between light and dark").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    page.evaluate("localStorage.clear()")


def test_a_page_finds_the_service_again_after_a_restart(service, visit, talking, release):
    page = visit("/")
    expect(state_of(page, talking)).to_have_text("running")
    service.stop()
    expect(page.locator("#banner")).to_be_visible(timeout=30_000)
    expect(state_of(page, talking)).to_have_text("running")  # what was known stays
    release.touch()
    service.start()
    expect(page.locator("#banner")).to_be_hidden(timeout=30_000)
    expect(state_of(page, talking)).to_have_text("succeeded")

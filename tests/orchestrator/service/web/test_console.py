"""What pages leave in the console of the browser where nothing is wrong: no error."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright", reason="playwright is in the extra dev")
from playwright.sync_api import Browser, Page, Request, expect

expect.set_options(timeout=30_000)  # of every expectation: none is about speed


def errors_of(page: Page) -> list[str]:
    """What the console of *page* gets from now on that is an error or a warning."""
    said: list[str] = []
    wrong = ("error", "warning")
    page.on("console", lambda m: said.append(f"{m.text} {m.location.get('url')}") if m.type in wrong else None)
    return said


@pytest.fixture(scope="module")
def ended(service) -> str:
    """Id of a job that has printed something and ended."""
    job = service.submit("print('done')")
    service.wait_for(job.id, "SUCCEEDED")
    return job.id


def test_no_page_leaves_an_error_in_the_console(service, page: Page, ended):
    other = service.submit("print(2)").id
    said = errors_of(page)
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    for path, ready in (
        ("/", "#rows tr"),
        (f"/jobs/{ended}", "#log .l"),
        ("/clusters", "#clusters .card"),
        ("/schedules", "#quotas .empty"),
        ("/admin", "#tokens td"),
        (f"/compare?job={ended}&job={other}", "#code pre"),
        ("/login", "#token"),
    ):
        page.goto(service.url + path)
        page.locator(ready).first.wait_for()
        answers = [request.response() for request in asked if not request.url.partition("?")[0].endswith("stream")]
        assert [answer.url for answer in answers if answer and answer.status >= 400] == [], path
        assert said == [], path
        asked.clear()


def test_a_stranger_is_led_to_the_login_before_a_page_asks_for_data(service, chromium: Browser, ended):
    context = chromium.new_context()
    page = context.new_page()
    said = errors_of(page)
    for path in ("/?state=FAILED", f"/jobs/{ended}", "/groups/none", "/clusters", "/schedules", "/admin"):
        page.goto(service.url + path)
        expect(page).to_have_url(re.compile("/login[?]next="))
        assert said == [], path
    page.get_by_label("Token").fill(service.token("vera", "viewer"))
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{service.url}/admin")
    context.close()


def test_a_link_of_another_site_leads_who_is_logged_in_to_the_page(service, context, ended):
    page = context.new_page()
    page.route(
        "http://elsewhere.example/",
        lambda route: route.fulfill(content_type="text/html", body=f"<a href='{service.url}/jobs/{ended}'>the job</a>"),
    )
    page.goto("http://elsewhere.example/")
    with page.expect_request(f"{service.url}/jobs/{ended}") as followed:
        page.get_by_role("link").click()
    assert "orc_session" not in followed.value.all_headers().get("cookie", "")  # the case that this test is about
    expect(page.locator("#state")).to_have_text("succeeded")
    page.close()

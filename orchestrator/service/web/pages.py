"""Pages of the service. They hold no data: their scripts get it from the API, as the user who is logged in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import jinja2
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from orc.orchestrator.service.auth import public, token_of

HERE = Path(__file__).parent
# Nothing is loaded from elsewhere, and no script or style stands in a page: what gets into one as text stays text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",  # asked for again each time, so that a page and its scripts are of one version
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# From where a browser brings the cookie of a session. It does not where it follows a link of another site: there the
# page itself asks for its data, and that request does bring it.
_BRINGS_THE_SESSION = frozenset({"none", "same-origin", "same-site"})
_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
)
router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class StaticAssets(StaticFiles):
    """Static files with the headers of the pages."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Return a file, or that the browser has it already."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def page(template: str, here: str = "", **values: str) -> HTMLResponse:
    """Return a page; *here* is the address of the entry of its menu."""
    return HTMLResponse(_templates.get_template(template).render(here=here, **values), headers=HEADERS)


def page_of_a_session(request: Request, template: str, here: str = "", **values: str) -> Response:
    """Return the page of a template, or a redirect to the login for a browser that certainly has no session.

    Whether a token counts is decided where data is read.
    """
    token, _ = token_of(request)
    if token or request.headers.get("Sec-Fetch-Site") not in _BRINGS_THE_SESSION:
        return page(template, here, **values)
    address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"/login?{urlencode({'next': address})}", 303, headers=HEADERS)


@router.get("/login")
@public
def login_page() -> HTMLResponse:
    """Return the page that requests a token."""
    return page("login.html")


def _endpoint(template: str, here: str) -> Callable[[Request], Response]:
    def shown(request: Request) -> Response:
        return page_of_a_session(request, template, here, **request.path_params)

    return public(shown)


# Path, template, and the address of the entry of the menu.
for _path, _name, _here in (
    ("/", "jobs", "/"),
    ("/jobs/{job_id}", "job", ""),
    ("/groups/{group_id}", "group", ""),
    ("/compare", "compare", ""),
    ("/clusters", "clusters", "/clusters"),
    ("/schedules", "schedules", "/schedules"),
    ("/admin", "admin", "/admin"),
):
    router.add_api_route(_path, _endpoint(f"{_name}.html", _here), name=f"{_name}_page")


def add_pages(app: FastAPI) -> None:
    """Add the pages and what they are made of to *app*."""
    app.include_router(router)
    app.mount("/static", StaticAssets(directory=HERE / "static"), name="static")

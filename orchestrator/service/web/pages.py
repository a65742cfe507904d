"""Pages of the service. They hold no data: their scripts get it from the API, as whoever is logged in."""

from __future__ import annotations

import os
from pathlib import Path

import jinja2
from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from orc.orchestrator.service.auth import public

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


@router.get("/login")
@public
def login_page() -> HTMLResponse:
    """Return the page that requests a token."""
    return page("login.html")


@router.get("/")
@public
def jobs_page() -> HTMLResponse:
    """Return the page of all jobs."""
    return page("jobs.html", "/")


@router.get("/jobs/{job_id}")
@public
def job_page(job_id: str) -> HTMLResponse:
    """Return the page of one job."""
    return page("job.html", job_id=job_id)


@router.get("/groups/{group_id}")
@public
def group_page(group_id: str) -> HTMLResponse:
    """Return the page of a sweep, an array or a pipeline."""
    return page("group.html", group_id=group_id)


@router.get("/clusters")
@public
def clusters_page() -> HTMLResponse:
    """Return the page of the clusters."""
    return page("clusters.html", "/clusters")


@router.get("/schedules")
@public
def schedules_page() -> HTMLResponse:
    """Return the page of schedules and quotas."""
    return page("schedules.html", "/schedules")


@router.get("/admin")
@public
def admin_page() -> HTMLResponse:
    """Return the page of tokens and the audit log."""
    return page("admin.html", "/admin")


def add_pages(app: FastAPI) -> None:
    """Add the pages and what they are made of to *app*."""
    app.include_router(router)
    app.mount("/static", StaticAssets(directory=HERE / "static"), name="static")

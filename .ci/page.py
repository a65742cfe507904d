"""Take docs/images/page-*.png: the page of a service with real trainings of this machine (make page)."""

import getpass
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "orchestrator" / "service" / "web"))

from conftest import RunningService  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 150_000
SIZE = {"width": 1280, "height": 820}
TRAIN = (ROOT / "templates" / "starters" / "digits" / "train.py").read_text()
SETTINGS = {
    "launcher": "torchrun",
    "resources": {"procs_per_node": 2},
    "runtime": {"use_cpu": True, "seed": 0, "metrics_interval_s": 0.5},
    "checkpoint": {"keep": 1},
}
CLUSTERS = """
local: {kind: local, prices: {node_hour: 2.4, currency: EUR}}
lab:
  kind: ssh
  options: {hosts: [{name: node1, slots: 8}, {name: node2, slots: 8}]}
"""


def look(page: Page, address: str, name: str, ready: str) -> None:
    """Open *address*, wait until *ready* is shown, and take the picture *name*."""
    page.goto(address)
    page.locator(ready).first.wait_for()
    page.wait_for_timeout(1500)  # for the figures and logs that come after
    picture = IMAGES / f"page-{name}.png"
    page.screenshot(path=picture)
    if picture.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{picture} has more than {MOST_BYTES} bytes")


def main() -> int:
    """Train, and take the pictures."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, RunningService(Path(home)) as service:
        (service.home / "config").mkdir()
        (service.home / "config" / "clusters.yaml").write_text(CLUSTERS)
        ended = [
            service.submit(TRAIN, args={"epochs": 12, "lr": lr}, tags={"lr": str(lr)}, **SETTINGS)
            for lr in (0.002, 0.01)
        ]
        broken = service.submit(
            TRAIN.replace("32 * 4 * 4", "32 * 4"), **SETTINGS | {"launcher": "python", "resources": {}}
        )
        for job in ended:
            service.wait_for(job.id, "SUCCEEDED")
        service.wait_for(broken.id, "FAILED")
        running = service.submit(TRAIN, args={"epochs": 60, "lr": 0.0005}, tags={"lr": "0.0005"}, **SETTINGS)
        service.submit(TRAIN, depends_on=[running.id], **SETTINGS)
        service.wait_for(running.id, "RUNNING")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            page = browser.new_page(viewport=SIZE, color_scheme="light")
            token = service.token(getpass.getuser(), "admin")
            page.context.add_cookies([{"name": "orc_session", "value": token, "url": service.url}])
            look(page, f"{service.url}/jobs/{running.id}", "job", "#charts canvas")
            page.locator("#charts figure").nth(2).wait_for()
            page.get_by_text("Time left").wait_for()
            look(page, f"{service.url}/jobs/{running.id}", "job", "#charts canvas")
            look(page, service.url, "jobs", "progress")
            both = "&".join(f"job={job.id}" for job in ended)
            look(page, f"{service.url}/compare?{both}", "compare", "#charts canvas")
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

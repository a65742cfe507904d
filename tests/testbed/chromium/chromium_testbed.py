"""Fixture: `chromium`, Debian's browser, driven by playwright."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HERE = Path(__file__).resolve().parent


# Not for the session: while playwright runs, no other test of the process could run an event loop.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The running browser."""
    if os.environ.get("ORC_REQUIRE_TESTBEDS") == "1":
        subprocess.run([HERE / "install.sh"], check=True, timeout=170)
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed; tests/testbed/chromium/install.sh does it on Debian and Ubuntu")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()

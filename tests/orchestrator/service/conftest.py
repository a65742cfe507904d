"""A service that the tests of a file share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from running_service import Running, make_running


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = make_running(
        tmp_path_factory.mktemp("service") / "state", requests_per_minute=1_000_000, failed_logins_per_minute=1_000_000
    )
    made.add_job("digits-aaaaaa", "grace")
    made.log("orc-digits-aaaaaa-a1").write_text("hello\n")
    made.start()
    yield made
    made.stop()

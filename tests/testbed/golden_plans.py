"""What is rendered, byte for byte. ``ORC_UPDATE_GOLDEN=1`` writes the files anew; read the diff before a commit."""

from __future__ import annotations

import json
import os
from pathlib import Path

from orc.launchers.backends.base import Snapshot
from orc.launchers.plan import Plan
from orc.launchers.snapshot.manifest import Bundle, Entry

GOLDEN = Path(__file__).parents[1] / "launchers" / "golden"
SNAPSHOT = Snapshot(Bundle.of([Entry.link("code", "a")]), Bundle.of([Entry.link("runtime", "b")]))


def compare(name: str, rendered: Plan | str) -> None:
    """Compare what was rendered with the golden file of this *name*: ``ssh/smallest.json``."""
    path = GOLDEN / name
    if isinstance(rendered, Plan):
        rendered = json.dumps(rendered.to_dict(), indent=2, ensure_ascii=False) + "\n"
    if os.environ.get("ORC_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rendered)
    assert rendered == path.read_text(), f"{path} differs; ORC_UPDATE_GOLDEN=1 accepts the new text"

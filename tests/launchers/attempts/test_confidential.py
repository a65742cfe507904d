"""What must not outlive an attempt."""

from __future__ import annotations

from pathlib import Path

from orc.launchers.attempts.confidential import remove_confidential
from orc.launchers.remote.transport import LocalTransport


def test_secrets_go_with_what_a_killed_writer_has_left_of_them(tmp_path: Path) -> None:
    names = (
        "secrets.json",
        ".secrets.json.0f1e2d.tmp",
        ".link.json.0f1e2d.tmp",
        "agent.json",
        ".agent.json.0f1e2d.tmp",
    )
    attempts = [tmp_path / "it's *" / "a1", tmp_path / "job" / "a1", tmp_path / "job" / "none"]
    for attempt in attempts[:2]:
        attempt.mkdir(parents=True)
        for name in names:
            (attempt / name).touch()
    remove_confidential(LocalTransport(), [str(attempt) for attempt in attempts])
    for attempt in attempts[:2]:
        assert {path.name for path in attempt.iterdir()} == {"agent.json", ".agent.json.0f1e2d.tmp"}

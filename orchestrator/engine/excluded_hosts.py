"""Hosts that the doctor has found bad, kept for the submissions that follow. They are used only when nothing else will
do; the next examination decides anew."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from orc.launchers.remote.files import write_file

_NAME = "excluded-hosts.json"


def excluded(state_dir: Path, cluster: str) -> dict[str, str]:
    """Return the excluded hosts of *cluster*, and why."""
    found = _read(state_dir).get(cluster, {})
    return {host: str(entry.get("reason", "")) for host, entry in found.items()}


def exclude(state_dir: Path, cluster: str, hosts: Mapping[str, str]) -> None:
    """Replace the excluded hosts of *cluster* by *hosts* (with reasons); none ends all exclusions there."""
    everything = _read(state_dir)
    everything.pop(cluster, None)
    if hosts:
        everything[cluster] = {host: {"reason": reason, "at": time.time()} for host, reason in hosts.items()}
    path = state_dir / _NAME
    if not everything:
        path.unlink(missing_ok=True)
        return
    write_file(str(path), f"{json.dumps(everything, indent=1)}\n".encode(), 0o600)


def _read(state_dir: Path) -> dict[str, dict[str, dict[str, object]]]:
    try:
        data = json.loads((state_dir / _NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a damaged list excludes nobody
        return {}
    return data if isinstance(data, dict) else {}

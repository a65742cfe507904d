"""Comparison of two jobs: specification, code, environment, outcome and metrics."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError

if TYPE_CHECKING:
    from orc.launchers.snapshot.manifest import Bundle, Entry
    from orc.orchestrator.views import JobView
    from orc.orchestrator.workspace import Workspace

Summaries = Mapping[str, Mapping[str, float]]  # of measurements, by name: last, step, min, max
MAX_FILE = 256 << 10  # bytes of a file whose lines are compared
MAX_FILES = 200  # ... and so many of them
_ENVIRONMENT = ("environment", "env", "setup", "secrets", "network")


def compare(ws: Workspace, a: JobView, b: JobView, measured: Mapping[str, Summaries | str]) -> dict[str, Any]:
    """Return the differences between two jobs, JSON-able.

    Args:
        ws: The workspace whose store has their snapshots.
        a: The first job.
        b: The second one.
        measured: By job id, the summary of each measurement, or why there is none.

    Returns:
        ``{"jobs": [a, b], "spec", "environment", "code", "outcome", "metrics"}``. ``spec`` and ``environment`` are
        lists of ``{"key", "a", "b"}``, absent values left out.
    """
    differences = spec_differences(a.spec, b.spec)
    environment = [entry for entry in differences if entry["key"].split(".")[0] in _ENVIRONMENT]
    environment += [
        {"key": f"{name} snapshot", "a": a.digests.get(name), "b": b.digests.get(name)}
        for name in ("runtime", "environment")
        if a.digests.get(name) != b.digests.get(name)
    ]
    return {
        "jobs": [a.id, b.id],
        "spec": [entry for entry in differences if entry not in environment],
        "environment": environment,
        "code": code_differences(ws, a.digests.get("code", ""), b.digests.get("code", "")),
        "outcome": [_outcome(a), _outcome(b)],
        "metrics": metric_differences(measured[a.id], measured[b.id]),
    }


def spec_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the keys whose values differ, as ``{"key", "a", "b"}``; lists are compared as a whole. Pure."""
    first, second = dict(_flat(a)), dict(_flat(b))
    found = []
    for key in dict.fromkeys([*first, *second]):
        pair = {side: values[key] for side, values in (("a", first), ("b", second)) if key in values}
        if len(pair) < 2 or pair["a"] != pair["b"]:
            found.append({"key": key, **pair})
    return found


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        elif item is not None and item != {}:
            yield f"{prefix}{key}", item


def code_differences(ws: Workspace, a: str, b: str) -> dict[str, Any]:
    """Return the differences of two snapshots: ``{"same", "files": [{"path", "change", "diff"}], "missing"}``."""
    if a == b:
        return {"same": True, "files": [], "missing": ""}
    try:
        first, second = ws.store.load(a), ws.store.load(b)
    except LaunchError as error:  # collected, or on the machine that has submitted it
        return {"same": False, "files": [], "missing": error.what}
    changed = [
        path
        for path in sorted({*first.by_path, *second.by_path})
        if first.by_path.get(path) != second.by_path.get(path)
    ]
    files = [_file(ws, path, first, second, read=index < MAX_FILES) for index, path in enumerate(changed)]
    return {"same": False, "files": files, "missing": ""}


def _file(ws: Workspace, path: str, a: Bundle, b: Bundle, *, read: bool) -> dict[str, Any]:
    before, after = a.by_path.get(path), b.by_path.get(path)
    change = "added" if before is None else "removed" if after is None else "changed"
    found: dict[str, Any] = {"path": path, "change": change, "diff": ""}
    if not read:
        return found | {"note": "too many files"}
    texts = [_text(ws, bundle, entry) for bundle, entry in ((a, before), (b, after))]
    if any(text is None for text in texts):
        return found | {"note": "no text, or too long to compare"}
    old, new = ((text or "").splitlines(keepends=True) for text in texts)
    diff = difflib.unified_diff(old, new, f"a/{path}" if before else "/dev/null", f"b/{path}" if after else "/dev/null")
    found["diff"] = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff)
    if before and after and before.mode != after.mode:
        found["note"] = f"mode {before.mode:04o} -> {after.mode:04o}"
    return found


def _text(ws: Workspace, bundle: Bundle, entry: Entry | None) -> str | None:
    """Return the text of a file of a snapshot; `None` where it is none."""
    if entry is None:
        return ""
    if entry.target is not None:
        return f"{entry.target}\n"
    if entry.size > MAX_FILE:
        return None
    data = Path(ws.store.tree_path(bundle.digest), entry.path).read_bytes()
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def _outcome(view: JobView) -> dict[str, Any]:
    started = next((attempt.started_at for attempt in view.attempts if attempt.started_at is not None), None)
    return {
        "job": view.id,
        "state": view.state,
        "reason": view.reason,
        "cluster": view.cluster,
        "attempts": len(view.attempts),
        "causes": [attempt.cause for attempt in view.attempts if attempt.cause],
        "hosts": list(view.attempt.hosts) if view.attempt else [],
        "created_at": view.created_at,
        "started_at": started,
        "ended_at": view.ended_at,
        "duration_s": view.ended_at - started if view.ended_at is not None and started is not None else None,
    }


def metric_differences(a: Summaries | str, b: Summaries | str) -> dict[str, Any]:
    """Return last, lowest and highest values side by side: ``{"missing": [...], "values": [{"name", "a", "b"}]}``."""
    first, second = ({} if isinstance(side, str) else side for side in (a, b))
    known = dict.fromkeys([*first, *second])
    rows = [{"name": name, "a": first.get(name), "b": second.get(name)} for name in known]
    return {"missing": [side if isinstance(side, str) else "" for side in (a, b)], "values": rows}

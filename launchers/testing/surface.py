"""The stable surface: what a backend of another package may import, for as long as `PROTOCOL` stays the same.

Names are added without a new version; none goes, and none changes what it takes and returns.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

# Module -> its names; all public ones where there are none.
STABLE: dict[str, frozenset[str]] = {
    "orc.launchers.agent.config": frozenset({"AgentConfig"}),
    "orc.launchers.agent.procfs": frozenset({"is_running"}),
    "orc.launchers.attempts.agent_config": frozenset({"agent_config", "agent_file"}),
    "orc.launchers.attempts.confidential": frozenset({"remove_confidential"}),
    "orc.launchers.attempts.reader": frozenset({"AttemptRecords", "read_attempts", "read_log", "log_selectors"}),
    "orc.launchers.backends": frozenset({"base"}),
    "orc.launchers.backends.base": frozenset(),
    "orc.launchers.backends.ends": frozenset({"ask_to_end", "read_all", "read_ends", "write_end"}),
    "orc.launchers.backends.verdict": frozenset({"observe", "with_cancellation", "with_word"}),
    "orc.launchers.containers.held": frozenset({"HeldFiles"}),
    "orc.launchers.containers.http": frozenset(
        {"GONE", "TIMEOUT_S", "ApiRefusal", "Uncertain", "exchange", "refusal", "unless_refused"}
    ),
    "orc.launchers.containers.inputs": frozenset(
        {
            "PLAIN_ENTRY",
            "entry_program",
            "packed",
            "private_inputs",
            "read_records",
            "remove_private",
            "stage",
            "upload_inputs",
        }
    ),
    "orc.launchers.containers.layout": frozenset(),
    "orc.launchers.containers.objects": frozenset({"ObjectStore", "UrlObjects", "UrlTransport"}),
    "orc.launchers.containers.output": frozenset({"text_of"}),
    "orc.launchers.containers.own_disk": frozenset({"OwnDisk"}),
    "orc.launchers.containers.program": frozenset({"Container", "Failure", "main", "read_json"}),
    "orc.launchers.containers.template": frozenset({"merged"}),
    "orc.launchers.containers.transport": frozenset(),
    "orc.launchers.errors": frozenset(),
    "orc.launchers.findings": frozenset({"Finding"}),
    "orc.launchers.ids": frozenset({"AttemptId"}),
    "orc.launchers.paths": frozenset({"Layout"}),
    "orc.launchers.plan": frozenset({"Plan", "PlanCommand", "PlanFile"}),
    "orc.launchers.remote.transport": frozenset(
        {"CommandTimeout", "Completed", "LocalTransport", "Process", "Transport"}
    ),
    "orc.launchers.spec": frozenset({"JobSpec"}),
    "orc.launchers.spec.clusters": frozenset({"Cluster"}),
    "orc.launchers.spec.options": frozenset(),
    "orc.launchers.transfer.targets": frozenset({"Targets"}),
}


def unstable_imports(package: str) -> list[str]:
    """Return what the modules of *package* import of orc and is not stable, with the place of each."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"there is no package {package}"
    places = spec.submodule_search_locations
    files = [Path(spec.origin or "")] if places is None else [f for place in places for f in Path(place).rglob("*.py")]
    found = []
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_bytes())):
            found += [f"{file.name}:{node.lineno}: {name}" for name in _imported(node)]  # type: ignore[attr-defined]
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.partition(".")[0] == "orc"]
    if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "orc":
        return []
    stable = STABLE.get(str(node.module))
    names = [alias.name for alias in node.names]
    bad = (
        names if stable is None else [name for name in names if name.startswith("_") or (stable and name not in stable)]
    )
    return [f"{node.module}.{name}" for name in bad]

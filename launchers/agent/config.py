"""Configuration of the agents of an attempt: the schema of ``agent.json``, and its reader.

The same class checks what backends write (`orc.launchers.attempts.agent_config.agent_file`) and what agents read. What
the keys mean is in docs/explanation/attempt-directory.md.
"""

from __future__ import annotations

import os

from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.records import FORMAT, read_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_TYPES: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool, "list": list, "dict": dict}


class AgentConfig:
    """The content of ``agent.json``: an attribute for each key; those without a default are required. Not changeable.

    Not a dataclass: the module costs a node's agent more than the rest of its start.
    """

    format: int  # the version of this schema
    job: str
    name: str
    attempt: int
    marker: str
    root: str
    job_dir: str
    attempt_dir: str
    code_tree: str
    runtime_tree: str
    nnodes: int
    nproc: int
    command: dict[str, Any]
    env: dict[str, str] = {}  # noqa: RUF012 - defaults of keys; nothing changes them
    secrets: list[str] = []  # noqa: RUF012
    setup: list[str] = []  # noqa: RUF012
    python: str | None = None  # the interpreter of the ranks; that of the agent
    environment: dict[str, Any] | None = None
    network: dict[str, str] | None = None
    core_dumps: bool = False
    grace_s: float = 0.0
    deadline_s: float | None = None
    heartbeat_s: float = 2.0
    peer_timeout_s: float = 30.0
    startup_timeout_s: float | None = None
    preempt_exit: int = 75
    on_exit: dict[str, Any] | None = None
    nnodes_from: str | None = None
    min_nodes: int | None = None
    hosts: list[dict[str, str]] = []  # noqa: RUF012
    slots: dict[str, Any] | None = None
    link: bool = False
    hub: dict[str, Any] | None = None
    work_dir: str | None = None
    logs_dir: str | None = None
    private_dir: str | None = None
    stay_stopped: bool = False
    backend: dict[str, Any] = {}  # noqa: RUF012 - values of the backend's own, which agents do not read

    def __init__(self, values: Mapping[str, Any], where: str = "agent.json") -> None:
        """Check *values*. Raises `LaunchFailure` for another version, and for keys that are unknown or missing."""
        if values.get("format") != FORMAT:
            raise LaunchFailure(f"{where}: format {values.get('format')!r}, this agent reads format {FORMAT}")
        keys = AgentConfig.__annotations__
        if unknown := sorted(set(values) - set(keys)):
            raise LaunchFailure(f"{where}: unknown key {', '.join(unknown)}")
        if missing := [key for key in keys if key not in values and not hasattr(AgentConfig, key)]:
            raise LaunchFailure(f"{where}: no value for {', '.join(missing)}")
        for key, value in values.items():
            kind = keys[key]
            if not (value is None and kind.endswith("| None")) and not isinstance(
                value, _TYPES[kind.partition("[")[0].partition(" ")[0]]
            ):
                raise LaunchFailure(f"{where}: {key} is no {kind}")
        self.__dict__.update(values)

    def __setattr__(self, key: str, value: object) -> None:
        raise AttributeError(f"{key}: a configuration is not changed; see replace()")

    def to_dict(self) -> dict[str, Any]:
        """Return what `AgentConfig` takes: the keys that were given."""
        return dict(self.__dict__)

    def replace(self, **changes: Any) -> AgentConfig:
        """Return a copy with other values for some keys."""
        return AgentConfig({**self.__dict__, **changes})


def load_config(path: str) -> AgentConfig:
    """Return the configuration in *path*; raises `LaunchFailure` for a file that this agent cannot follow."""
    values = read_json(path)
    if values is None:
        raise LaunchFailure(f"{path}: no such file, or not a JSON object")
    config = AgentConfig(values, path)
    given = os.environ.get(config.nnodes_from or "", "")
    return config.replace(nnodes=int(given)) if given.isdigit() else config

"""Resolved command lines of a plan, to be read and pasted into a shell: what the agents of its nodes start. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from orc.launchers.agent.variables import rank_variables, substitute

if TYPE_CHECKING:
    from orc.launchers.plan import Plan

PORT = 29500  # stands for the free port that node 0 chooses
SHOWN_NODES = 4  # of a larger job the first ones: the others differ in their numbers only
# What is known only once the job runs, as a variable of the shell that the line is pasted into.
_LATER = {"{master_addr}": "MASTER_ADDR", "{node_addr}": "NODE_ADDR", "{service_token}": "SERVICE_TOKEN"}
_ABOUT = {
    "MASTER_ADDR": "the address of node 0",
    "NODE_ADDR": "the address of this node",
    "SERVICE_TOKEN": "any text that is the same on all nodes",
}


class CommandLine(NamedTuple):
    """Lines of a shell that start the job's part on one node, and the notes on them."""

    node: int
    host: str | None
    notes: tuple[str, ...]
    text: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {"node": self.node, "host": self.host, "notes": list(self.notes), "command": self.text}


def command_lines(plan: Plan, workdir: str) -> list[CommandLine]:
    """Return what each node that starts something starts, in node order, at most `SHOWN_NODES` of them.

    *workdir* is the directory of the code on this machine: the nodes run in a copy of it.
    """
    configs = [(f.host, json.loads(f.content)) for f in plan.files if f.path.endswith("/agent.json")]
    if not configs:
        return []
    first = configs[0][1]
    found = []
    for node in range(min(first["nnodes"], SHOWN_NODES)):
        host, config = configs[node] if len(configs) > 1 else configs[0]
        hosts = config.get("hosts") or []
        name = host or (hosts[node]["name"] if node < len(hosts) else None)
        if lines := _Node(plan, config, node).lines():
            notes, text = lines
            found.append(CommandLine(node, name, notes, f"cd {shlex.quote(workdir)}\n{text}"))
    return found


def as_text(plan: Plan, workdir: str) -> list[str]:
    """Return the command lines as the lines that `orc render` begins with."""
    shown = command_lines(plan, workdir)
    nodes = max(json.loads(f.content)["nnodes"] for f in plan.files if f.path.endswith("/agent.json"))
    lines: list[str] = []
    for line in shown:
        where = f"node {line.node} of {nodes}" + (f", {line.host}" if line.host else "")
        lines += [f"# what runs on {where}", *(f"# {note}" for note in line.notes), line.text, ""]
    if len(shown) == SHOWN_NODES < nodes:
        lines += [f"# nodes {SHOWN_NODES} to {nodes - 1}: the same with their own numbers", ""]
    return lines


class _Node:
    """Part of one node in a plan."""

    def __init__(self, plan: Plan, config: Mapping[str, Any], node: int) -> None:
        self.config, self.node = config, node
        self.command: Mapping[str, Any] = config["command"]
        self.nnodes, self.nproc = config["nnodes"], config["nproc"]
        self.python = config.get("python") or _python(plan)
        hosts = config.get("hosts") or []
        self.values = {
            "python": self.python,
            "nnodes": str(self.nnodes),
            "node_rank": str(node),
            "nproc": str(self.nproc),
            "master_port": str(PORT),
            "rdzv_id": plan.marker,
            "world_size": str(self.nnodes * self.nproc),
            "min_nodes": str(config.get("min_nodes") or self.nnodes),
            "is_host": "0" if node else "1",
            "attempt_dir": config["attempt_dir"],
        }
        if self.nnodes == 1:
            self.values |= {"master_addr": "127.0.0.1", "node_addr": "127.0.0.1"}
        elif len(hosts) >= self.nnodes:
            addresses = [host["address"].rpartition("@")[2] for host in hosts]
            self.values |= {"master_addr": addresses[0], "node_addr": addresses[node]}
        self.names = [host["name"] for host in hosts] or [f"node-{n}" for n in range(self.nnodes)]

    def lines(self) -> tuple[tuple[str, ...], str] | None:
        """Return the notes and the text, or `None` for a node on which nothing is started."""
        command = self.command
        parts = [*self.config.get("setup", ())]
        role = "first" if self.node == 0 else "others"
        for service in command.get("services", ()):
            if service["nodes"] == role:
                parts.append(self._line(self._env(), service["argv"]) + " &")
        if ready := self.node == 0 and command.get("ready"):
            parts.append(self._line(self._env(), ready))
        if self.node == 0 or command.get("primary") != "first":
            parts += self._program()
        elif not parts or not command.get("services"):
            return None  # node 0 starts the ranks here, too
        text = "\n".join(parts)
        return tuple(self._notes(text)), text

    def _program(self) -> list[str]:
        program = list(self.command["program"])
        program[0] = self.python if program[0] == "{python}" else program[0]
        if self.command["spawn"] == "launcher":
            # The agent's own place for what torchrun would write into /tmp is made when the job runs.
            launcher = [word for word in self.command["launcher"] if not word.startswith("--log-dir={attempt_dir}")]
            return [self._line(self._env(), launcher, program)]
        driven = self.command.get("primary") == "first"
        nproc, nnodes = (1, 1) if driven else (self.nproc, self.nnodes)
        lines = []
        for local in range(nproc):
            rank = self.node * nproc + local
            own = rank_variables(rank, local, self.node, nnodes, nproc, self.values.get("master_addr", ""), PORT)
            own["MASTER_ADDR"] = "{master_addr}"
            for name, texts in self.command.get("rank_env", {}).items():
                own[name] = texts[local].replace("{rank}", str(rank))
            own = {name: text for name, text in own.items() if name not in self.config["env"]}
            lines.append(self._line({**self._env(), **own}, (), program))
        return lines if nproc == 1 else [*(f"{line} &" for line in lines), "wait"]

    def _env(self) -> dict[str, str]:
        hosts = ("localhost",) if self.nnodes == 1 else self.names
        shared = {
            name: ",".join(text.replace("{host}", host) for host in hosts)
            for name, text in self.command.get("host_env", {}).items()
        }
        return {**self.command.get("env", {}), **shared, **self.config["env"]}

    def _line(self, env: Mapping[str, str], launcher: Sequence[str], program: Sequence[str] = ()) -> str:
        """Return one command with its variables; what the user wrote is not searched for placeholders."""
        own = self.config["env"]
        words = [f"{n}={shlex.quote(t) if n in own else self._word(t)}" for n, t in sorted(env.items())]
        return " \\\n  ".join([*words, " ".join([*map(self._word, launcher), *map(shlex.quote, program)])])

    def _word(self, template: str) -> str:
        """Return a word of a launcher with its values, quoted; what is not known yet stays a variable."""
        text = substitute(template, self.values)
        for placeholder, variable in _LATER.items():
            if placeholder in text:
                return f'"${variable}"'.join(shlex.quote(part) if part else "" for part in text.split(placeholder))
        return shlex.quote(text)

    def _notes(self, text: str) -> list[str]:
        notes = [
            f"first set {variable}: {_ABOUT[variable]}"
            for placeholder, variable in _LATER.items()
            if f'"${variable}"' in text
        ]
        if str(PORT) in text:
            notes.append(f"a free port is chosen instead of {PORT}")
        if secrets := self.config.get("secrets"):
            notes.append(f"first export the secrets: {', '.join(secrets)}")
        if environment := self.config.get("environment"):
            notes.append(_environment(environment))
        for name, line in self.command.get("hostfiles", {}).items():
            hosts = ["localhost"] if self.nnodes == 1 else self.names
            rows = [substitute(line, {"host": host, "nproc": str(self.nproc)}).strip() for host in hosts]
            notes.append(f"first write $ORC_ATTEMPT_DIR/{name}: {'; '.join(rows)}")
        return notes


def _environment(environment: Mapping[str, Any]) -> str:
    kind = environment["kind"]
    if kind == "container":
        return f"inside the container {environment['image']} ({environment['runtime']})"
    made = environment.get("requirements") or environment.get("file") or environment.get("archive")
    return f"python is that of the {kind} environment" + (f" made from {made}" if made else " that travels along")


def _python(plan: Plan) -> str:
    """Return the interpreter that starts the agents, which runs the ranks unless the cluster names another one."""
    words = [word for command in plan.commands for word in command.argv[:1]]
    return next((word for word in words if word.rpartition("/")[2].startswith("python")), "python3")

"""`orc render`: the plan of a job, exactly as a submission would send it, without network and without ledger."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from orc.launchers.agent.variables import rank_variables, substitute
from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.cli.invocation import cluster_option, job_file_argument, json_option, set_option
from orc.orchestrator.cli.ui.display import READING, waiting
from orc.orchestrator.cli.ui.output import echo, echo_json, echo_result, warn

if TYPE_CHECKING:
    from orc.launchers.findings import Finding
    from orc.launchers.plan import Plan
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.groups import LoadedGroup

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
    notes: list[str]
    command: str


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
        lines += [f"# what runs on {where}", *(f"# {note}" for note in line.notes), line.command, ""]
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

    def lines(self) -> tuple[list[str], str] | None:
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
        return self._notes(text), text

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


def plan_of(loaded: LoadedJob) -> tuple[Plan, Sequence[Finding]]:
    """Return the plan of a job that is not submitted (its id ends in 000000), and its snapshot's findings."""
    from orc.launchers.backends import open_backend
    from orc.launchers.ids import AttemptId, placeholder_job_id
    from orc.launchers.paths import state_dir
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.spec.clusters import get_cluster
    from orc.orchestrator.engine.job_source import scan_job

    spec = loaded.spec
    backend = open_backend(get_cluster(spec.cluster))
    state = state_dir(create=False)
    # The hashes that submissions have left; a place without any is left as it is.
    cache = ContentStore(state / "store").scan_cache if state.is_dir() else None
    snapshot, findings = scan_job(loaded, backend, cache, state)
    return backend.render(spec, snapshot, AttemptId(placeholder_job_id(spec.name), 1)), findings


def text(plan: Plan, workdir: str) -> str:
    """Return the plan for people: what runs, then every file and command as it would be sent."""
    lines = [
        *as_text(plan, workdir),
        f"# plan {plan.marker} for cluster {plan.cluster} ({plan.backend})",
        f"# digest {plan.digest}",
        *(f"# {name} tree {digest}" for name, digest in sorted(plan.trees.items())),
    ]
    if plan.secrets:
        lines.append(f"# secrets, by name only: {', '.join(plan.secrets)}")
    lines += ["", "# environment of the ranks"]
    lines += [f"{name}={shlex.quote(value)}" for name, value in sorted(plan.env.items())]
    for number, file in enumerate(plan.files, 1):
        lines += ["", f"# file {number} of {len(plan.files)}: {file.path} (mode {file.mode:04o})"]
        lines.append(file.content.removesuffix("\n"))
        if not file.content.endswith("\n"):
            lines.append("# (no newline at the end of this file)")
    for number, step in enumerate(plan.commands, 1):
        purpose = f": {step.purpose}" if step.purpose else ""
        lines += ["", f"# command {number} of {len(plan.commands)}{purpose}"]
        lines.append(f"cd {shlex.quote(step.cwd)} && {step}" if step.cwd else str(step))
    return "\n".join(lines)


def write(plan: Plan, document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the plan into *folder*, which must not exist or be empty: ``plan.json``, ``commands.sh``, ``files/...``.

    *document* is the plan as JSON.

    Raises `LaunchError`; the folder appears complete or not at all.
    """
    import shutil
    import tempfile

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "something is in the way of the rendered plan"
        raise LaunchError(what, where=str(folder), hint="choose a new --output DIR")
    contents = {Path("plan.json"): (json.dumps(document, indent=2, ensure_ascii=False) + "\n", 0o644)}
    steps = [f"cd {shlex.quote(c.cwd)} && {c}" if c.cwd else str(c) for c in plan.commands]
    contents[Path("commands.sh")] = ("\n".join(["#!/bin/sh", "set -e", *steps, ""]), 0o755)
    for file in plan.files:
        contents[Path("files") / file.path.lstrip("/")] = (file.content, file.mode)
    staging: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for path, (content, mode) in contents.items():
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            (staging / path).write_text(content, encoding="utf-8", newline="")
            (staging / path).chmod(mode)
        staging.chmod(0o755 & ~_umask())
        staging.replace(folder)
    except OSError as error:
        what = f"cannot write the plan: {error.strerror}"
        raise LaunchError(what, where=str(folder), hint="choose a new --output DIR") from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return [folder / path for path in contents]


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def show(loaded: LoadedJob, form: str, output: Path | None) -> None:
    """Print the plan of a job as *form*: text, json, or dir, which writes it to *output* and prints the paths."""
    with waiting(READING):
        plan, findings = plan_of(loaded)
    for finding in findings:
        warn(finding)
    workdir = os.path.normpath(loaded.workdir)
    lines = [line._asdict() for line in command_lines(plan, workdir)]
    document = plan.to_dict() | {"digest": plan.digest, "command_lines": lines}
    if output is not None:
        written = write(plan, document, output)
        told = {"directory": str(output.absolute()), "files": [str(path.absolute()) for path in written]}
        echo_result(form == "json", told, "\n".join(map(str, written)))
    elif form == "json":
        echo_json(document)
    else:
        echo(text(plan, workdir))


def show_any(loaded: LoadedJob | LoadedGroup, form: str, output: Path | None, member: str | None = None) -> None:
    """Print the plan of a job as `show`; of a group, what its members are, or the plan of *member*."""
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.cli.commands.groups import chosen_member, preview

    if isinstance(loaded, LoadedGroup) and member is None:
        if output is not None:
            raise SpecError("--format dir writes the plan of one job", hint="choose one with --member")
        preview(loaded, as_json=form == "json")
    elif isinstance(loaded, LoadedGroup):
        show(chosen_member(loaded, member or "").loaded, form, output)
    else:
        show(loaded, form, output)


@click.command("render")
@job_file_argument
@cluster_option
@set_option
@click.option("--format", "form", type=click.Choice(["text", "json", "dir"]), default="text", show_default=True)
@click.option("--output", "-o", metavar="DIR", type=click.Path(path_type=Path), help="New directory for --format dir.")
@click.option("--member", metavar="INDEX", help="Print the plan of this job of a sweep, array or pipeline.")
@json_option
def render_command(
    job_file: str,
    cluster: str | None,
    overrides: tuple[str, ...],
    form: str,
    output: Path | None,
    member: str | None,
    as_json: bool,
) -> None:
    """Print what would run, as lines for a shell, and exactly what `orc submit` would send. Touches no network.

    JOB.yaml is ./job.yaml unless given. For a sweep, an array or a pipeline it lists the jobs.
    """
    if output is not None and form != "dir":
        raise click.UsageError("--output needs --format dir", click.get_current_context())
    if form == "dir" and output is None:
        raise click.UsageError("--format dir needs --output DIR", click.get_current_context())
    from orc.orchestrator.engine.job_source import load_jobs_checked

    show_any(load_jobs_checked(job_file, overrides, cluster=cluster), "json" if as_json else form, output, member)

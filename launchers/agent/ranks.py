"""Ranks: the address and port where they meet, their environment, and their start, directly or by a launcher."""

from __future__ import annotations

import os
import time

from orc.launchers.agent.failures import is_ready, start_timed_out
from orc.launchers.agent.gpus import own_part
from orc.launchers.agent.network import Port, allowed_address, own_address
from orc.launchers.agent.processes import agent_argv, spawn, users_umask
from orc.launchers.agent.procfs import process_start
from orc.launchers.agent.records import read_json, write_json
from orc.launchers.agent.state import NodeState, Rank
from orc.launchers.agent.supervision import Supervisor
from orc.launchers.agent.variables import prepend_path, rank_variables, substitute, without_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


def job_environment(node: NodeState, defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of every process of the job, without what is one rank's; *defaults* are the command's."""
    config = node.config
    env = without_own(os.environ)
    env.update(defaults or {})
    env.update(config.env)
    env.update(node.secrets)
    env.update(
        {
            "ORC_JOB_ID": config.job,
            "ORC_JOB_NAME": config.name,
            "ORC_ATTEMPT": str(config.attempt),
            "ORC_RESTART": str(node.restart),
            "ORC_MARKER": config.marker,
            "ORC_JOB_DIR": config.job_dir,
            "ORC_ATTEMPT_DIR": node.attempt_dir,
            "ORC_NODE_RANK": str(node.node),
            "ORC_NNODES": str(node.nnodes),
            "ORC_NPROC": str(node.nproc),
            "ORC_RDZV_ID": node.rendezvous_id(),
        }
    )
    if config.logs_dir:
        env["ORC_LOGS_DIR"] = node.logs
    env.update(node.own_env)
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in C shows where Python was
    env.update(node.prepared.get("env") or {})
    if node.prepared.get("path"):
        env["PATH"] = os.pathsep.join([*node.prepared["path"], env.get("PATH") or os.defpath])
    prepend_path(env, config.runtime_tree)
    return env


def launch_environment(node: NodeState, addr: str, port: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the values of the command's placeholders and the environment of what the command starts on this node."""
    from orc.launchers.agent.network import facing, listen_on, on_loopback

    command = node.config.command
    if node.listening:
        node.own_env.update(listen_on(node.listening[0]))
    else:
        elsewhere = addr not in ("127.0.0.1", "::1")  # else nobody on another machine has any business there
        where = on_loopback() if not elsewhere else node.link.variables() if node.link else facing(addr)
        given = {**os.environ, **node.config.env}
        node.own_env.update({name: value for name, value in where.items() if name not in given})
    if node.own_env:
        node.record_pids()
    values = {
        "python": node.python,
        "nnodes": str(node.nnodes),
        "node_rank": str(node.node),
        "nproc": str(node.nproc),
        "master_addr": addr,
        "master_port": str(port),
        "rdzv_id": node.rendezvous_id(),
        "world_size": str(node.nnodes * node.nproc),
        "min_nodes": str(node.config.min_nodes or node.nnodes),
        "is_host": "0" if node.node else "1",
        "node_addr": node_address(node, addr),
        "attempt_dir": node.attempt_dir,
        **({"service_token": service_token(node)} if command.get("services") else {}),
    }
    defaults = {n: substitute(v, values) for n, v in (command.get("env") or {}).items()}
    if command.get("host_env"):
        names = host_names(node)
        for name, text in command["host_env"].items():
            defaults[name] = ",".join(substitute(text, {"host": host}) for host in names)
    env = job_environment(node, defaults)
    env["ORC_TOKEN"] = node.token
    return values, env


def service_token(node: NodeState) -> str:
    """Return a password for what the nodes serve each other: unlike the ranks' own token, it may be sent."""
    import hashlib

    return hashlib.sha256(f"service {node.token}".encode()).hexdigest()


def start_ranks(node: NodeState, values: Mapping[str, str], env: dict[str, str]) -> None:
    """Start the ranks, or the launcher that starts them."""
    command = node.config.command
    log = os.path.join(node.logs, f"node-{node.node}.log")
    runtime_tree = node.config.runtime_tree
    if node.remote_shell:
        from orc.launchers.agent.calls import RemoteCalls, install

        env["PATH"] = (
            install(os.path.join(node.dir, "bin"), runtime_tree) + os.pathsep + (env.get("PATH") or os.defpath)
        )
        node.calls = RemoteCalls(node, env)
        if node.node:
            return  # node 0 calls
    program = list(command["program"])
    if program[0] == "{python}":
        program[0] = node.python
    if node.node == 0:
        write_hostfiles(node, command.get("hostfiles") or {})
    prefix = list(node.prepared.get("prefix") or ())  # of a container
    if command["spawn"] == "launcher":
        shim = [*agent_argv(runtime_tree), "rank", "--"]
        argv = [substitute(word, values) for word in command["launcher"]]
        if prefix and command["launcher"][0] == "{python}":  # it runs inside, and so do its ranks
            argv, shim[0] = prefix + argv, node.python
        else:
            program = prefix + program
        argv += shim + program
        node.ranks.append(start_process(node, argv, env, log))
    else:
        nnodes, nproc = 1 if node.driven else node.nnodes, node.local_ranks
        addr, port = values["master_addr"], int(values["master_port"])
        for local_rank in range(nproc):
            rank = node.node * nproc + local_rank
            own = rank_variables(rank, local_rank, node.node, nnodes, nproc, addr, port)
            own.update(own_part(env, local_rank, nproc))
            for name, texts in (command.get("rank_env") or {}).items():
                if name not in (node.config.env):  # the job's own wins
                    own[name] = substitute(texts[local_rank], {**values, "rank": str(rank)})
            log = os.path.join(node.logs, f"rank-{rank}.log")
            node.ranks.append(start_process(node, prefix + program, {**env, **own}, log, rank, local_rank))
    node.record_pids()


def host_names(node: NodeState) -> list[str]:
    """Return the nodes' names for launchers, in order: the cluster's names, or the machines' own, or ``node-<n>``."""
    if node.nnodes == 1:
        return ["localhost"]  # any other name of it might be looked for on the network
    given = [str(host["name"]) for host in node.config.hosts][: node.nnodes]
    paths = [os.path.join(node.attempt_dir, f"node-{k}", "lease.json") for k in range(node.nnodes)]
    names = given or [str((read_json(path) or {}).get("host")) for path in paths]
    return names if len(set(names)) == node.nnodes else [f"node-{k}" for k in range(node.nnodes)]


def write_hostfiles(node: NodeState, templates: Mapping[str, str]) -> None:
    """Write the hostfiles of the launcher: one line for each node."""
    for name, line in templates.items():
        values = [{"host": host, "nproc": str(node.nproc)} for host in host_names(node)]
        fd = os.open(os.path.join(node.attempt_dir, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.writelines(substitute(line, value) for value in values)


def start_process(
    node: NodeState,
    argv: Sequence[str],
    env: dict[str, str],
    log: str,
    rank: int | None = None,
    local_rank: int | None = None,
    role: str = "",
) -> Rank:
    """Start a rank, or with no rank the launcher or a service, which has a *role*."""
    null = os.open(os.devnull, os.O_RDONLY)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        start = os.fstat(fd).st_size
        pid = spawn(argv, env, cwd=node.work, stdin=null, output=fd, umask=users_umask())
    finally:
        os.close(null)
        os.close(fd)
    node.sessions[pid] = process_start(pid) or ""
    return Rank(rank, local_rank, pid, log, start, role)


def join_rendezvous(node: Supervisor) -> tuple[str, int] | None:
    """Agree with the other nodes on address and port; `None` when a stop came first."""
    if not node.node:
        node.token = node.link.token_of_ranks(node.rendezvous_id()) if node.link else os.urandom(32).hex()
    if node.nnodes == 1:
        node.port = Port()
        if node.shims:
            publish(node, "127.0.0.1", node.port.number)
        return "127.0.0.1", node.port.number
    if node.config.network:
        node.listening = allowed_address(node.config.network)
    node.write_heartbeat("waiting")
    node.next_poll = 0.0
    if node.node == 0:
        peers = list(range(1, node.nnodes))
        late = list(peers)

        def all_ready() -> bool:
            while late and is_ready(node, late[-1]):
                late.pop()
            return not late

        if not node.until(all_ready):
            return None
        if node.link and not node.until(lambda: node.link.state().get("address") is not None):
            return None
        node.port = Port()
        addr = address(
            node, [read_json(os.path.join(node.attempt_dir, f"node-{p}", "lease.json")) or {} for p in peers]
        )
        publish(node, addr, node.port.number)
        return addr, node.port.number
    found: list[dict[str, Any]] = []
    path = os.path.join(node.attempt_dir, f"rendezvous-r{node.restart}.json")

    def published() -> bool:
        record = read_json(path)
        if record is not None:
            found.append(record)
        return record is not None or start_timed_out(node, 0)

    if not node.until(published) or not found:
        return None
    node.token = node.link.token_of_ranks(node.rendezvous_id()) if node.link else str(found[0].get("token") or "")
    return str(found[0]["addr"]), int(found[0]["port"])


def publish(node: NodeState, addr: str, port: int) -> None:
    """Publish address and port of rank 0 to the other nodes, and to the shims below a launcher."""
    record = {"addr": addr, "port": port, "id": node.rendezvous_id(), "at": time.time()}
    if node.nnodes > 1 and not node.link:  # the link is signed, not encrypted
        record["token"] = node.token
    path = os.path.join(node.attempt_dir, f"rendezvous-r{node.restart}.json")
    write_json(path, record, durable=node.nnodes > 1)
    node.notify_link()


def address(node: NodeState, leases: Sequence[dict[str, Any]]) -> str:
    """Return the address of node 0 for the nodes that hold *leases*."""
    if node.listening:
        return node.listening[1]
    if node.master_host:
        return node.master_host
    if node.link and (reached := node.link.state().get("address")):
        return str(reached)
    here = (node.me["boot_id"], node.me["net"])
    if all((lease.get("boot_id"), lease.get("net")) == here for lease in leases):
        return "127.0.0.1"
    return str(own_address([str(lease["host"]) for lease in leases if lease.get("host")]))


def node_address(node: NodeState, master: str) -> str:
    """Return the address of this node for the others, given that of node 0."""
    if node.listening:
        return node.listening[1]
    if node.link and (own := node.link.state().get("address")):
        return str(own)
    if not node.node or master in ("127.0.0.1", "::1"):
        return master
    return str(own_address([master]))

"""The contract of a command: how the processes of a job start on a given set of nodes, and the argv of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec


# Known only on the node; the agent fills them in. Everything else is fixed at render time.
PLACEHOLDERS = (
    *("python", "nnodes", "node_rank", "nproc", "master_addr", "master_port", "rdzv_id"),
    "world_size",  # nnodes x nproc
    "min_nodes",  # the fewest nodes that the job goes on with; nnodes where the number is fixed
    "is_host",  # 1 on node 0, where a rendezvous service runs; 0 on the others
    "node_addr",  # where the other nodes reach this one
    "attempt_dir",
    "service_token",  # a password of this incarnation for what the nodes serve each other: never in an argv
)
SETTLE_S = 5.0


@dataclass(frozen=True)
class Service:
    """Process that runs beside the program until the attempt ends: the head of a cluster on node 0, workers elsewhere.

    The agents of *nodes* start ``argv``, which may hold ``{placeholders}``. At the end of the program it gets SIGTERM,
    and some seconds to clean up. Its own end before that is a failure of the node; *role* is what messages call it.
    """

    role: str
    nodes: Literal["first", "others"]
    argv: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form in ``agent.json``."""
        return {"role": self.role, "nodes": self.nodes, "argv": list(self.argv)}


@dataclass(frozen=True)
class NodeCommand:
    """Processes that the agents of an attempt start.

    ``spawn="ranks"``: the agent itself starts ``nproc`` processes, each ``program`` with RANK, LOCAL_RANK and so on.
    ``spawn="launcher"``: the agent starts ``launcher + [rank shim] + program`` once; the launcher (torchrun, mpirun,
    deepspeed) starts the ranks, and the shim around each rank writes its log and its true exit status.

    ``primary="first"``: that happens on node 0 alone, and its end is the end of the attempt on all nodes. Of ranks that
    the agent starts itself there is one then: a driver. The other nodes have their part by one of two ways:
    ``remote_shell``: the launcher on node 0 reaches them by ``ssh``; that is the agent's own look-alike, first on the
    launcher's PATH, and the other agents run what it asks for.
    ``services`` are what the agents run beside the program, by the role of their node. ``ready`` is run on node 0
    before the program: it ends with 0 when the services of all nodes have found each other.

    ``hostfiles`` are written by the agent of node 0 into the attempt directory, by name: the text is repeated for each
    node, with ``{host}`` and ``{nproc}`` filled in.
    ``host_env`` are variables whose text is repeated for each node, with ``{host}`` filled in, and joined by commas.
    ``rank_env``, with ``spawn="ranks"``, are variables that have one text for each local rank; ``{rank}`` is filled in.
    ``settle_s`` is how long after a rank's failure the launcher may take, in seconds, to end or to start ranks anew;
    after that the agent ends it.
    ``elastic``: the launchers meet again without the ranks of a node that was lost, down to the job's fewest nodes;
    others end with the first node that is lost, and the next attempt starts with the nodes that are left.
    ``containable``: the ranks can run in containers, where a launcher of the node outside does not find its own files.
    ``only_on`` names the kinds of cluster that can carry it; empty: all of them.

    ``launcher``, ``ready``, ``env`` and ``rank_env`` values may hold ``{placeholders}`` (`PLACEHOLDERS`). In
    ``program`` only a first word that is exactly ``{python}`` is replaced: the user's own arguments pass through
    untouched.
    """

    spawn: Literal["ranks", "launcher"]
    program: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    primary: Literal["each", "first"] = "each"
    remote_shell: bool = False
    services: tuple[Service, ...] = ()
    ready: tuple[str, ...] = ()
    hostfiles: Mapping[str, str] = field(default_factory=dict)
    host_env: Mapping[str, str] = field(default_factory=dict)
    rank_env: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settle_s: float = SETTLE_S
    elastic: bool = False
    containable: bool = True
    only_on: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON-able form in ``agent.json``; what has its usual value is left out."""
        told = {"spawn": self.spawn, "launcher": list(self.launcher), "program": list(self.program)}
        more = {
            "primary": self.primary,
            "remote_shell": self.remote_shell,
            "services": [service.to_dict() for service in self.services],
            "ready": list(self.ready),
            "hostfiles": dict(self.hostfiles),
            "host_env": dict(self.host_env),
            "rank_env": {name: list(texts) for name, texts in self.rank_env.items()},
            "settle_s": self.settle_s,
            "elastic": self.elastic,
        }
        usual = NodeCommand("ranks", ())
        own = {name: value for name, value in more.items() if getattr(self, name) != getattr(usual, name)}
        return {**told, "env": dict(self.env), **own}


class Command(Protocol):
    """Pure: a job and its shape in, argv and environment out."""

    kind: str

    def check(self, job: JobSpec) -> str | None:
        """Return the reason why this command cannot carry *job*, or `None`."""
        ...

    def build(self, job: JobSpec) -> NodeCommand:
        """Return what each node's agent starts; the same text for every node."""
        ...


def program_of(job: JobSpec) -> tuple[str, ...]:
    """The user's program and its arguments, verbatim; ``{python}`` stands for the node's interpreter."""
    arguments = tuple(job.argv)
    if job.script is not None:
        return ("{python}", job.script, *arguments)
    if job.module is not None:
        return ("{python}", "-m", job.module, *arguments)
    if isinstance(job.command, str):
        # As if the arguments were written behind the command; the second "sh" is the shell's $0.
        words = (job.command.rstrip() + ' "$@"', "sh", *arguments) if arguments else (job.command,)
        return ("/bin/sh", "-c", *words)
    return (*(job.command or ()), *arguments)

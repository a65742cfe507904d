"""Command ``torchrun``: PyTorch's launcher starts the ranks of each node.

Two ways to meet. *static*, the default: the agent of node 0 has chosen a free port and published it, so every node
knows the address and its own rank beforehand, and no launcher has to find the others. A job on one node takes the same
path; neither ``--standalone`` (a second store on a second port) nor torchrun's default port 29500 (two jobs on one
machine collide) is ever used. Restarts belong to the orchestrator then: a static rendezvous hands restarted ranks the
addresses of the ones that died (torch 2.13).

*c10d*: the launchers meet in a store on node 0, at the published address, and can meet again: torchrun restarts ranks
itself (``max_restarts``), and with a range of nodes it goes on with those that are left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orc.launchers.commands.base import SETTLE_S, NodeCommand, program_of
from orc.launchers.commands.options import (
    FLAG,
    MAPPING,
    NUMBER,
    TEXT,
    Option,
    Refusal,
    about,
    flags,
    one_of,
    pairs,
    refuse,
    whole,
)

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec

# torchrun's options that may be given in `launcher.options`. The others are decided by orc: what names nodes, ranks
# and the rendezvous, what redirects output (each rank's output goes to its own log anyway), and what limits the time
# between SIGTERM and SIGKILL (the job's `grace`).
OPTIONS: Mapping[str, Option] = {
    "rdzv_backend": one_of("static", "c10d"),
    "max_restarts": whole(0),
    "rdzv_conf": MAPPING,
    "monitor_interval": NUMBER,
    "start_method": one_of("spawn", "fork", "forkserver"),
    "role": TEXT,
    "local_addr": TEXT,
    "event_log_handler": TEXT,
    "numa_binding": one_of("node", "socket", "exclusive", "core-complex"),
    "signals_to_handle": TEXT,
    "virtual_local_rank": FLAG,
}
_DECIDED = {
    "shutdown_timeout": "it follows from the job's grace",
    "nnodes": "it follows from resources.nodes",
    "nproc_per_node": "it follows from resources.procs_per_node",
    "rdzv_endpoint": "node 0 publishes a free port for every attempt",
    "rdzv_id": "every attempt has its own",
    "master_addr": "node 0 publishes it for every attempt",
    "master_port": "node 0 publishes a free one for every attempt",
    "node_rank": "orc numbers the nodes",
    "standalone": "one node is not a special case here",
    "log_dir": "each rank's output is in its own log: orc logs JOB --rank N",
    "tee": "each rank's output is in its own log: orc logs JOB --rank N",
    "redirects": "each rank's output is in its own log: orc logs JOB --rank N",
}

# Defaults for launchers that the agents start within moments of each other, in seconds. torchrun's own are made for
# people who start them by hand: a node that is gone would be noticed late, and a range of nodes would be waited for.
_C10D_CONF: Mapping[str, Any] = {
    "join_timeout": 120,
    "last_call_timeout": 10,
    "close_timeout": 10,
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 4,
    "read_timeout": 20,
}
# How long a c10d launcher may be without ranks between a failure and the next round.
_REGROUP_S = 150.0

_BASE = ("{python}", "-m", "torch.distributed.run")
_STATIC = (
    "--nnodes={nnodes}",
    "--node-rank={node_rank}",
    "--nproc-per-node={nproc}",
    "--rdzv-backend=static",
    "--master-addr={master_addr}",
    "--master-port={master_port}",
    "--rdzv-id={rdzv_id}",
    "--max-restarts=0",
    "--log-dir={attempt_dir}/node-{node_rank}/launcher",  # by default a directory in /tmp, which it never removes
)


class TorchrunCommand:
    """``python -m torch.distributed.run`` once per node."""

    kind = "torchrun"

    def check(self, job: JobSpec) -> str | None:
        """Check that torchrun has the options that are given; restarts only where a new rendezvous is possible."""
        options = job.launcher.options
        if reason := refuse(options, OPTIONS, _DECIDED):
            return reason
        if options.get("rdzv_backend", "static") == "static":
            if options.get("max_restarts"):
                return about(
                    "max_restarts",
                    "needs rdzv_backend: c10d; with a static rendezvous restarted ranks would look "
                    "for the ones that died (orc itself starts new attempts: retry.max_attempts and retry.on)",
                )
        elif "is_host" in options.get("rdzv_conf", {}):
            return Refusal(
                "rdzv_conf", "option rdzv_conf: is_host cannot be given: node 0 is the host of the rendezvous"
            )
        return None

    def build(self, job: JobSpec) -> NodeCommand:
        """The launcher's argv with placeholders; ``--no-python`` because the rank shim is what it starts."""
        options = dict(job.launcher.options)
        # Without it torchrun kills the ranks 30 seconds after SIGTERM, whatever the job's grace. A variable and not
        # the flag, because a torch that does not know it ignores the variable and would refuse the flag.
        env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(job.grace) + 1)}
        settle_s = SETTLE_S
        elastic = False
        if options.pop("rdzv_backend", "static") == "static":
            options.pop("max_restarts", None)
            words = [*_STATIC, *flags(options)]
        else:
            restarts = options.pop("max_restarts", 0)
            words = [*_c10d(restarts, options.pop("rdzv_conf", {}), options), *flags(options)]
            # The ranks' own store: the one of the rendezvous remembers ranks that died, which costs a failed round.
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            if restarts:
                settle_s = _REGROUP_S
                elastic = job.resources.min_nodes < job.resources.max_nodes
        launcher = (*_BASE, *words, "--no-python")
        return NodeCommand("launcher", program_of(job), launcher, env, settle_s=settle_s, elastic=elastic)


def _c10d(restarts: int, conf: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    # Told which launcher hosts the store, because one that guesses by comparing names and addresses gets it wrong on
    # a machine that resolves its own name to 127.0.1.1; told their addresses, for the same reason.
    words = [
        "--nnodes={min_nodes}:{nnodes}",
        "--nproc-per-node={nproc}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint={master_addr}:{master_port}",
        "--rdzv-id={rdzv_id}",
        f"--rdzv-conf=is_host={{is_host}},{pairs({**_C10D_CONF, **conf})}",
        f"--max-restarts={restarts}",
        _STATIC[-1],
    ]
    return words if "local_addr" in options else [*words, "--local-addr={node_addr}"]


COMMAND = TorchrunCommand()

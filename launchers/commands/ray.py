"""Command ``ray``: a Ray cluster made of the attempt's nodes, with the program as its driver on node 0.

The agent of node 0 runs Ray's *head*, those of the other nodes a *worker* each (``ray start --block``). When all of
them have joined, the program starts on node 0, once, with RAY_ADDRESS set. Its end is the end of the attempt.

Ray serves its ports on all addresses of a node. So it runs with its token authentication, which came with 2.52; an
older one is refused on the node.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orc.launchers.commands.base import NodeCommand, Service, program_of
from orc.launchers.commands.options import MAPPING, TEXT, Option, about, flags, refuse, whole

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec

OPTIONS: Mapping[str, Option] = {
    "num_cpus": whole(0),
    "num_gpus": whole(0),
    "resources": MAPPING,
    "object_store_memory": TEXT,
    "object_manager_port": whole(1024),
    "node_manager_port": whole(1024),
    "min_worker_port": whole(1024),
    "max_worker_port": whole(1024),
}
_ADDRESS = "node 0 publishes it for every attempt"
_DASHBOARD = "the dashboard is off: it would be a web page for anybody who reaches the node"
_DECIDED = {
    "address": _ADDRESS,
    "port": "node 0 publishes a free one for every attempt",
    "head": "it runs on node 0",
    "block": "the agents run it in the foreground",
    "node_ip_address": "the agents know where the other nodes reach each one",
    "temp_dir": "each node has its own, which goes with the attempt",
    "include_dashboard": _DASHBOARD,
    "dashboard_host": _DASHBOARD,
    "dashboard_port": _DASHBOARD,
    "num_nodes": "it follows from resources.nodes",
}
JOIN_TIMEOUT_S = 120

# Prints further words for the head. Ray's client server cannot be left out where grpc is installed, and its usual port
# would be the same for all jobs of a machine.
_CHECK = """\
import importlib.metadata, importlib.util, socket, sys
try:
    version = importlib.metadata.version("ray")
except importlib.metadata.PackageNotFoundError:
    sys.exit(f"{sys.executable} has no ray: pip install 'ray>=2.52'")
if tuple(map(int, version.split(".")[:2])) < (2, 52):
    sys.exit(f"ray {version} lets anybody in who reaches its ports: it takes 2.52 or newer")
if importlib.util.find_spec("grpc"):
    with socket.socket() as free:
        free.bind(("", 0))
        print(f"--ray-client-server-port={free.getsockname()[1]}")
"""
# Ray's sockets lie in its directory, and the path of a socket is short: so it is not the attempt's. All of Ray is one
# process group, so that nothing writes there any more when it is removed.
_START = """\
unset RAY_ADDRESS
own=$("$0" -c {check}) || exit
dir=$(mktemp -d /tmp/orc-ray.XXXXXX) || exit
setsid "$0" -m ray.scripts.scripts start --block --log-color=false --disable-usage-stats --temp-dir="$dir" {words} &
trap : TERM
wait $!
status=$?
kill -KILL -- -$! 2>/dev/null
until rm -rf "$dir"; do sleep 0.1; done
exit $status
"""
_JOINED = """\
import sys, time
import ray
address, wanted, limit = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
found = 0
while found < wanted:
    if time.monotonic() > limit:
        sys.exit(f"{found} of {wanted} nodes have joined Ray's head within {sys.argv[3]} s")
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        found = sum(node["Alive"] for node in ray.nodes())
    except ConnectionError:
        pass
    time.sleep(0.1)
"""


class RayCommand:
    """Ray's head on node 0, a worker on every other node, and the program as the driver."""

    kind = "ray"

    def check(self, job: JobSpec) -> str | None:
        """Return the reason why this command cannot carry *job*, or `None`."""
        options = job.launcher.options
        if reason := refuse(options, OPTIONS, _DECIDED):
            return reason
        if (job.resources.procs_per_node or 1) != 1:
            return (
                f"the program runs once, as Ray's driver, and resources.procs_per_node is "
                f"{job.resources.procs_per_node}; tasks and actors take CPUs and GPUs by num_cpus and num_gpus"
            )
        if ("min_worker_port" in options) != ("max_worker_port" in options):
            return "options min_worker_port and max_worker_port belong together"
        try:
            _object_store(job)
        except ValueError as error:
            return about("object_store_memory", f"= {options['object_store_memory']!r}: {error}")
        return None

    def build(self, job: JobSpec) -> NodeCommand:
        """Return the services of the nodes, the wait for all of them, and the program."""
        head = ["--head", "--port={master_port}", "--include-dashboard=false", "$own"]
        address = "{master_addr}:{master_port}"
        join = shlex.join(["-c", _JOINED])
        return NodeCommand(
            spawn="ranks",
            program=program_of(job),
            primary="first",
            services=(
                Service("Ray head", "first", _start(job, head)),
                Service("Ray worker", "others", _start(job, [f"--address={address}"])),
            ),
            ready=("/bin/sh", "-c", f'exec "$0" {join} {address} {{nnodes}} {JOIN_TIMEOUT_S}', "{python}"),
            # The token that ranks know each other by does not travel; Ray's own goes over the network as it is.
            env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "{service_token}"},
            rank_env={"RAY_ADDRESS": (address,)},
        )


def _start(job: JobSpec, own: list[str]) -> tuple[str, ...]:
    """Return the argv of ``ray start`` on one node; *own* are the words of its role."""
    given = dict(job.launcher.options)
    given.setdefault("num_gpus", job.resources.gpus_per_node)
    if job.resources.cpus_per_proc:
        given.setdefault("num_cpus", job.resources.cpus_per_proc * job.resources.nproc)
    if resources := given.pop("resources", None):
        given["resources"] = json.dumps(resources)
    if memory := _object_store(job):
        given["object_store_memory"] = memory
    for name in ("min_worker_port", "max_worker_port"):  # 0: whatever is free, as several nodes may be on one machine
        given.setdefault(name, 0)
    words = ["--node-ip-address={node_addr}", *own, *map(shlex.quote, flags(given))]
    text = _START.format(check=shlex.quote(_CHECK), words=" ".join(words))
    return ("/bin/sh", "-c", text, "{python}")


def _object_store(job: JobSpec) -> int | None:
    """Return the size of each node's object store in bytes. Raises `ValueError` for text that is no size."""
    from orc.launchers.spec import grammar

    given = job.launcher.options.get("object_store_memory")
    return grammar.memory_bytes(grammar.memory(given)) if given is not None else None


COMMAND = RayCommand()

"""Start of the processes by ``torchrun``, where options are given that torchrun alone gives a meaning to.

They are a rendezvous other than ``static``, its settings, and the interval of looks at the processes. The launch
becomes torchrun: it meets the launches on other machines, starts the processes, and starts them again.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NoReturn

from orc.launchers.accelerate.keys import OPTIONS
from orc.launchers.accelerate.merge import Values
from orc.launchers.agent import network
from orc.launchers.commands.options import flags
from orc.launchers.errors import LaunchError
from orc.launchers.foreground.launch import LocalLaunch, environment
from orc.launchers.foreground.tee import Streams

_LOOPBACK = "127.0.0.1"
_RUN_ID = "orc-launch"


def wanted(request: LocalLaunch, values: Values) -> bool:
    """Return True where *values* need torchrun itself, and *request* is no process of an MPI or Slurm step."""
    world = request.world
    if world is not None and world.local_size != request.nprocs:
        return False  # mpirun or srun has started the processes; nobody has to meet
    settings = ("rdzv_backend", "rdzv_conf", "monitor_interval")
    return any(name in values.found and not OPTIONS[name].says_nothing(values.get(name)) for name in settings)


def command_line(request: LocalLaunch, values: Values) -> list[str]:
    """Return the command line of torchrun for a *request* that `documented` has made of *values*.

    Raises `LaunchError` for a script that is not there.
    """
    request.argv()  # names what is missing before torch is imported for it
    world, backend = request.world, values.get("rdzv_backend", "static")
    machines = world.size // world.local_size if world else 1
    address, port = (world.addr, world.port) if world else (_LOOPBACK, 0)
    conf = dict(values.get("rdzv_conf", {}))
    if backend == "static" and request.max_restarts:  # it hands restarted ranks the addresses of those that died
        if machines > 1:
            raise LaunchError("torchrun starts processes on several machines again with --rdzv_backend c10d alone")
        backend = "c10d"
    own: dict[str, Any] = {
        "nnodes": machines,
        "nproc_per_node": request.nprocs,
        "rdzv_backend": backend,
        "rdzv_endpoint": f"{address}:{port}",
        "rdzv_id": _RUN_ID,
        "max_restarts": request.max_restarts,
    }
    if backend == "static":
        with closing(network.Port()) as free:  # torchrun itself takes 29500, which a second launch here cannot
            own |= {"master_addr": address, "master_port": port or free.number, "node_rank": world.node if world else 0}
        del own["rdzv_endpoint"]
    elif world is None or address.startswith("127."):
        own["local_addr"] = _LOOPBACK
    else:  # not the machine's name, which its own table of names may say is 127.0.1.1
        own["local_addr"] = network.own_address([address])
    if conf:
        own["rdzv_conf"] = conf
    for name in ("monitor_interval", "role"):
        if values.get(name) is not None:
            own[name] = values.get(name)
    if request.log_dir is not None:
        own |= {"log_dir": request.log_dir, "tee": _streams(request.tee), "redirects": _streams(request.redirects)}
    kind = ["--no-python"] if request.no_python else ["--module"] if request.module else []
    program = list(request.program)
    if request.python_flags and not request.no_python:  # torchrun starts Python without them
        kind, program = ["--no-python"], request.argv()
    return [request.python, "-m", "torch.distributed.run", *flags(own), *kind, *program]


def start(request: LocalLaunch, values: Values) -> NoReturn:
    """Become torchrun. Raises `LaunchError`: those of `command_line`, and for an interpreter that is not there."""
    words, env = command_line(request, values), environment(request)
    # The ranks' own store: the one of the rendezvous remembers ranks that died, which costs a failed round.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(request.grace_s))
    request.make_log_dir()
    try:
        os.execvpe(words[0], words, env)  # noqa: S606 — no shell
    except OSError as error:
        raise LaunchError(f"{shlex.quote(words[0])} cannot be started: {error.strerror}") from None


def _streams(streams: Streams) -> str:
    if isinstance(streams, Mapping):
        return ",".join(f"{rank}:{stream}" for rank, stream in streams.items())
    return str(streams)

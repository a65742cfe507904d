"""Command ``deepspeed``: DeepSpeed's launcher starts the ranks.

*standard*, the default: every node's agent starts DeepSpeed's launcher for its node, just as ``deepspeed --no_ssh``
does. Nothing has to reach another host, each node may have its own Python and its own directories, and the ranks' own
slots are used on a node that is shared with other jobs. *slurm* is the same, on a Slurm cluster: srun has started the
agents.

*pdsh*, *openmpi*, *mpich* and *impi* are DeepSpeed's own ways to many nodes: the ``deepspeed`` runner on node 0 reads
the host file and starts the others, by the agents' ``ssh`` (`orc.launchers.commands.base.NodeCommand`). They need the
same paths on all hosts.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orc.launchers.commands.base import NodeCommand, program_of
from orc.launchers.commands.mpirun import HYDRA_WORDS, OPEN_MPI_4, open_mpi_words
from orc.launchers.commands.options import FLAG, TEXT, WORDS, Option, about, flags, one_of, refuse

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec

_EACH = ("standard", "slurm")
_RUNNERS = ("pdsh", "openmpi", "mpich", "impi")
OPTIONS: Mapping[str, Option] = {
    "launcher": one_of(*_EACH, *_RUNNERS),
    "include": TEXT,
    "exclude": TEXT,
    "launcher_args": WORDS,
    "local_rank": FLAG,
    "bind_cores_to_rank": FLAG,
    "bind_core_list": TEXT,
    "log_level": one_of("debug", "info", "warning", "error", "critical"),
}
# Variables with these beginnings are put on the command lines of all nodes by DeepSpeed's runner, for anybody to see.
_PASSED_ON = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
_FILE = "it is written from the nodes of each attempt; a cluster of kind ssh can read its hosts from a file"
_LOGS = "each rank's output is in its own log: orc logs JOB --rank N"
_DECIDED = {
    "hostfile": _FILE,
    "deepspeed_hostfile": _FILE,
    "num_nodes": "it follows from resources.nodes",
    "num_gpus": "it follows from resources.procs_per_node and resources.gpus_per_node",
    "num_accelerators": "it follows from resources.procs_per_node and resources.gpus_per_node",
    "master_addr": "node 0 publishes it for every attempt",
    "master_port": "node 0 publishes a free one for every attempt",
    "node_rank": "orc numbers the nodes",
    "no_local_rank": "it is so already; local_rank: true gives the script --local_rank=N",
    "no_ssh": "that is launcher: standard, the default",
    "no_ssh_check": "hosts need no SSH to each other",
    "ssh_port": "hosts need no SSH to each other",
    "module": "give the job a `module` in place of a `script`",
    "no_python": "give the job a `command` in place of a `script`",
    "venv_script": "see `setup` and `environment` of the job",
    "enable_each_rank_log": _LOGS,
    "save_pid": "the agents know every process: orc cancel ends them",
    "deepspeed_multinode_launcher": "the option is called launcher",
    "deepspeed_inclusion_filter": "the option is called include",
    "deepspeed_exclusion_filter": "the option is called exclude",
    "autotuning": "it starts jobs of its own; submit them one by one",
}

# As deepspeed's runner does for its own way to many nodes; the file holds NAME=value lines.
_ENV_FILE = """\
name=${DS_ENV_FILE:-.deepspeed_env}
for file in "$HOME/$name" "./$name"; do
  [ ! -f "$file" ] || while IFS= read -r line || [ -n "$line" ]; do
    case $line in [A-Za-z_]*=*) export "$line" ;; esac
  done <"$file"
done
"""
# DeepSpeed numbers the ranks from a table of all nodes, and makes the slots of this one CUDA_VISIBLE_DEVICES: they have
# to be those that the agent holds.
_WORLD = (
    "import base64, json, os, sys; n, p, k = map(int, sys.argv[1:]); "
    'mine = [int(s) if s.isdigit() else s for s in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if s]; '
    'world = {f"node-{i}": mine if i == k and len(mine) == p else list(range(p)) for i in range(n)}; '
    "print(base64.urlsafe_b64encode(json.dumps(world).encode()).decode())"
)
_STANDARD = (
    _ENV_FILE
    + f'world=$("$0" -I -S -c {shlex.quote(_WORLD)} {{nnodes}} {{nproc}} {{node_rank}}) || exit\n'
    + 'exec "$0" -u -m deepspeed.launcher.launch --world_info="$world" --node_rank={node_rank}'
)
_RUNNER = 'exec "$0" -u -m deepspeed.launcher.runner --hostfile="$ORC_ATTEMPT_DIR/hostfile" --no_ssh_check'
_AS_ROOT = '[ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n'
# DeepSpeed's helper for MPICH is no program, and can be started by Python alone; then the shim has to be, too.
_WITHOUT_PYTHON = "shift 3\n"
_ALL = " --master_addr={master_addr} --master_port={master_port} --no_local_rank"

# The program of a rank in one word. pdsh gives what it runs to a shell on every node, with little or no quoting.
_UNPACK = (
    "import base64, json, os, sys; w = json.loads(base64.b64decode(sys.argv[1])); "
    "w[0] = sys.executable if w[0] == '{python}' else w[0]; "
    "w[int(sys.argv[2]):0] = ['--local_rank=' + os.environ['LOCAL_RANK']] if int(sys.argv[2]) else []; "
    "os.execvp(w[0], w)"
)


class DeepspeedCommand:
    """DeepSpeed's launcher, on each node or on node 0 alone."""

    kind = "deepspeed"

    def check(self, job: JobSpec) -> str | None:
        """Check that the chosen launcher has the options that are given."""
        options = job.launcher.options
        if reason := refuse(options, OPTIONS, _DECIDED):
            return reason
        launcher = options.get("launcher", "standard")
        for name in ("include", "exclude"):
            if name in options and launcher != "pdsh":
                return about(
                    name,
                    "needs launcher: pdsh; nodes are chosen when the job is placed "
                    "(resources.options.ssh: hosts, labels, exclude; resources.options.slurm: nodelist, exclude)",
                )
        if "include" in options and "exclude" in options:
            return "options include and exclude exclude each other"
        if "launcher_args" in options and launcher in _EACH:
            return about("launcher_args", f"is for {', '.join(_RUNNERS)}, and the launcher is {launcher}")
        shown = [name for name in job.secrets if launcher in _RUNNERS and name.startswith(_PASSED_ON)]
        if shown:
            return f"DeepSpeed would put the secret {shown[0]} on a command line; launcher: standard does not"
        if options.get("local_rank") and isinstance(job.command, str):
            return about("local_rank", "cannot be put into a shell command: give `script`, `module` or a list of words")
        return None

    def build(self, job: JobSpec) -> NodeCommand:
        """The script that starts DeepSpeed, on each node or on the first."""
        options = dict(job.launcher.options)
        launcher = options.pop("launcher", "standard")
        program = _packed(job) if options.pop("local_rank", False) or launcher == "pdsh" else program_of(job)
        given = options.pop("launcher_args", ())
        own = [shlex.quote(word) for word in flags(options, separator="_")]
        if launcher in _EACH:
            text = " ".join([_STANDARD + _ALL, "--no_python", *own, '"$@"\n'])
            only_on = ("slurm",) if launcher == "slurm" else ()
            return NodeCommand(
                "launcher", program, ("/bin/sh", "-c", text, "{python}"), containable=False, only_on=only_on
            )
        own += ['--launcher_args="$words"', "" if launcher == "mpich" else "--no_python"]
        before = _launcher_args(launcher, [str(word) for word in given])
        text = " ".join([before + _RUNNER + _ALL, f"--launcher={launcher}", *filter(None, own), '"$@"\n'])
        hostfiles = {"hostfile": "{host} slots={nproc}\n"}
        return NodeCommand(
            "launcher",
            program,
            ("/bin/sh", "-c", text, "{python}"),
            primary="first",
            remote_shell=True,
            hostfiles=hostfiles,
            containable=False,
        )


def _launcher_args(launcher: str, given: list[str]) -> str:
    """Lines of shell that set ``$words`` to what DeepSpeed passes on to mpirun or pdsh, and what that way needs."""
    if launcher == "openmpi":
        four, five = (shlex.quote(shlex.join([*open_mpi_words({}, version), *given])) for version in (4, 5))
        which = f"case $(mpirun --version 2>&1) in\n{OPEN_MPI_4}) words={four} ;;\n*) words={five} ;;\nesac\n"
        return f"{_AS_ROOT}{which}"
    words = [*HYDRA_WORDS, *given] if launcher in ("mpich", "impi") else given
    return f"{_WITHOUT_PYTHON if launcher == 'mpich' else ''}words={shlex.quote(shlex.join(words))}\n"


def _packed(job: JobSpec) -> tuple[str, ...]:
    words = program_of(job)
    behind = 2 if job.script else 3 if job.module else 1  # as DeepSpeed does: the first argument of the script
    at = behind if job.launcher.options.get("local_rank") else 0
    packed = base64.b64encode(json.dumps(words).encode()).decode()
    return ("{python}", "-I", "-S", "-c", _UNPACK, packed, str(at))


COMMAND = DeepspeedCommand()

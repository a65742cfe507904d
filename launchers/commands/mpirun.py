"""Command ``mpirun``: one mpirun on node 0 starts the ranks of all nodes.

Open MPI and the Hydra family (MPICH, Intel MPI) spell everything differently, and which one a node has is only known
there. So what is rendered is a short shell script that asks ``mpirun --version`` and then is replaced by mpirun; with
`dialect` given it does not ask. mpirun reaches the other nodes by ``ssh``, which is the agents' own here: no host needs
a key for another one, and what it starts there has the environment that the agent of that node has prepared. The ranks
get RANK and its kin from the shim around each of them.

Failures are the agents' business, as with every other launcher: mpirun is told not to kill the other ranks when one
ends with a status other than 0, because it would leave them a second, and a rank that asks to be run again (exit status
75) must not cost the others their checkpoint.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from textwrap import indent
from typing import TYPE_CHECKING, Any

from orc.launchers.commands.base import NodeCommand, program_of
from orc.launchers.commands.options import MAPPING, TEXT, WORDS, Option, about, one_of, refuse, whole

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec

DIALECTS = ("openmpi", "mpich", "intel")
OPTIONS: Mapping[str, Option] = {
    "dialect": one_of("auto", *DIALECTS),
    "program": TEXT,
    "bind_to": TEXT,
    "map_by": TEXT,
    "mca": MAPPING,
    "ccl_worker_count": whole(1),
    "ccl_atl_transport": one_of("ofi", "mpi"),
    "arguments": WORDS,
}
_HOSTS = "it is written from the nodes of each attempt; a cluster of kind ssh can read its hosts from a file"
_DECIDED = {
    "hostfile": _HOSTS,
    "mpirun_hostfile": _HOSTS,
    "machinefile": _HOSTS,
    "hosts": _HOSTS,
    "np": "it follows from resources.nodes and resources.procs_per_node",
    "n": "it follows from resources.nodes and resources.procs_per_node",
    "ppn": "it follows from resources.procs_per_node",
    "mpirun_ccl": "the number of oneCCL worker threads is ccl_worker_count",
    "env": "write it into the job's own `env`: the agents give it to the ranks of all nodes",
    "x": "the agents give the job's environment to the ranks of all nodes",
    "genv": "the agents give the job's environment to the ranks of all nodes",
    "allow_run_as_root": "it is given when the job runs as root",
}
_WORD = re.compile(r"[A-Za-z0-9_.,:=+/-]+")

# A host that is switched off is noticed by mpirun after minutes, and until then it ignores SIGTERM: 8 seconds instead.
# The other nodes are always reached from here, by the agents' ssh, whatever scheduler the environment speaks of.
_KEEPALIVE: Mapping[str, Any] = {
    "oob_tcp_keepalive_time": 5,
    "oob_tcp_keepalive_intvl": 2,
    "oob_tcp_keepalive_probes": 3,
    "ras": "^slurm,tm,lsf,gridengine",
}
_MCA: Mapping[str, Any] = {
    **_KEEPALIVE,
    "plm": "rsh",
    "plm_rsh_agent": "ssh",
    "plm_rsh_no_tree_spawn": 1,
    "orte_leave_session_attached": 1,  # no daemons: what a node was asked to start is there until its end
    "orte_abort_on_non_zero_status": 0,
    # The shell of each node fills in its own directory. In a common one, the daemons of two nodes on one machine get
    # into each other's way, and what is killed leaves its files in /tmp.
    "orte_launch_agent": "OMPI_MCA_orte_tmpdir_base=$ORC_ATTEMPT_DIR/node-$ORC_NODE_RANK orted",
}
# Open MPI 5 starts ranks by PRRTE, which has other names for the same.
_MCA_5: Mapping[str, Any] = {**_KEEPALIVE, "plm": "ssh", "plm_ssh_agent": "ssh", "plm_ssh_no_tree_spawn": 1}
_WORDS_5 = ("--leave-session-attached", "--runtime-options", "continuous")
HOSTFILES: Mapping[str, Mapping[str, str]] = {
    "openmpi": {"hostfile": "{host} slots={nproc}\n"},
    "mpich": {"machinefile": "{host}:{nproc}\n"},
    "intel": {"machinefile": "{host}:{nproc}\n"},
}
# -rmk user: the host file counts, not what a scheduler left in the environment. Nothing of the environment is passed
# on: the proxy on each node has that node's from its agent.
# The address is for the proxies, which may not be able to resolve the name of node 0, or resolve it to themselves.
HYDRA_WORDS = ("-launcher", "ssh", "-rmk", "user", "-genvnone", "-localhost", "{node_addr}")
# What `mpirun --version` says, in the order in which it is looked at; those of Open MPI are told apart by it alone.
OPEN_MPI_4 = "*'(Open MPI) '[1-4].*"
_FAMILIES: Mapping[str, tuple[str, str]] = {
    "openmpi4": ("openmpi", OPEN_MPI_4),
    "openmpi5": ("openmpi", "*'(Open MPI) '*"),
    "intel": ("intel", "*'Intel(R) MPI'*"),
    "mpich": ("mpich", "*HYDRA* | *MPICH*"),
}


class MpirunCommand:
    """Launcher of the whole job by an ``mpirun`` on node 0."""

    kind = "mpirun"

    def check(self, job: JobSpec) -> str | None:
        """Check that the chosen dialect has the options that are given."""
        options = job.launcher.options
        if reason := refuse(options, OPTIONS, _DECIDED):
            return reason
        for name in ("bind_to", "map_by"):
            if not _WORD.fullmatch(options.get(name, "none")):
                return about(name, f"= {options[name]!r}: expected one word such as core, or socket:PE=4")
        dialect = options.get("dialect", "auto")
        if dialect == "intel" and "map_by" in options:
            return about(
                "map_by", "is not Intel MPI's; it places ranks by I_MPI_PIN_ORDER and its kin, in the job's `env`"
            )
        if options.get("mca") and dialect not in ("auto", "openmpi"):
            return about("mca", f"is Open MPI's, and the dialect is {dialect}")
        return None

    def build(self, job: JobSpec) -> NodeCommand:
        """The script that starts mpirun, and the host files that it may read."""
        options = job.launcher.options
        given = options.get("dialect", "auto")
        dialects = DIALECTS if given == "auto" else (given,)
        hostfiles = {name: line for dialect in dialects for name, line in HOSTFILES[dialect].items()}
        return NodeCommand(
            spawn="launcher",
            program=program_of(job),
            launcher=("/bin/sh", "-c", script(given, options), "mpirun"),
            env=_oneccl(options),
            primary="first",
            remote_shell=True,
            hostfiles=hostfiles,
            settle_s=0.5,  # it waits for the other ranks, so the agent has to act
        )


def script(dialect: str, options: Mapping[str, Any]) -> str:
    """Return the shell script of node 0; its arguments are the program of one rank. *dialect* may be ``auto``."""
    program = shlex.quote(options.get("program", "mpirun"))
    families = [name for name, (its_dialect, _) in _FAMILIES.items() if dialect in ("auto", its_dialect)]
    if len(families) == 1:
        return f"{_command(families[0], program, options)}\n"
    cases = [f"{_FAMILIES[name][1]})\n{indent(_command(name, program, options), '  ')} ;;" for name in families]
    wanted = "Open MPI" if dialect == "openmpi" else "Open MPI or MPICH or Intel MPI"
    lines = [
        f"said=$({program} --version 2>&1)",
        "case $said in",
        *cases,
        f'*)\n  echo {program}: not {wanted}: "$said" >&2\n  exit 127 ;;',
        "esac\n",
    ]
    return "\n".join(lines)


def _command(family: str, program: str, options: Mapping[str, Any]) -> str:
    dialect = _FAMILIES[family][0]
    lines = []
    if dialect == "openmpi":
        words = ["-n", "{world_size}", *open_mpi_words(options, version=int(family[-1]))]
        lines.append('[ "$(id -u)" != 0 ] || set -- --allow-run-as-root "$@"')
    else:
        words = _hydra(dialect, options)
        if dialect == "intel":
            lines += [f"export {name}={value}" for name, value in _intel_pinning(options).items()]
    # Placeholders are numbers and an address, so they need no quotes; the directory may have any name.
    hosts = next(iter(HOSTFILES[dialect]))
    flag = "--hostfile" if dialect == "openmpi" else "-f"
    words += map(str, options.get("arguments", ()))
    lines.append(" ".join(["exec", program, flag, f'"$ORC_ATTEMPT_DIR/{hosts}"', *map(_quoted, words), '"$@"']))
    return "\n".join(lines)


def open_mpi_words(options: Mapping[str, Any], version: int = 4) -> list[str]:
    """Return Open MPI's words for placing ranks and reaching nodes; *options* as in a job's launcher options."""
    words = ["--map-by", options.get("map_by", "ppr:{nproc}:node")]
    # Its own default binds each rank to one core: with more threads than one that is slow, and two jobs on one machine
    # would both be bound to the first cores.
    words += ["--bind-to", options.get("bind_to", "none")]
    for name, value in {**(_MCA if version < 5 else _MCA_5), **options.get("mca", {})}.items():
        words += ["--mca", str(name), str(value)]
    return words if version < 5 else [*words, *_WORDS_5]


def _hydra(dialect: str, options: Mapping[str, Any]) -> list[str]:
    words = ["-n", "{world_size}", "-ppn", "{nproc}", *HYDRA_WORDS]
    if dialect == "mpich":
        words += ["-disable-auto-cleanup", "-bind-to", options.get("bind_to", "none")]
        words += ["-map-by", options["map_by"]] if "map_by" in options else []
    return words


def _intel_pinning(options: Mapping[str, Any]) -> dict[str, str]:
    domain = options.get("bind_to", "none")
    return {"I_MPI_PIN": "0"} if domain == "none" else {"I_MPI_PIN": "1", "I_MPI_PIN_DOMAIN": shlex.quote(domain)}


def _oneccl(options: Mapping[str, Any]) -> dict[str, str]:
    """The variables of oneCCL, Intel's communication library; MASTER_ADDR, which it needs too, is always set."""
    if not {"ccl_worker_count", "ccl_atl_transport"} & set(options):
        return {}
    return {
        "CCL_WORKER_COUNT": str(options.get("ccl_worker_count", 1)),
        "CCL_ATL_TRANSPORT": str(options.get("ccl_atl_transport", "ofi")),
    }


def _quoted(word: str) -> str:
    return word if re.fullmatch(r"[\w:{}=.,/+-]+", word, re.ASCII) else shlex.quote(word)


COMMAND = MpirunCommand()

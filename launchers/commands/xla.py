"""Command ``xla``: the agent starts the processes of PyTorch/XLA, each with its part of the TPU.

*chip*, the default: one process for each TPU chip. They meet as torchrun's do (``init_method="xla://"``), and torch_xla
works out the topology of the TPU from the machine's metadata server. *host*: one process for each machine, which sees
all of its chips: for SPMD, and for scripts that call ``torch_xla.launch`` themselves.

``metadata: variables`` is for machines without that server (containers, Kubernetes, a simulation): everything that
torch_xla would have asked it is in TPU_* variables then, which follow from the topology of the slice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orc.launchers.commands.base import NodeCommand, program_of
from orc.launchers.commands.options import TEXT, Option, about, one_of, refuse, whole

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec

BASE_PORT = 8476  # torch_xla's own
OPTIONS: Mapping[str, Option] = {
    "function": TEXT,
    "processes": one_of("chip", "host"),
    "device": one_of("TPU", "CPU"),
    "metadata": one_of("server", "variables"),
    "accelerator_type": TEXT,
    "topology": TEXT,
    "base_port": whole(1024),
}
_RESOURCES = "it follows from resources.nodes and resources.procs_per_node"
_TOPOLOGY = "it follows from topology (metadata: variables), or comes from the TPU's metadata server"
_DECIDED = {
    "num_processes": _RESOURCES,
    "nprocs": _RESOURCES,
    "process_bounds": _TOPOLOGY,
    "chips_per_process_bounds": _TOPOLOGY,
    "worker_id": "orc numbers the nodes",
    "worker_hostnames": "they are the nodes of the attempt",
    "main_training_function": "the option is called function",
    "downcast_bf16": "it is a setting of the runtime: runtime.downcast_bf16",
}
_VARIABLES_ONLY = ("accelerator_type", "topology", "base_port")
# How the chips of one machine lie, by their number, in X and Y (machines are one chip deep).
_CHIPS_OF_A_HOST = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
_TWO_CORES = re.compile(r"v[23]-")

# The script is imported, as `import` does it: what stands below `if __name__ == "__main__"` does not run.
_CALL = (
    "import os, sys; sys.argv = sys.argv[1:]; name = sys.argv.pop(1); "
    "sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0])); import importlib.util as util; "
    "spec = util.spec_from_file_location('orc_training_script', sys.argv[0]); script = util.module_from_spec(spec); "
    "sys.modules[spec.name] = script; spec.loader.exec_module(script); "
    "hasattr(script, name) or sys.exit(f'{sys.argv[0]} has no function {name}'); getattr(script, name)()"
)

Grid = tuple[int, int, int]


class XlaCommand:
    """Launcher of a process for each chip, or for each machine, with the variables of PJRT and of the TPU."""

    kind = "xla"

    def check(self, job: JobSpec) -> str | None:
        """Options that fit each other, and numbers of processes that torch_xla can work with."""
        options = job.launcher.options
        if reason := refuse(options, OPTIONS, _DECIDED):
            return reason
        function = options.get("function")
        if function is not None and (job.script is None or not function.isidentifier()):
            return about("function", f"= {function!r}: expected the name of a function of the job's `script`")
        nproc, nodes = job.resources.nproc, job.resources.max_nodes
        if options.get("processes") == "host" and nproc != 1:
            return about("processes", f"= 'host' is one process per node, and resources say {nproc}")
        chip = options.get("processes", "chip") == "chip"
        if options.get("device") == "CPU" and chip and nproc * nodes > 1:
            return about(
                "device",
                f"= 'CPU' is for one process, and resources say {nproc * nodes}: on the CPU torch_xla "
                "does not add up what several processes have, and says nothing (processes: host with SPMD works)",
            )
        if chip and nodes > 1 and nproc == 1:
            return (
                "one process for each chip of several nodes needs resources.procs_per_node, the number of chips of a "
                "node: 4, on some 8 (or processes: host)"
            )
        if chip and _TWO_CORES.match(options.get("accelerator_type", "")):
            return about(
                "accelerator_type",
                f"= {options['accelerator_type']!r}: a chip of v2 and v3 is two devices, which "
                "one process per chip cannot train on; take processes: host",
            )
        if options.get("metadata") == "variables":
            return _why_no_variables(options, job)
        given = [name for name in _VARIABLES_ONLY if name in options]
        if given:
            return about(given[0], "is for metadata: variables; the metadata server knows it")
        return None

    def build(self, job: JobSpec) -> NodeCommand:
        """The program itself, or a function of the script, once per process."""
        options = job.launcher.options
        nproc, nodes = job.resources.nproc, job.resources.max_nodes
        env = {"PJRT_DEVICE": str(options.get("device", "TPU"))}
        host_env: dict[str, str] = {}
        rank_env: dict[str, tuple[str, ...]] = {}
        chip = options.get("processes", "chip") == "chip"
        if chip:
            env["PJRT_LOCAL_PROCESS_COUNT"] = "{nproc}"
            rank_env["PJRT_LOCAL_PROCESS_RANK"] = tuple(map(str, range(nproc)))
            if nproc * nodes > 1:
                # What torch_xla's xla:// meeting knows processes by that somebody else has started, one for each chip.
                env["TORCHELASTIC_RUN_ID"] = "{rdzv_id}"
            elif env["PJRT_DEVICE"] == "TPU":  # one chip of however many there are
                env |= {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}
                rank_env["TPU_VISIBLE_CHIPS"] = ("0",)
        if options.get("metadata") == "variables":
            hosts, chips = _grids(options, nodes, nproc)
            port = int(options.get("base_port", BASE_PORT))
            processes = _times(hosts, chips) if chip else hosts
            env |= {
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_ACCELERATOR_TYPE": str(options["accelerator_type"]),
                "TPU_PROCESS_BOUNDS": _text(processes),
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1" if chip else _text(chips),
                "TPU_WORKER_ID": "{node_rank}",
            }
            host_env["TPU_WORKER_HOSTNAMES"] = "{host}"
            ports = range(port, port + nproc)
            if nproc * nodes > 1:
                host_env["TPU_PROCESS_ADDRESSES"] = ",".join(f"{{host}}:{one}" for one in ports)
                rank_env["TPU_PROCESS_PORT"] = tuple(map(str, ports))
                rank_env["CLOUD_TPU_TASK_ID"] = ("{rank}",) * nproc
            if chip:
                rank_env["TPU_VISIBLE_CHIPS"] = tuple(map(str, range(nproc)))
        program = program_of(job)
        if "function" in options:
            python, script, *arguments = program
            program = (python, "-c", _CALL, script, options["function"], *arguments)
        return NodeCommand("ranks", program, env=env, host_env=host_env, rank_env=rank_env)


def _why_no_variables(options: Mapping[str, Any], job: JobSpec) -> str | None:
    resources = job.resources
    nodes, nproc = resources.max_nodes, resources.nproc
    if options.get("device") == "CPU":
        return about("metadata", "= 'variables' describes a TPU, and the device is CPU")
    if "accelerator_type" not in options:
        return about("metadata", "= 'variables' needs accelerator_type, for example v4-16")
    if resources.min_nodes != nodes:
        return about(
            "metadata", f"= 'variables': a slice has a fixed number of nodes, not {resources.min_nodes}:{nodes}"
        )
    chip = options.get("processes", "chip") == "chip"
    if "topology" not in options:
        if nodes > 1 or not chip:
            return about("metadata", "= 'variables' needs topology: the chips of the slice, for example 2x2x4")
        if nproc not in _CHIPS_OF_A_HOST:
            return about(
                "metadata", f"= 'variables': a machine has 1, 4 or 8 chips, and resources say {nproc} processes"
            )
        return None
    grid = _parsed(options["topology"])
    if grid is None:
        return about("topology", f"= {options['topology']!r}: expected chips like 2x2x4, or 4x4 for two dimensions")
    if math.prod(grid) % nodes or math.prod(grid) // nodes not in _CHIPS_OF_A_HOST:
        return about(
            "topology",
            f"= {options['topology']!r}: {math.prod(grid)} chips are not 1, 4 or 8 for each of {nodes} nodes",
        )
    chips = _CHIPS_OF_A_HOST[math.prod(grid) // nodes]
    if any(whole % part for whole, part in zip(grid, chips, strict=True)):
        return about("topology", f"= {options['topology']!r}: it cannot be cut into machines of {_text(chips)} chips")
    if chip and math.prod(chips) != nproc:
        return about(
            "topology",
            f"= {options['topology']!r}: each of {nodes} nodes has {math.prod(chips)} chips, and "
            f"resources say {nproc} processes for each",
        )
    return None


def _grids(options: Mapping[str, Any], nodes: int, nproc: int) -> tuple[Grid, Grid]:
    """Return the grid of the machines, and that of the chips of one machine."""
    grid = _parsed(options.get("topology", ""))
    if grid is None:
        return (1, 1, 1), _CHIPS_OF_A_HOST[nproc]
    chips = _CHIPS_OF_A_HOST[math.prod(grid) // nodes]
    return (grid[0] // chips[0], grid[1] // chips[1], grid[2] // chips[2]), chips


def _parsed(topology: str) -> Grid | None:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", topology, re.ASCII)
    return (int(match[1]), int(match[2]), int(match[3] or 1)) if match else None


def _times(one: Grid, other: Grid) -> Grid:
    return one[0] * other[0], one[1] * other[1], one[2] * other[2]


def _text(grid: Grid) -> str:
    return ",".join(map(str, grid))


COMMAND = XlaCommand()

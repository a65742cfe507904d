"""Options of sbatch and srun that orc sets by itself, and their replacements. Pure."""

from __future__ import annotations

_SUBMITS = "with it nothing is submitted"

RESERVED = {
    "array": "submit one job per array element",
    "chdir": "ranks run in the job's working copy of `workdir`",
    "clusters": "describe each Slurm cluster by itself, with its own `conf`",
    "cpus-per-gpu": "use `resources.cpus_per_proc`",
    "cpus-per-task": "use `resources.cpus_per_proc`",
    "error": "every rank has a log of its own: `orc logs`",
    "export": "use the key `export`",
    "export-file": "use `env:` of the job or of the cluster",
    "gpus": "use `resources.gpus_per_node`; Slurm may give one node more of a total than another",
    "gpus-per-node": "use `resources.gpus_per_node`",
    "gpus-per-socket": "use `resources.gpus_per_node`",
    "gpus-per-task": "use `resources.gpus_per_node`, and `gpus_as` for how they are asked for",
    "help": _SUBMITS,
    "input": "ranks have no standard input",
    "job-name": "the job name is how orc finds the job again",
    "no-requeue": "use `requeue: false`",
    "nodes": "use `resources.nodes`",
    "ntasks": "use `resources.procs_per_node`",
    "ntasks-per-core": "use `resources.procs_per_node`",
    "ntasks-per-gpu": "use `resources.procs_per_node`",
    "ntasks-per-node": "use `resources.procs_per_node`",
    "ntasks-per-socket": "use `resources.procs_per_node`",
    "open-mode": "orc always appends, so that a requeued job keeps its output",
    "output": "every rank has a log of its own: `orc logs`",
    "parsable": "orc reads the job id",
    "signal": "use `signal_lead`",
    "test-only": "use `orc render`",
    "time-min": "orc must know when the time is up; use `resources.time`",
    "time": "use `resources.time`",
    "usage": _SUBMITS,
    "version": _SUBMITS,
    "wait": "use `orc wait`",
    "wrap": "use `command:` of the job",
}

# Options of sbatch that are not what they begin like: a key of ours (an OCI bundle, a free text of the job).
NOT_RESERVED = frozenset({"container", "extra"})

_STARTS = "with it nothing is started"
# The same for the srun that starts the agents.
RESERVED_IN_SRUN = {
    "cpus-per-task": RESERVED["cpus-per-task"],
    "error": RESERVED["error"],
    "export": "use `env:` of the job or of the cluster, or the key `export`",
    "help": _STARTS,
    "het-group": "use `heterogeneous`",
    "input": RESERVED["input"],
    "jobid": "the agents run in their own job",
    "kill-on-bad-exit": "orc relies on it",
    "label": RESERVED["output"],
    "multi-prog": "use `command:` of the job",
    "nodes": RESERVED["nodes"],
    "ntasks": RESERVED["ntasks"],
    "ntasks-per-node": RESERVED["ntasks-per-node"],
    "output": RESERVED["output"],
    "pty": "use `orc ssh` to look into a job",
    "test-only": _STARTS,
    "usage": _STARTS,
    "version": _STARTS,
}
SHORT_SRUN_OPTIONS = {
    "c": "cpus-per-task",
    "e": "error",
    "h": "help",
    "i": "input",
    "K": "kill-on-bad-exit",
    "l": "label",
    "n": "ntasks",
    "N": "nodes",
    "o": "output",
    "V": "version",
}

"""Commands that other tools have: what does the same here. Read only where a name is no command of orc."""

from __future__ import annotations

from collections.abc import Sequence

_SUBMIT = "`orc submit JOB.yaml` sends a job to its cluster, `orc run SCRIPT` runs a script on this machine"
_LIST = "`orc list` lists the jobs, `orc status` shows those that have not ended"
_STATUS = "`orc status JOB` shows a job, `orc events JOB` its history"
_CANCEL = "`orc cancel JOB` stops a job"
_DELETE = f"{_CANCEL}; its record stays, and `orc gc --dry-run` says what could be removed from the disk"
_LOGS = "`orc logs -f JOB` shows the output of a job"
_RENDER = "`orc render JOB.yaml` shows what would be sent, and what is wrong with it"
_QUEUE = "`orc queue` shows the queues of clusters, `orc clusters` the clusters"
_AGAIN = "`orc resubmit JOB` runs a job again"
_SHELL = "`orc ssh JOB` is a shell on its node, `orc exec JOB -- PROGRAM` runs a program there"

# Hints only: nothing is started, stopped or removed under a name that means something else elsewhere.
HINTS = {
    **dict.fromkeys(("start", "create", "apply", "up", "sbatch", "srun", "salloc", "qsub", "torchrun"), _SUBMIT),
    **dict.fromkeys(("ps", "ls", "jobs", "squeue", "qstat", "sacct"), _LIST),
    **dict.fromkeys(("describe", "show", "info", "inspect", "history", "scontrol"), _STATUS),
    "get": f"{_LIST}; {_STATUS}",
    **dict.fromkeys(("kill", "stop", "scancel", "qdel", "abort", "down", "terminate"), _CANCEL),
    **dict.fromkeys(("delete", "del", "rm", "remove"), _DELETE),
    **dict.fromkeys(("attach", "tail", "log", "follow"), _LOGS),
    **dict.fromkeys(("dryrun", "dry-run", "plan", "validate", "check", "lint", "template"), _RENDER),
    **dict.fromkeys(("sinfo", "nodes", "partitions"), _QUEUE),
    **dict.fromkeys(("restart", "retry", "rerun", "resume", "requeue"), _AGAIN),
    **dict.fromkeys(("sh", "shell", "bash"), _SHELL),
}
# A slip of the pen is answered with one of these only where it is nearly that word, and never with what deletes.
_CAREFUL = {"submit", "run", "launch", "resubmit", "cancel", "adopt", "merge-weights", "sync"}
_NEVER = {"gc", "prune"}


def hint(name: str, commands: Sequence[str]) -> str:
    """Return the hint for an unknown command *name*, which is none of *commands*."""
    import difflib

    if name.lower() in HINTS:
        return HINTS[name.lower()]
    known = [command for command in commands if command not in _NEVER]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    near = near or difflib.get_close_matches(name, [c for c in known if c not in _CAREFUL], n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else "`orc --help` lists the commands"

"""The batch script of one attempt, and conflicts between a job and its Slurm options. Pure: the same job gives the same
bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orc.launchers.attempts.reader import LAUNCHER_LOG
from orc.launchers.backends.slurm.options import EARLIEST_S, MEMORY, SlurmOptions, SlurmSettings
from orc.launchers.backends.slurm.queue_rows import expand_nodes
from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.options import SlurmOptions
    from orc.launchers.ids import AttemptId
    from orc.launchers.paths import Layout
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.environment import Environment

# Options of sbatch that the first component sets for the whole job.
ONCE = frozenset(
    (
        *("job-name", "comment", "chdir", "output", "open-mode", "export", "dependency", "kill-on-invalid-dep"),
        *("begin", "nice", "wckey", "mail-user", "mail-type"),
    )
)


def components(job: JobSpec, options: SlurmOptions) -> list[tuple[JobSpec, SlurmOptions]]:
    """Return the job as each of its components, in the order of their nodes; the job itself if it has none.

    Raises `RenderError` for components that do not make up the job.
    """
    if not options.heterogeneous:
        return [(job, options)]
    from pydantic import ValidationError

    counts = [one.nodes for one in options.heterogeneous]
    if job.resources.nodes != sum(counts):
        raise RenderError(
            f"resources.nodes = {job.resources.nodes}, and the components of `heterogeneous` have "
            f"{' + '.join(map(str, counts))} = {sum(counts)} nodes",
            where=job.name,
            hint=f"Set resources.nodes to {sum(counts)}.",
        )
    whole = dict(job.resources)
    found = []
    for number, one in enumerate(options.heterogeneous):
        # A form of memory of its own replaces the job's, in whichever form that is.
        forms = MEMORY & one.options.keys()
        base = {**whole, "procs_per_node": job.resources.nproc, **({"memory": None} if forms else {})}
        cleared = dict.fromkeys(MEMORY) if forms or one.memory else {}
        if one.gpus_per_node == 0:
            cleared = {**cleared, "gpu_type": None, "mem_per_gpu": None}
        try:
            own = job.model_copy(update={"resources": {**base, **one.resources}})
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"][1:])
            raise RenderError(f"heterogeneous: component {number}: {place}: {first['msg']}", where=job.name) from None
        # Both have been checked, each by itself.
        found.append((own, options.model_construct(**{**dict(options), "heterogeneous": (), **cleared, **one.options})))
    return found


SCRIPT_NAME = "job.sbatch"
EARLY_S = 60  # Slurm may send the signal that goes before its time limit up to this much early

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]&|*^~!?<>()-]+")


@dataclass(frozen=True)
class JobShape:
    """Numbers that the script and the agents' configuration must agree on."""

    nodes: int
    min_nodes: int
    cpus_per_node: int
    lead_s: int  # how long before Slurm's time limit the agents are told
    deadline_s: float | None  # when the agents end the attempt by themselves, seconds after their start
    requeue: bool
    self_requeues: int  # how often the script may put the job back in the queue
    components: tuple[tuple[int, int], ...] = ()  # nodes and cores per node, of each of a heterogeneous job

    @property
    def ranges(self) -> bool:
        """True when Slurm decides the number of nodes."""
        return self.min_nodes < self.nodes


def shape(job: JobSpec, options: SlurmOptions) -> JobShape:
    """Return the shape of *job* for Slurm. Raises `RenderError` for what cannot be carried."""
    resources = job.resources
    parts = components(job, options)
    for part in parts:
        check_conflicts(*part)
    wants_retry = bool({"preempted", "node_failure"} & set(job.retry.on)) and job.retry.max_attempts > 1
    requeue = wants_retry if options.requeue is None else options.requeue
    limit = resources.time_s
    # With a limit the agents end the attempt themselves, so that its end is recorded as what it is and the ranks have
    # their grace; Slurm's signal is only for preemption then. Without one, only Slurm knows when time runs out.
    if options.signal_lead is not None:
        lead = reserve = math.ceil(options.signal_lead)
    else:
        lead, reserve = (10, math.ceil(job.grace) + 10) if limit else (math.ceil(job.grace) + 30, 0)
        lead = min(lead, EARLIEST_S)
    return JobShape(
        nodes=resources.max_nodes,
        min_nodes=resources.min_nodes,
        cpus_per_node=_cpus(job),
        components=tuple((part.resources.max_nodes, _cpus(part)) for part, _ in parts) if len(parts) > 1 else (),
        lead_s=lead,
        deadline_s=None if limit is None else float(max(limit - reserve, limit / 2)),
        requeue=requeue,
        self_requeues=options.max_requeues if requeue and "preempted" in job.retry.on else 0,
    )


def _cpus(job: JobSpec) -> int:
    """Return the cores per node."""
    return job.resources.nproc * (job.resources.cpus_per_proc or 1)


def directives(
    job: JobSpec, options: SlurmOptions, attempt: AttemptId, layout: Layout, avoid: Sequence[str] = ()
) -> list[str]:
    """Return the ``#SBATCH`` options, in a fixed order, quoted. The job keeps away from the nodes in *avoid*."""
    lines: list[str] = []
    for number, (part, own) in enumerate(components(job, options)):
        pairs = option_pairs(part, own, attempt, layout, avoid)
        if number:
            lines.append("hetjob")
            pairs = [(name, value) for name, value in pairs if name not in ONCE]
        lines += [f"--{name}" if value is None else f"--{name}={quote(str(value))}" for name, value in pairs]
    return lines


def home_options(attempt: AttemptId, layout: Layout) -> tuple[tuple[str, str], ...]:
    """Return the options of sbatch that hold paths below a home directory, where the root is in one."""
    if not str(layout.root).startswith("~"):
        return ()
    log = str(layout.attempt(attempt) / "logs" / LAUNCHER_LOG)
    return (("chdir", str(layout.job(attempt.job))), ("output", log.replace("%", "%%")))


def option_pairs(
    job: JobSpec, options: SlurmOptions, attempt: AttemptId, layout: Layout, avoid: Sequence[str] = ()
) -> list[tuple[str, str | int | None]]:
    """Return the options of one component as names and values; `None` for an option without one."""
    made = shape(job, options)
    resources = job.resources
    marker = attempt.marker
    log = str(layout.attempt(attempt) / "logs" / LAUNCHER_LOG)
    places = [("chdir", str(layout.job(attempt.job))), ("output", log.replace("%", "%%"))]
    pairs: list[tuple[str, str | int | None]] = [
        ("job-name", marker),
        ("comment", f"{marker} {options.comment}" if options.comment else marker),
        *([] if home_options(attempt, layout) else places),  # else they are on the command line
        ("open-mode", "append"),
        ("requeue" if made.requeue else "no-requeue", None),
        ("export", options.export if isinstance(options.export, str) else ",".join(options.export)),
        ("nodes", f"{made.min_nodes}-{made.nodes}" if made.ranges else made.nodes),
        # With this, Slurm gives no more nodes than the fewest of a range; without it, a task on each just the same.
        *([] if made.ranges else [("ntasks-per-node", 1)]),
        ("cpus-per-task", made.cpus_per_node),
    ]
    if memory := resources.memory or options.mem:
        pairs.append(("mem", memory))
    for name in ("mem_per_cpu", "mem_per_gpu"):
        if value := getattr(options, name):
            pairs.append((name.replace("_", "-"), value))
    pairs += _gpus(job, options)
    if resources.time_s is not None:
        pairs.append(("time", _clock(resources.time_s)))
    # SIGURG: Slurm signals every process of a step, and by default the ranks must only hear from their agent.
    pairs.append(("signal", f"URG@{made.lead_s}"))
    for name in ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude"):
        value = getattr(options, name)
        if name == "exclude":
            value = ",".join(filter(None, (value, *avoid)))
        if value:
            pairs.append((name, value))
    if options.exclusive:
        pairs.append(("exclusive", None if options.exclusive is True else options.exclusive))
    if options.licenses:
        pairs.append(("licenses", options.licenses))
    if options.dependency:
        pairs += [("dependency", options.dependency), ("kill-on-invalid-dep", "yes")]
    for name in ("begin", "nice", "wckey", "mail_user", "mail_type"):
        if (value := getattr(options, name)) not in (None, ""):
            pairs.append((name.replace("_", "-"), value))
    pairs += options.extra
    return pairs


def _gpus(job: JobSpec, options: SlurmOptions) -> list[tuple[str, str]]:
    """Return the GPU options in the site's spelling, and other generic resources."""
    per_node, gres = job.resources.gpus_per_node, list(options.gres)
    if not per_node:
        return [("gres", ",".join(gres))] if gres else []
    words = [word for word in (options.gpu_type, str(per_node)) if word]
    if options.gpus_as == "gres":
        return [("gres", ",".join([":".join(["gpu", *words]), *gres]))]
    return [(options.gpus_as, ":".join(words)), *([("gres", ",".join(gres))] if gres else [])]


def container_args(options: SlurmOptions, root: str) -> list[str]:
    """Return srun's options for pyxis to start the agents in a container, with *root* mounted as it is."""
    if options.container_image is None:
        return []
    found = [f"--container-image={options.container_image}"]
    found.append(f"--container-mounts={','.join([f'{root}:{root}', *options.container_mounts])}")
    if options.container_name:
        found.append(f"--container-name={options.container_name}")
    for name in ("mount_home", "remap_root", "entrypoint"):
        value = getattr(options, f"container_{name}")
        if value is not None:
            found.append(f"--{'' if value else 'no-'}container-{name.replace('_', '-')}")
    if options.container_writable is not None:  # the one switch of pyxis whose opposite has a name of its own
        found.append("--container-writable" if options.container_writable else "--container-readonly")
    return found


def render_script(
    job: JobSpec,
    options: SlurmOptions,
    settings: SlurmSettings,
    attempt: AttemptId,
    layout: Layout,
    *,
    agent: tuple[str, ...],
    avoid: Sequence[str] = (),
) -> str:
    """Return the text of ``job.sbatch``. *agent* is the agent's argv; node rank, restart and owner are added."""
    from orc.templates.render import render

    made = shape(job, options)

    return render(
        "slurm/job.sbatch.j2",
        marker=attempt.marker,
        directives=directives(job, options, attempt, layout, avoid),
        modules=options.modules,
        attempt_dir=str(layout.attempt(attempt)),
        agent=agent,
        shape=made,
        count=made.nodes if not made.ranges else '"$SLURM_JOB_NUM_NODES"',
        srun=settings.program("srun"),
        squeue=settings.program("squeue"),
        scontrol=settings.program("scontrol"),
        scancel=settings.program("scancel"),
        srun_args=[*container_args(options, str(layout.root)), *options.srun_args],
        grace_s=math.ceil(job.grace),
        time_warning_s=made.lead_s + EARLY_S,
    )


def quote(value: str) -> str:
    """Return *value* quoted for a ``#SBATCH`` line: double quotes and backslashes work as in a shell.

    Raises `RenderError` for a value that would become more than one line, wherever it has come from.
    """
    if not value.isprintable():
        raise RenderError(
            f"{value!r} cannot stand in a batch script: it must be one line of printable characters",
            hint="Set `root:` of the cluster, or ORC_STATE_DIR, to a path without such characters.",
        )
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _clock(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


_GPU = re.compile(r"\b(?:gres[:/])?gpu(?=[:=,]|$)")
_TRES = ("tres-per-node", "tres-per-task")


def check_conflicts(job: JobSpec, options: SlurmOptions) -> None:
    """Check that the options agree with the job. Raises `RenderError` that names both sides."""
    for what, hint in _conflicts(job, options):
        raise RenderError(what, where=job.name, hint=hint)


def _conflicts(job: JobSpec, options: SlurmOptions) -> Iterator[tuple[str, str]]:
    """Yield what the options and the job do not agree on, and what to do."""
    resources = job.resources
    forms = ["resources.memory (per node)"] if resources.memory else []
    forms += [f"the Slurm option {name}" for name in ("mem_per_cpu", "mem_per_gpu", "mem") if getattr(options, name)]
    if len(forms) > 1:
        yield f"{forms[0]} and {forms[1]} exclude each other", "Remove one of them."
    for name in ("mem_per_gpu", "gpu_type"):
        if (value := getattr(options, name)) and not resources.gpus_per_node:
            yield f"{name} = {value}, but the job asks for no GPUs", "Set resources.gpus_per_node."
    by = ["gres"] if any(_GPU.match(name) for name in options.gres) else []
    by += [f"--{name} (under extra)" for name, value in options.extra if name in _TRES and _GPU.search(value or "")]
    if by and resources.gpus_per_node:
        what = f"GPUs are asked for twice, by resources.gpus_per_node and by {by[0]}"
        yield what, "Keep resources.gpus_per_node, and gpu_type for their type."
    if options.gpus_as == "gpus-per-task" and resources.min_nodes < resources.max_nodes:
        what = f"gpus_as: gpus-per-task needs a fixed number of nodes, and resources.nodes is {resources.nodes}"
        yield what, "Use gpus_as: gpus-per-node."
    wanted, unwanted = expand_nodes(options.nodelist or ""), expand_nodes(options.exclude or "")
    if both := [name for name in wanted if name in unwanted]:
        yield f"{both[0]} is in nodelist and in exclude", "Remove it from one of them."
    if len(wanted) > resources.max_nodes:
        what = f"nodelist names {len(wanted)} nodes, all of which must be part of the job, and resources.nodes is "
        yield f"{what}{resources.nodes}", "Name fewer, or use `exclude` to keep away from the others."
    if options.exclusive and (shared := {name for name, _ in options.extra} & {"oversubscribe", "share"}):
        yield f"exclusive and --{shared.pop()} (under extra) exclude each other", "Remove one of them."
    others = ("mounts", "name", "mount_home", "remap_root", "writable", "entrypoint")
    given = [f"container_{name}" for name in others if getattr(options, f"container_{name}") not in (None, ())]
    if given and options.container_image is None:
        yield f"{given[0]} is given, but no container_image", "Set container_image."


def check_nesting(job: JobSpec, options: SlurmOptions, environment: Environment, root: str) -> None:
    """Check that no container is put into another, and that the root can be mounted. Raises `RenderError`."""
    if options.container_image is None:
        return
    if environment.container is not None:
        what = "container_image and `environment: container` would put a container into a container"
        hint = "Keep one of them: container_image where Slurm has pyxis."
        raise RenderError(what, where=job.name, hint=hint)
    if root.startswith("~"):
        what = f"container_image needs a root that is an absolute path, not {root}"
        hint = "Write `root:` of the cluster as the full path over there."
        raise RenderError(what, where=job.name, hint=hint)

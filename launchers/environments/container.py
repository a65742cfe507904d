"""The command lines of docker, podman and apptainer. Pure; standard library only, Python >= 3.9.

A rank (or the launcher) in a container is meant to be like one outside: the same network, the same process numbers (so
that the agent can signal, count and end what runs inside), the same shared memory, the same user, the same paths below
orc's root. Values of variables are handed over by name: nothing that a command line shows is secret.
"""

from __future__ import annotations

import posixpath

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

# Beside what the job names: what launchers, libraries and schedulers use to talk to the ranks.
PASSED_PREFIXES = (
    *("ORC_", "ACCELERATE_", "MASTER_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUDA_", "HIP_", "ROCR_", "CCL_", "FI_"),
    *("OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "OMP_", "MKL_", "KMP_", "UCX_"),
)
PASSED_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "PYTHONFAULTHANDLER",
    }
    | {"TERM", "TZ", "LANG", "LC_ALL", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
)
# What belongs to the node's own file system and would break the image's.
HOST_ONLY = frozenset({"PATH", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"})


def passed(environment: Iterable[str], named: Iterable[str]) -> list[str]:
    """The names of the variables that go into the container, sorted: those the job names and the well-known ones."""
    wanted = set(named)
    return sorted(
        name
        for name in set(environment)
        if name in wanted or (name not in HOST_ONLY and (name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)))
    )


def label(marker: str, node: int) -> str:
    """Return the label of the containers of one node of an attempt."""
    return f"orc.node={marker}-n{node}"


def run_argv(
    spec: Mapping[str, Any],
    program: Sequence[str],
    *,
    variables: Sequence[str],
    workdir: str,
    mounts: Sequence[str],
    home: str,
    name: str,
    marker: str,
    node: int,
    user: tuple[int, int],
    devices: Sequence[str] = (),
    terminal: bool = False,
) -> list[str]:
    """The command line that runs *program* in a container.

    *spec* is the ``environment`` of ``agent.json`` (``runtime``, ``image``, ``options``, ``mounts``, ``gpus``);
    *variables* are names, *mounts* directories that keep their paths, *devices* those that
    go in beside GPUs (apptainer has all), *user* is ``(uid, gid)``.
    """
    runtime = str(spec["runtime"])
    own = [f"{path}:{path}" for path in _outermost(mounts)]
    given = [mount if ":" in mount else f"{mount}:{mount}" for mount in spec.get("mounts") or ()]
    options = [str(option) for option in spec.get("options") or ()]
    program = list(program)
    if runtime == "apptainer":
        argv = [str(spec.get("program") or runtime), "exec", "--no-home", "--pwd", workdir]
        argv += [word for mount in (*own, *given) for word in ("--bind", mount)]
        argv += ["--nv"] if spec.get("gpus") else []
        # The image's own start-up files would set HOME to what was not mounted.
        return [*argv, *options, str(spec["image"]), *program]
    argv = [str(spec.get("program") or runtime), "run", "--rm", "--name", name, "--label", label(marker, node)]
    argv += ["--network", "host", "--ipc", "host", "--pid", "host"]
    # NCCL pins memory. Without a daemon nobody can raise a limit: the user's own are kept.
    argv += ["--ulimit", "host"] if runtime == "podman" else ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]
    if runtime == "podman" and user[0] != 0:
        argv += ["--userns", "keep-id"]
    argv += ["--user", f"{user[0]}:{user[1]}", "--workdir", workdir]
    if spec.get("gpus"):
        argv += ["--device", "nvidia.com/gpu=all"] if runtime == "podman" else ["--gpus", "all"]
    argv += [word for device in devices for word in ("--device", device)]
    argv += [word for mount in (*own, *given) for word in ("--volume", mount)]
    argv += [word for variable in variables for word in ("--env", variable)]
    argv += ["--env", f"HOME={home}"]
    argv += ["--interactive", "--tty"] if terminal else []
    # The image's entry point is replaced: what runs is the job's program and nothing else.
    argv += ["--entrypoint", program[0]]
    return [*argv, *options, str(spec["image"]), *program[1:]]


def clean_argv(spec: Mapping[str, Any], marker: str, node: int) -> list[str] | None:
    """The command line that lists the containers of a node that are left; `None` where they die with their parent."""
    if spec["runtime"] == "apptainer":
        return None
    program = str(spec.get("program") or spec["runtime"])
    return [program, "ps", "--all", "--quiet", "--filter", f"label={label(marker, node)}"]


def look_argv(spec: Mapping[str, Any]) -> list[str] | None:
    """Return the command that finds the image on this node; `None` for a file."""
    if spec["runtime"] == "apptainer":
        return None
    return [str(spec.get("program") or spec["runtime"]), "image", "inspect", "--format", "{{.Id}}", str(spec["image"])]


def pull_argv(spec: Mapping[str, Any], destination: str = "") -> list[str]:
    """Fetch the image; for apptainer into the file *destination*."""
    program = str(spec.get("program") or spec["runtime"])
    if spec["runtime"] == "apptainer":
        return [program, "pull", "--force", destination, str(spec["image"])]
    return [program, "pull", str(spec["image"])]


def _outermost(paths: Sequence[str]) -> list[str]:
    """Without those that lie below another one, in order."""
    normal = list(dict.fromkeys(posixpath.normpath(path) for path in paths if path))
    return [p for p in normal if not any(p != other and p.startswith(other.rstrip("/") + "/") for other in normal)]

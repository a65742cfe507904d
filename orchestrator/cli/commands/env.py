"""Commands about this installation: `orc env`, `orc version`, `orc completion`, `orc schema`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.invocation import EITHER_SPELLING, json_option
from orc.orchestrator.cli.ui.output import echo_json, echo_result

if TYPE_CHECKING:
    from pydantic import BaseModel


PACKAGES = (
    *("orc-launch", "torch", "numpy", "safetensors", "accelerate", "transformers", "datasets", "peft", "trl"),
    *("diffusers", "torchdata", "deepspeed", "cloudpickle", "submitit", "boto3", "torch_xla"),
)
SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PJRT_DEVICE")  # whose values are told, too
NAMED = ("ORC_", "ACCELERATE_", "NCCL_", "GLOO_", "FSDP_", "TORCH_", "SLURM_JOB_ID")
TORCH_TIMEOUT_S = 120
# Runs in the interpreter that runs orc; the last line is the answer.
_ASK_TORCH = """
import json, torch
def told(ask):
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
cuda = told(torch.cuda.is_available)
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "cuda_available": cuda,
    "cudnn": told(torch.backends.cudnn.version),
    "nccl": told(lambda: ".".join(map(str, torch.cuda.nccl.version()))) if cuda is True else None,
    "gpus": told(lambda: [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]),
    "backends": told(lambda: list(filter(torch.distributed.is_backend_available, ("gloo", "nccl", "mpi", "xccl")))),
}))
"""


@click.command("env", context_settings=EITHER_SPELLING)
@click.option(
    "--config-file", type=click.Path(path_type=Path), metavar="FILE", help="Also show this Accelerate file's values."
)
@json_option
def env_command(config_file: Path | None, as_json: bool) -> None:
    """Print versions, platform, torch and its devices, clusters and configuration, for an issue.

    Names of hosts, values of most variables and credentials are left out.
    """
    facts = gather(config_file)
    echo_result(as_json, facts, "\n".join(_lines(facts)))


def gather(config_file: Path | None) -> dict[str, Any]:
    """Return all facts, JSON-able. Raises `LaunchError` for a *config_file* that cannot be read."""
    from orc.launchers.paths import clusters_file, state_dir

    return {
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch_facts(),
        "paths": {"state directory": _tilde(state_dir(create=False)), "clusters file": _tilde(clusters_file())},
        "clusters": _clusters(),
        "accelerate_config": _accelerate(config_file),
        "variables": _variables(),
    }


def installed(package: str) -> str | None:
    """Return the version of an installed *package*; `None` where it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_facts() -> dict[str, Any] | None:
    """Return torch's own description; `None` without torch, ``{"error": ...}`` where it cannot be imported."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return None
    try:
        done = subprocess.run(
            (sys.executable, "-c", _ASK_TORCH), capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False
        )
        if done.returncode == 0:
            facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return facts
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}


def _clusters() -> list[dict[str, str]] | str:
    """Return names of the clusters with their kinds, or what is wrong with them; what is wrong with the whole file."""
    from orc.launchers.spec.clusters import read_clusters

    try:
        clusters, wrong = read_clusters()
    except LaunchError as error:
        return f"error: {error.what}"
    kinds = [{"name": name, "kind": cluster.kind} for name, cluster in clusters.items() if name not in wrong]
    return kinds + [{"name": name, "error": error.what} for name, error in wrong.items()]


def _accelerate(config_file: Path | None) -> dict[str, Any] | None:
    """Return the Accelerate file in use and its values by their documented keys; texts are left out."""
    from orc.launchers.accelerate.config_file import find_default, read_config

    try:
        path = config_file or find_default(os.environ)
        if path is None:
            return None
        config = read_config(path)
    except LaunchError as error:
        if config_file is not None:
            raise
        return {"error": error.what}
    values = {}
    for given in config.given.values():  # texts may name accounts and hosts, and commands may hold passwords
        harmless = given.option.choices or not isinstance(given.value, (str, list, dict))
        values[str(given.option.key)] = given.value if harmless else "(set)"
    return {"file": _tilde(config.path), "values": values}


def _variables() -> dict[str, str]:
    shown = {name: os.environ[name] for name in SHOWN if name in os.environ}
    return {**shown, **{name: "(set)" for name in sorted(os.environ) if name.startswith(NAMED)}}


def _tilde(path: Path) -> str:
    """Return *path* without the name of the user's home."""
    text, home = str(path), str(Path.home())
    return f"~{text[len(home) :]}" if text == home or text.startswith(f"{home}/") else text


def _lines(facts: dict[str, Any]) -> list[str]:
    torch = facts["torch"]
    lines = [f"- {name}: {version}" for name, version in facts["packages"].items()]
    lines += [
        f"- Python: {facts['python']['version']} ({_tilde(Path(facts['python']['executable']))})",
        f"- platform: {facts['platform']}, {facts['libc']}, {facts['cpus']} CPUs",
    ]
    if torch is None:
        lines.append("- torch: not installed")
    elif "error" in torch:
        lines.append(f"- torch cannot be imported: {torch['error']}")
    else:
        listed = {key: v if isinstance(v := torch[key], str) else ", ".join(v) for key in ("gpus", "backends")}
        version = torch["cuda"] or torch["hip"] or "none"
        lines += [
            f"- CUDA of torch: {version}, cuDNN {torch['cudnn'] or 'none'}, NCCL {torch['nccl'] or 'none'}",
            f"- GPUs: {listed['gpus'] or 'none'}",
            f"- backends: {listed['backends']}",
        ]
    clusters = facts["clusters"]
    if not isinstance(clusters, str):
        clusters = ", ".join(f"{one['name']} ({one.get('kind') or 'error: ' + one['error']})" for one in clusters)
    lines += [f"- clusters: {clusters}", *(f"- {name}: {path}" for name, path in facts["paths"].items())]
    config = facts["accelerate_config"]
    if config is None:
        lines.append("- Accelerate's default config: none")
    elif "error" in config:
        lines.append(f"- Accelerate's default config: {config['error']}")
    else:
        lines.append(f"- Accelerate's config {config['file']}:")
        lines += [f"    - {name}: {value}" for name, value in config["values"].items()]
    lines += [f"- {name}={value}" for name, value in facts["variables"].items()]
    return lines


@click.command("version")
@json_option
def version_command(as_json: bool) -> None:
    """Print the versions of orc, Python and torch (when torch is installed)."""
    told = {"orc": installed("orc-launch"), "python": platform.python_version(), "torch": installed("torch")}
    echo_result(as_json, told, "  ".join(f"{name} {version or 'not installed'}" for name, version in told.items()))


_INSTALL = {
    "bash": 'eval "$(orc completion bash)"            # in ~/.bashrc',
    "zsh": 'eval "$(orc completion zsh)"             # in ~/.zshrc',
    "fish": "orc completion fish | source             # in ~/.config/fish/config.fish",
}


@click.command("completion")
@click.argument("shell", required=False, type=click.Choice(sorted(_INSTALL)))
@json_option
def completion_command(shell: str | None, as_json: bool) -> None:
    """Print the completion script for SHELL (default: the login shell).

    \b
    eval "$(orc completion bash)"            # in ~/.bashrc
    eval "$(orc completion zsh)"             # in ~/.zshrc
    orc completion fish | source             # in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    name = shell or PurePath(os.environ.get("SHELL", "bash")).name
    completer = get_completion_class(name) if name in _INSTALL else None
    if completer is None:
        raise click.UsageError(f"no completion for {name!r}; there is {', '.join(sorted(_INSTALL))}")
    # Not `source()`: for bash that starts a bash to look at its version.
    instance = completer(click.get_current_context().find_root().command, {}, "orc", "_ORC_COMPLETE")
    script = instance.source_template % instance.source_vars()
    echo_result(as_json, {"shell": name, "script": script, "install": _INSTALL[name]}, script)


@click.command("schema")
@click.argument("kind", metavar="[job|clusters]", type=click.Choice(["job", "clusters"]), default="job")
@json_option
def schema_command(kind: str, as_json: bool) -> None:
    """Print the JSON Schema of job.yaml, or of clusters.yaml; with it editors complete keys and mark mistakes.

    \b
    orc schema > job.schema.json        # and in job.yaml, at the top:
    # yaml-language-server: $schema=job.schema.json
    """
    from orc.launchers.spec.json_schema import clusters_schema, job_schema

    del as_json  # it is JSON anyway
    echo_json(job_schema() if kind == "job" else clusters_schema(_options_models()))


def _options_models() -> dict[str, type[BaseModel]]:
    """Return the models of the options of clusters, of all kinds that have one, those of other packages included."""
    from orc.launchers.backends import backend_class
    from orc.launchers.plugins import BACKENDS

    found = {}
    for kind in BACKENDS.kinds():
        try:
            model = backend_class(kind).options_model
        except LaunchError:  # of a package that cannot be loaded: the use of the kind says why
            continue
        if model is not None:
            found[kind] = model
    return found

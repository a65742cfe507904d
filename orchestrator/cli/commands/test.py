"""`orc test`: a short distributed self-test of this machine or a cluster."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orc.orchestrator.cli.invocation import EITHER_SPELLING, cluster_option_for, json_option, open_client
from orc.orchestrator.cli.ui.display import display, submission_progress
from orc.orchestrator.cli.ui.output import echo, echo_json, of_states, stdout_to_stderr

if TYPE_CHECKING:
    from orc.orchestrator.views import JobView


MODULE = "orc.runtime.self_test"
RESULT = "orc-test-result "  # in front of the JSON in the log of rank 0
TIMEOUT_S = 180  # of a collective: a machine that hangs is to say so


@click.command("test", context_settings=EITHER_SPELLING)
@click.option("-n", "--nproc", type=click.IntRange(1), metavar="N", help="Processes per node; GPUs, or 2 on the CPU.")
@click.option("--cpu", is_flag=True, help="Test the CPU even where an accelerator is present.")
@click.option(
    "--config-file", type=click.Path(path_type=Path), metavar="FILE", help="Processes and device of an Accelerate file."
)
@cluster_option_for("Test a cluster, by a job.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="With --cluster: nodes.")
@click.option("--gpus", type=click.IntRange(0), default=0, show_default=True, help="With --cluster: GPUs per node.")
@json_option
def test_command(
    nproc: int | None, cpu: bool, config_file: Path | None, cluster: str | None, nodes: int, gpus: int, as_json: bool
) -> int:
    """Train for a second on several processes, and check the result: state, data, collectives, save and load.

    Each check is printed with its seconds. With --cluster it is a job, which is submitted and followed. The exit
    status is 0 when all checks held, 1 when one did not.
    """
    if cluster is None and (nodes > 1 or gpus):
        raise click.UsageError("--nodes and --gpus need --cluster", click.get_current_context())
    if config_file is not None:
        from orc.launchers.accelerate.config_file import read_config

        given = read_config(config_file)
        # The file counts the processes of all machines.
        nproc = nproc or given.get("num_processes", 0) // given.get("num_machines", 1) or None
        cpu = cpu or bool(given.get("cpu")) or given.get("distributed_type") == "MULTI_CPU"
    if cluster is None:
        return _here(nproc, cpu, as_json)
    return _on_cluster(cluster, nproc or gpus or 2, nodes, gpus, cpu, as_json)


def _here(nproc: int | None, cpu: bool, as_json: bool) -> int:
    from orc.launchers.agent.gpus import gpu_count
    from orc.launchers.foreground.launch import LocalLaunch, launch
    from orc.runtime.core.config import to_env

    gpus = 0 if cpu else gpu_count() or 0
    count = nproc or gpus or 2
    if not as_json:
        echo(f"{count} process{'es' * (count > 1)} on {'GPUs' if gpus else 'the CPU'} of this machine")
    with tempfile.TemporaryDirectory(prefix="orc-test-") as folder:
        result = Path(folder, "result.json")
        request = LocalLaunch(
            (MODULE, "--result", str(result)),
            nprocs=count,
            module=True,
            env=to_env({"use_cpu": cpu or None, "timeout_s": TIMEOUT_S}),
        )
        if not as_json:
            status = launch(request)
        else:
            with stdout_to_stderr():
                status = launch(request)
        told = json.loads(result.read_text()) if result.exists() else None
    if as_json:
        echo_json(_answer(told, status, cluster=None, job=None))
    elif status == 0:
        echo("all checks passed; this machine is ready")
    return int(status != 0)


def _on_cluster(cluster: str, nproc: int, nodes: int, gpus: int, cpu: bool, as_json: bool) -> int:
    from orc.launchers.spec import load_job
    from orc.orchestrator.cli.ui.tail import Cursor, PlainSink, Selection, conclusion, follow

    job = {
        "name": "orc-test",
        "module": MODULE,
        "args": ["--print-result"],
        "cluster": cluster,
        "resources": {"nodes": nodes, "procs_per_node": nproc, "gpus_per_node": gpus, "time": "15m"},
        "runtime": {"timeout_s": TIMEOUT_S, **({"use_cpu": True} if cpu else {})},
    }
    with tempfile.TemporaryDirectory(prefix="orc-test-") as folder:
        file = Path(folder, "job.yaml")
        file.write_text(json.dumps(job))
        loaded = load_job(file)
        client = open_client()
        with submission_progress(silent=as_json, yes=True) as on_progress:
            view = client.submit(loaded, on_progress=on_progress)
        echo(f"submitted {view.id} to {cluster}", err=True)
        log = Path(folder, "log")
        with log.open("wb") as stream, display(silent=as_json) as shown:
            cursor = Cursor(client, view.id, PlainSink(stream, raw=True), around=shown.aside)
            view = follow(client, view.id, cursor, Selection((0,), asked=True), shown)
        text = log.read_text(errors="replace")
    told, lines = _read(text)
    status = int(of_states([view.state]))
    if as_json:
        echo_json(_answer(told, status, cluster=cluster, job=view.id))
    else:
        echo("\n".join(lines))
        echo(_end(view, cluster, conclusion(view)), err=status != 0)
    return status


def _read(text: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the result in the log of rank 0, and the other lines."""
    lines = text.splitlines()
    found = [line for line in lines if line.startswith(RESULT)]
    told = json.loads(found[-1].removeprefix(RESULT)) if found else None
    return told, [line for line in lines if not line.startswith(RESULT)]


def _end(view: JobView, cluster: str, conclusion: str) -> str:
    return f"all checks passed; {cluster} is ready" if view.state == "SUCCEEDED" else conclusion


def _answer(told: dict[str, Any] | None, status: int, *, cluster: str | None, job: str | None) -> dict[str, Any]:
    result = told or {"ok": False, "processes": None, "checks": []}
    return {"cluster": cluster, "job": job, "exit_status": status, **result}

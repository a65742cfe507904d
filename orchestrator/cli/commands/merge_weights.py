"""`orc merge-weights`: the shards of a model into one file."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import EITHER_SPELLING, json_option
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo_result


@click.command("merge-weights", context_settings=EITHER_SPELLING)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("output_path", metavar="OUT", type=click.Path(path_type=Path, file_okay=False))
@click.option("--unsafe-serialization", is_flag=True, help="Write pytorch_model.bin instead of model.safetensors.")
@click.option("--remove-checkpoint-dir", is_flag=True, help="Remove the shards afterwards.")
@json_option
def command(
    directory: Path,
    output_path: Path,
    unsafe_serialization: bool,
    remove_checkpoint_dir: bool,
    as_json: bool,
) -> None:
    """Merge the shards of a model in DIR (pytorch_model_0 of a checkpoint, or the checkpoint) into one file in OUT.

    It needs torch, and memory for the whole model once.
    """
    try:  # by name: no other command may bring torch along
        merge = importlib.import_module("orc.runtime.checkpoint.merge").merge_fsdp_weights
        errors = importlib.import_module("orc.runtime.checkpoint.errors")
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name} is not installed here", hint="pip install 'orc-launch[runtime]'") from None
    try:
        with waiting(f"merging the shards in {directory}"):
            file = merge(directory, output_path, not unsafe_serialization, remove_checkpoint_dir)
    except (errors.CheckpointError, OSError, ValueError) as error:
        raise LaunchError(str(error), where=str(directory)) from None
    echo_result(as_json, {"file": file}, f"wrote {file}")

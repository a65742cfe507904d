"""`orc to-fsdp2`: settings of sharded data parallelism from version 1 to version 2; the rest stays as it is written."""

from __future__ import annotations

from pathlib import Path

import click
import yaml

from orc.launchers.errors import LaunchError
from orc.launchers.spec import source
from orc.orchestrator.cli.options import EITHER_SPELLING, json_option
from orc.orchestrator.cli.ui.output import echo, echo_json
from orc.runtime.core import fsdp_settings as settings

# Where the settings lie: in a job file, or in a configuration file of Accelerate.
_PLACES = (("runtime", "fsdp"), ("fsdp_config",))
_DROPPED = {
    "backward_prefetch_policy": "version 2 prefetches by itself",
    "use_orig_params": "version 2 always keeps the parameters of the model",
    "sync_module_states": "version 2 does it when it shards",
}


class NotConvertibleError(ValueError):
    """A file without settings of version 1, or with one that version 2 does not have."""


def convert(text: str, where: str) -> tuple[str, list[str]]:
    """Return *text* (YAML) with its FSDP settings in version 2, and a note for each that has no counterpart.

    *where* names the file in messages.

    Raises:
        SpecError: it is no YAML.
        NotConvertibleError: there is nothing to convert, or it cannot be; the message has the reason.
    """
    document = source.compose(text, where)
    node = next((found for place in _PLACES if (found := _below(document, place)) is not None), None)
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise NotConvertibleError("no FSDP settings in it, neither runtime.fsdp nor fsdp_config")
    if node.flow_style:
        raise NotConvertibleError("write the FSDP settings one a line, not in braces")
    edits: list[tuple[int, int, str]] = []
    notes: list[str] = []
    prefix = "fsdp_" if node.value[0][0].value.startswith("fsdp_") else ""
    begin = node.value[0][0].start_mark
    versioned = False
    for key, value in node.value:
        setting = settings.find(key.value)
        if setting is None:
            raise NotConvertibleError(f"line {key.start_mark.line + 1}: unknown key {key.value!r}")
        if not isinstance(value, yaml.ScalarNode):
            continue  # a list of classes
        try:
            parsed = setting.parse(value.value) if value.value.strip() else None
        except ValueError as error:
            raise NotConvertibleError(f"line {key.start_mark.line + 1}: {key.value}: {error}") from None
        line = text.rfind("\n", 0, key.start_mark.index) + 1, (text + "\n").find("\n", value.end_mark.index) + 1
        span = key.start_mark.index, value.end_mark.index
        if setting.key == "version":
            if parsed == 2:
                raise NotConvertibleError("it is of version 2 already")
            edits.append((*span, f"{key.value}: 2"))
            versioned = True
        elif setting.key in _DROPPED:
            edits.append((*line, ""))
            notes.append(f"{key.value} is left out: {_DROPPED[setting.key]}")
        elif setting.key in ("sharding_strategy", "reshard_after_forward") and isinstance(parsed, str):
            if parsed == "NO_SHARD":
                raise NotConvertibleError("NO_SHARD has no counterpart: version 2 always shards; train with DDP")
            edits.append((*span, f"{prefix}reshard_after_forward: {str(settings.reshards(parsed)).lower()}"))
            if parsed.startswith("HYBRID"):
                notes.append(f"{parsed}: give the number of replicas of the sharded model as dp_replicate_size")
        elif setting.key == "state_dict_type" and parsed == "LOCAL_STATE_DICT":
            edits.append((*span, f"{key.value}: SHARDED_STATE_DICT"))
            notes.append("LOCAL_STATE_DICT does not exist in version 2; SHARDED_STATE_DICT is the nearest")
    if not versioned:
        start = begin.index - begin.column
        edits.append((start, start, f"{' ' * begin.column}{prefix}version: 2\n"))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text, notes


def _below(node: yaml.Node | None, path: tuple[str, ...]) -> yaml.Node | None:
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        node = next((value for key, value in node.value if key.value == name), None)
    return node


@click.command("to-fsdp2", context_settings=EITHER_SPELLING)
@click.argument("config", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--config-file", type=click.Path(path_type=Path, dir_okay=False), help="The same as CONFIG.")
@click.option(
    "--output-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the result instead of the terminal.",
)
@click.option("--overwrite", is_flag=True, help="Write the result to CONFIG, or over an existing output file.")
@json_option
def command(
    config: Path | None, config_file: Path | None, output_file: Path | None, overwrite: bool, as_json: bool
) -> None:
    """Convert the FSDP settings of CONFIG, a job file or a configuration of Accelerate, to version 2.

    The result is printed unless --output-file or --overwrite is given.
    """
    file = config or config_file
    if file is None or (config and config_file):
        raise click.UsageError("give one file: orc to-fsdp2 CONFIG", click.get_current_context())
    try:
        converted, notes = convert(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise LaunchError(f"the file cannot be read: {reason}", where=str(file)) from None
    except NotConvertibleError as error:
        raise LaunchError(str(error), where=str(file), hint="docs/how-to/fsdp.md has the table") from None
    target = output_file or (file if overwrite else None)
    if target is not None:
        if target.exists() and not overwrite:
            raise LaunchError("there is a file of that name", where=str(target), hint="add --overwrite")
        try:
            target.write_text(converted, encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"the file cannot be written: {error.strerror}", where=str(target)) from None
    if as_json:
        echo_json({"converted": None if target else converted, "file": str(target) if target else None, "notes": notes})
        return
    for note in notes:
        echo(f"note: {note}", err=True)
    echo(f"wrote {target}" if target else converted.rstrip("\n"))

"""`orc config`: the wizard, the default file, an update, and the conversion of configuration files of Accelerate."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.cli.invocation import EITHER_SPELLING, json_option
from orc.orchestrator.cli.ui.display import can_ask
from orc.orchestrator.cli.ui.output import echo, echo_json, echo_result, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orc.launchers.accelerate.config_file import AccelerateConfig
    from orc.launchers.accelerate.convert import Conversion


_file_option = click.option(
    "--config-file", metavar="FILE", type=click.Path(path_type=Path), help="This file instead of the default one."
)
_force_option = click.option("--force", is_flag=True, help="Replace an existing file.")


def _target(given: Path | None) -> Path:
    from orc.launchers.accelerate.location import default_path

    return given.expanduser() if given is not None else default_path(os.environ)


def _read(given: Path | None) -> AccelerateConfig:
    """Return the configuration that is there. Raises `SpecError` with the places that were searched."""
    from orc.launchers.accelerate.config_file import find_default, read_config
    from orc.launchers.accelerate.location import default_path

    path = given or find_default(os.environ)
    if path is None:
        hint = "`orc config` asks and writes one; `orc config default` writes one without asking"
        raise SpecError("there is no configuration file", where=str(default_path(os.environ)), hint=hint)
    return read_config(path)


def _written(path: Path, values: dict[str, Any], as_json: bool, after: str = "") -> None:
    text = f"configuration saved at {path}" + (f"\n{after}" if after else "")
    echo_result(as_json, {"file": str(path.absolute()), "values": values}, text)


@click.group("config", invoke_without_command=True, context_settings=EITHER_SPELLING)
@_file_option
@_force_option
@json_option
@click.pass_context
def config_command(ctx: click.Context, config_file: Path | None, force: bool, as_json: bool) -> None:
    """Ask how to train on this machine, and write the configuration file that `orc launch` reads.

    The file is one of Hugging Face Accelerate: default_config.yaml below $HF_HOME/accelerate, or
    $XDG_CACHE_HOME/huggingface/accelerate, or ~/.cache/huggingface/accelerate, unless --config-file names another.
    """
    if ctx.invoked_subcommand is not None:
        before = {"config_file": config_file, "file": config_file, "force": force, "as_json": as_json}
        given = {name: value for name, value in before.items() if value}
        ctx.default_map = dict.fromkeys(config_command.commands, given)
        return
    from orc.launchers.accelerate.defaults import write_config
    from orc.launchers.accelerate.wizard import interview

    path, ask = _target(config_file), Prompts()
    if path.exists() and not force:
        if not can_ask():
            hint = "--force replaces it, --config-file FILE writes another, `orc config update` keeps its values"
            raise SpecError("the file exists already and was not changed", where=str(path), hint=hint)
        force = ask.confirm(f"{path} is there already. Replace it?")
        if not force:
            raise click.Abort
    values = interview(ask)
    write_config(values, path, overwrite=force)
    elsewhere = values["compute_environment"] == "AMAZON_SAGEMAKER" or values.get("distributed_type") == "TPU"
    further = elsewhere or values.get("num_machines", 1) > 1
    after = f"next: orc config convert {path} --out DIR makes a job of it" if further else "next: orc launch SCRIPT"
    _written(path, values, as_json, after)


_YES, _NO = ("yes", "y", "true", "1"), ("no", "n", "false", "0")


class Prompts:
    """Questions as lines on stderr, answers as lines of stdin; an empty one takes the default."""

    def choose(self, question: str, choices: Sequence[str], default: str) -> str:
        """Return one of *choices*, answered by its number, its name or the beginning of its name."""
        listed = ", ".join(f"[{number}] {choice}" for number, choice in enumerate(choices))

        def parse(text: str) -> str:
            lowered = text.lower()
            exact = [one for one in choices if one.lower() == lowered]
            near = exact or [one for one in choices if one.lower().startswith(lowered)]
            if len(near) == 1:
                return near[0]
            if text.isdecimal() and int(text) < len(choices):
                return choices[int(text)]
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")

        return str(self._ask(f"{question} ({listed}) [{default}]: ", default, parse))

    def confirm(self, question: str, default: bool = False) -> bool:
        """Return yes or no."""

        def parse(text: str) -> bool:
            if text.lower() in (*_YES, *_NO):
                return text.lower() in _YES
            raise ValueError(f"{text!r} is neither yes nor no")

        return bool(self._ask(f"{question} [{'YES/no' if default else 'yes/NO'}]: ", default, parse))

    def text(self, question: str, default: Any = None, parse: Callable[[str], Any] = str) -> Any:
        """Return the parsed text, or *default* for an empty line; without a default there has to be one."""
        return self._ask(f"{question} [{default}]: " if default is not None else f"{question} ", default, parse)

    def say(self, text: str) -> None:
        """Print a remark."""
        echo(text, err=True)

    def _ask(self, question: str, default: Any, parse: Callable[[str], Any]) -> Any:
        while True:
            echo(question, err=True, nl=False)
            line = sys.stdin.readline()
            if not sys.stdin.isatty():
                echo(line.rstrip("\n"), err=True)  # so that the record of a run reads like a conversation
            if not line:
                raise _ended(question)
            text = line.strip()
            if not text and default is not None:
                return parse(default) if isinstance(default, str) else default
            try:
                if not text:
                    raise ValueError("an answer is needed")
                return parse(text)
            except ValueError as error:
                echo(f"  {error}", err=True)


def _ended(question: str) -> LaunchError:
    return LaunchError(f"the answers end before the question: {question.strip()}")


def main() -> NoReturn:
    """Run ``orc config`` with the arguments of this process (the script ``orc-config``), and end it with the status."""
    from orc.orchestrator.cli.main import main as orc

    sys.argv[1:1] = ["config"]
    sys.exit(orc())


@config_command.command(
    "default", short_help="Write a file for this machine without asking.", context_settings=EITHER_SPELLING
)
@_file_option
@click.option("--mixed-precision", type=click.Choice(["no", "fp16", "bf16", "fp8"]), default="no", show_default=True)
@_force_option
@json_option
def default_command(config_file: Path | None, mixed_precision: str, force: bool, as_json: bool) -> None:
    """Write a configuration for this machine, with all of its GPUs, without a question.

    An existing file stays as it is.
    """
    from orc.launchers.accelerate.defaults import basic_config, write_config
    from orc.launchers.agent.gpus import gpu_count

    path = _target(config_file)
    if path.exists() and not force:
        echo(f"{path} exists already and was not changed; --force replaces it", err=True)
        if as_json:
            echo_json({"file": None})
        return
    values = basic_config(mixed_precision, gpu_count() or 0)
    write_config(values, path, overwrite=force)
    _written(path, values, as_json)


@config_command.command(
    "update", short_help="Add the defaults that a file does not have yet.", context_settings=EITHER_SPELLING
)
@_file_option
@json_option
def update_command(config_file: Path | None, as_json: bool) -> None:
    """Add the defaults that a configuration file does not have yet; its values stay, under today's names."""
    from orc.launchers.accelerate.defaults import updated, write_config

    config = _read(config_file)
    values = updated(config)
    write_config(values, config.path, overwrite=True)
    added = sorted(set(values) - set(config.document.data))
    _written(config.path, values, as_json, f"added: {', '.join(added)}" if added else "nothing was missing")


@config_command.command("show", short_help="Print the file that a launch reads.", context_settings=EITHER_SPELLING)
@_file_option
@json_option
def show_command(config_file: Path | None, as_json: bool) -> None:
    """Print the configuration file that a launch reads, checked, and where it is."""
    config = _read(config_file)
    if as_json:
        echo_json({"file": str(config.path.absolute()), "values": config.document.data, "notes": list(config.notes)})
        return
    import yaml

    echo(f"# {config.path}")
    echo(yaml.safe_dump(config.document.data, sort_keys=True, allow_unicode=True).rstrip())
    for note in config.notes:
        echo(f"note: {note}", err=True)


@config_command.command(
    "convert", short_help="Convert a file to job.yaml and clusters.yaml.", context_settings=EITHER_SPELLING
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Write job.yaml and clusters.yaml there.")
@click.option("--script", metavar="PATH", default="train.py", show_default=True, help="Script of the job.")
@click.option("--name", metavar="NAME", help="The job's name; that of FILE unless given.")
@json_option
def convert_command(file: Path | None, out: Path | None, script: str, name: str | None, as_json: bool) -> None:
    """Convert a configuration FILE of Accelerate to a job file, and an entry of clusters.yaml where one is needed.

    Without FILE it is the default file. A note says what becomes of each key without an equivalent.
    """
    from orc.launchers.accelerate.convert import convert

    made = convert(_read(file), script=script, name=name)
    files = _write_all(made, out) if out is not None else []
    if as_json:
        notes = [{"key": note.key, "where": note.where, "text": note.text} for note in made.notes]
        told = {"notes": notes, "remarks": list(made.config.notes), "files": [str(path.absolute()) for path in files]}
        echo_json({"job": made.job, "clusters": made.clusters, **told})
        return
    if files:
        echo(f"wrote {', '.join(map(str, files))}")
        for note in made.notes:
            echo(f"note: {note.where}: {note.key}: {note.text}", err=True)
        assert out is not None
        clusters = f"ORC_CLUSTERS={out / 'clusters.yaml'} " if made.clusters else ""
        echo(f"next: put {script} into {out}, then {clusters}orc render {out / 'job.yaml'}")
        return
    texts = [made.job_text(), *([made.clusters_text()] if made.clusters else [])]
    echo("\n---\n".join(text.rstrip("\n") for text in texts))


def examples() -> dict[str, Path]:
    """Return the converted examples that ship with orc: name -> folder."""
    import orc.templates

    root = Path(orc.templates.__file__).parent / "configs"
    return {path.name: path for path in sorted(root.iterdir()) if (path / "job.yaml").is_file()}


@config_command.command(
    "examples", short_help="List converted examples, or print one.", context_settings=EITHER_SPELLING
)
@click.argument("name", required=False)
@json_option
def examples_command(name: str | None, as_json: bool) -> None:
    """List the examples of Accelerate's documentation as job files, or print the one called NAME."""
    known = examples()
    if name is None:
        rows = [(key, *_facts(folder)) for key, folder in known.items()]
        told = {"examples": [dict(zip(("name", "cluster", "size", "runtime"), row, strict=True)) for row in rows]}
        shown = table(("EXAMPLE", "CLUSTER", "NODES x PROCESSES", "RUNTIME"), rows)
        echo_result(as_json, told, f"{shown}\n\norc config examples NAME prints one.")
        return
    if name not in known:
        from orc.launchers.spec.problems import nearest

        raise LaunchError(f"no example {name!r}{nearest(name, known)}", hint=f"there are: {', '.join(known)}")
    files = {file.name: file.read_text(encoding="utf-8") for file in sorted(known[name].iterdir(), reverse=True)}
    echo_result(as_json, {"name": name, "files": files}, "---\n".join(files.values()).rstrip("\n"))


def _facts(folder: Path) -> tuple[str, str, str]:
    """Return the kind of cluster, the size and the settings of the runtime of an example, each in a few words."""
    from orc.launchers.spec import source

    found = {
        file.stem: source.parse(source.read_file(file, "example"), str(file)).data for file in folder.glob("*.yaml")
    }
    job, cluster = found["job"], next(iter(found.get("clusters", {}).values()), {"kind": "local"})
    resources, runtime = job.get("resources", {}), job.get("runtime", {})
    size = f"{resources.get('nodes', 1)} x {resources.get('procs_per_node', 'each device')}"
    words = [str(value) if key == "mixed_precision" else key for key, value in runtime.items()]
    return cluster["kind"], size, ", ".join(words) or "-"


def _write_all(made: Conversion, folder: Path) -> list[Path]:
    """Write the files into *folder*, none over another. Raises `LaunchError`; then nothing was written."""
    texts: dict[Path, Callable[[], str]] = {folder / "job.yaml": made.job_text}
    if made.clusters:
        texts[folder / "clusters.yaml"] = made.clusters_text
    if taken := [str(path) for path in texts if path.exists()]:
        raise LaunchError(f"would overwrite {', '.join(taken)}; nothing was written", hint="choose another --out DIR")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text())
    except OSError as error:
        raise LaunchError(f"cannot write: {error.strerror}", where=str(error.filename or folder)) from None
    return list(texts)

"""`orc completion`: shell code that completes commands, options, job ids and cluster names."""

from __future__ import annotations

import os
from pathlib import PurePath

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui.output import echo_result

_INSTALL = {
    "bash": 'eval "$(orc completion bash)"            # in ~/.bashrc',
    "zsh": 'eval "$(orc completion zsh)"             # in ~/.zshrc',
    "fish": "orc completion fish | source             # in ~/.config/fish/config.fish",
}


@click.command("completion")
@click.argument("shell", required=False, type=click.Choice(sorted(_INSTALL)))
@json_option
def command(shell: str | None, as_json: bool) -> None:
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

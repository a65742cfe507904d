"""Words of a command line as bash gives them to a completion: put together again where it has split them at ``=``."""

from __future__ import annotations

import os

# Set while a value behind ``KEY=`` is completed: bash replaces the value alone, so the key must not be offered again.
VALUE_ALONE = "_ORC_COMPLETE_VALUE"


def join_assignments() -> None:
    """Join ``--set KEY = VALUE`` to ``--set KEY=VALUE`` in the variables that click reads; move the current word."""
    import shlex

    from click.shell_completion import split_arg_string

    words, current = split_arg_string(os.environ.get("COMP_WORDS", "")), int(os.environ.get("COMP_CWORD", "0"))
    found: list[str] = []
    position, index = current, 0
    while index < len(words):
        word, start = words[index], index
        if found and found[-1] == "--set" and words[index + 1 : index + 2] == ["="]:
            value = words[index + 2 : index + 3] if current >= index + 2 else []
            word, index = "=".join([word, *(value or [""])]), index + 1 + len(value)
        if start < current <= index:
            os.environ[VALUE_ALONE] = "1"
            position = len(found)
        elif start == current:
            position = len(found)
        found.append(word)
        index += 1
    if current >= len(words):
        position = len(found)
        if words[-1:] == ["="] and found and found[-1].endswith("="):
            os.environ[VALUE_ALONE] = "1"
            position = len(found) - 1
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = shlex.join(found), str(position)

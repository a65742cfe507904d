"""Hyperparameters from a program's arguments, by SageMaker's rules: each has a name and one value. Pure.

The program gets its arguments as they are, on every cluster; hyperparameters are how SageMaker shows and searches them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from orc.launchers.errors import RenderError

_NUMBER = re.compile(r"-(?:\d|\.\d|inf|nan)")
_HELP = (
    "On SageMaker every argument is `--name value`. To pass arguments as they are, without hyperparameters, set "
    "resources.options.sagemaker.arguments: plain."
)


def hyperparameters(argv: Sequence[str], where: str) -> dict[str, str]:
    """``--epochs 3 --fp16 True`` as ``{"epochs": "3", "fp16": "True"}``.

    Raises `RenderError` for bare flags, positionals and repeated names.
    """
    found: dict[str, str] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not _is_name(word):
            raise RenderError(f"the argument {_short(word)} has no name", where=where, hint=_hint(argv, position - 1))
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            if position == len(argv) or _is_name(argv[position]):
                raise RenderError(
                    f"the flag {word} has no value",
                    where=where,
                    hint=f"Write `{word} True`, and let the script read it as a value (not as an argparse action). "
                    + _HELP,
                )
            value = argv[position]
            position += 1
        if name in found:
            raise RenderError(f"the argument {word.partition('=')[0]} is given twice", where=where, hint=_HELP)
        found[name] = value
    return found


def _is_name(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and word != "--" and not _NUMBER.match(word)


def _hint(argv: Sequence[str], position: int) -> str:
    if position >= 2 and _is_name(argv[position - 2]) and not _is_name(argv[position - 1]):
        name = argv[position - 2].partition("=")[0]
        both = f"{argv[position - 1]},{argv[position]}"
        return f"{name} has a value already; several go into one, like `{name} {both}`. {_HELP}"
    return _HELP


def _short(word: str) -> str:
    return repr(word if len(word) <= 60 else word[:57] + "...")

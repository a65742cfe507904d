"""Parsers of the values in job files: durations, memory sizes, node counts, names.

Pure; every parser raises `ValueError` with a message for people.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

Path = tuple[str | int, ...]


class LocatedError(ValueError):
    """Faults inside a value, part by part: the path of the part, relative to the value, and the message."""

    def __init__(self, *problems: tuple[Path, str]) -> None:
        super().__init__("; ".join(message for _, message in problems))
        self.problems = problems


# Patterns are texts: `re` compiles and remembers them on first use, and most starts use few of them.
_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
_UNIT_SECONDS = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
_UNITS = "".join(rf"(?:({_NUMBER}){unit})?" for unit in _UNIT_SECONDS)
_CLOCK = r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-5]?[0-9]):([0-5]?[0-9])"
_MEMORY = rf"({_NUMBER})\s*([KMGTkmgt])(?:i?[bB])?"
_MEMORY_POWER = {"K": 1, "M": 2, "G": 3, "T": 4}
_NODES = r"([0-9]{1,15})(?::([0-9]{1,15}))?"
_ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_MODULE = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_MAX_SECONDS = 10 * 365 * 86400

# The agent derives these on every node; a value from the job file would be overwritten without a word.
DERIVED_ENV = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    | {"ORC_JOB_ID", "ORC_JOB_NAME", "ORC_ATTEMPT", "ORC_RESTART", "ORC_MARKER", "ORC_JOB_DIR", "ORC_ATTEMPT_DIR"}
    | {"ORC_NODE_RANK", "ORC_NNODES", "ORC_RDZV_ID", "ORC_GANG", "ORC_LOGS_DIR", "ORC_TOKEN"}
)


def seconds(value: Any) -> float:
    """Return a duration in seconds from ``90``, ``90s``, ``90m``, ``1h30m``, ``1:30:00`` or ``2-12:00:00``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("expected a duration such as 90m, 2h or 1:30:00")
    if isinstance(value, str):
        from fractions import Fraction

        text = value.strip()
        if clock := re.fullmatch(_CLOCK, text):
            days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
            total: float = days * 86400 + hours * 3600 + minutes * 60 + rest
        elif text and (units := re.fullmatch(_UNITS, text)):
            total = float(
                sum(
                    Fraction(part) * size
                    for part, size in zip(units.groups(), _UNIT_SECONDS.values(), strict=True)
                    if part
                )
            )
        elif re.fullmatch(_NUMBER, text):
            total = float(text)
        elif re.fullmatch(r"[0-9]+:[0-9]+", text):
            raise ValueError(
                f"{text!r} may mean hours:minutes or minutes:seconds; write {text}:00 or use units such as 90m"
            )
        else:
            raise ValueError(f"{text!r} is not a duration; write seconds, units such as 90m, 2h, 1h30m, or H:MM:SS")
    else:
        total = value
    if not 0 <= total <= _MAX_SECONDS:
        raise ValueError("expected a duration between 0 and 10 years")
    return int(total) if total == int(total) else total


def deadline(value: Any) -> float | str | None:
    """Return a duration in seconds, or a time as ISO 8601 with its offset; one that is given without is local."""
    if value is None:
        return None
    if isinstance(value, str) and re.match(r"\s*[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        from datetime import datetime

        try:
            at = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
        except ValueError:
            raise ValueError(
                f"{value!r} is not a time; write for example 2027-01-31 18:00 or 2027-01-31T18:00Z"
            ) from None
        return (at if at.tzinfo else at.astimezone()).isoformat()
    try:
        found = seconds(value)
    except ValueError as error:
        raise ValueError(f"{error}; or a time such as 2027-01-31 18:00") from None
    if not found:
        raise ValueError("a job needs some time; write for example 12h, or a time such as 2027-01-31 18:00")
    return found


def time_limit(value: Any) -> str:
    """Return a time limit as ``H:MM:SS``, from what `seconds` reads; at least 1 s, fractions rounded up."""
    total = -int(-seconds(value) // 1)
    if total < 1:
        raise ValueError("a time limit is at least one second")
    return clock(total)


def clock(seconds: float) -> str:
    """Return a number of seconds as ``H:MM:SS``."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def memory(value: Any) -> str:
    """Return a memory size in the shortest exact binary unit (``"16G"``, ``"1536M"``); units are powers of 1024."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} has no unit; write for example 16G or 512M")
    match = re.fullmatch(_MEMORY, value.strip())
    if not match:
        raise ValueError(f"{value!r} is not a memory size; write for example 16G or 512M")
    from fractions import Fraction

    kibibytes = -int(-Fraction(match[1]) * 1024 ** (_MEMORY_POWER[match[2].upper()] - 1) // 1)
    if kibibytes < 1:
        raise ValueError("expected a memory size above 0")
    unit = 0
    while kibibytes % 1024 == 0 and unit < 3:
        kibibytes //= 1024
        unit += 1
    return f"{kibibytes}{'KMGT'[unit]}"


def memory_bytes(text: str) -> int:
    """Return the bytes that a size made by `memory` stands for."""
    size: int = 1024 ** _MEMORY_POWER[text[-1]]
    return int(text[:-1]) * size


def nodes(value: Any) -> int | str:
    """Return a node count: ``4``, or ``"2:4"`` for two to four; equal bounds become a plain count."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("expected a number of nodes such as 2, or a range such as 2:4")
    match = re.fullmatch(_NODES, str(value).strip())
    if not match:
        if isinstance(value, int):
            wrong = f"a job needs at least 1 node, not {value}"
            raise ValueError(wrong if value < 1 else "more nodes than any cluster has")
        raise ValueError(f"{value!r} is not a number of nodes; write for example 2, or 2:4 for a range")
    low, high = int(match[1]), int(match[2] or match[1])
    if low < 1:
        raise ValueError(f"a job needs at least 1 node, not {low}")
    if low > high:
        raise ValueError(f"the smallest number of nodes, {low}, exceeds the largest, {high}")
    if high > 100_000:
        raise ValueError(f"{high} nodes are more than any cluster has")
    return low if low == high else f"{low}:{high}"


def scalar_text(value: Any) -> str:
    """Return a scalar as the text a process sees (``true``/``false``). Refuses null, lists and mappings."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        raise ValueError('has no value; write "" for an empty text')
    if isinstance(value, (int, float)):
        return repr(value)
    if not isinstance(value, str):
        kind = "a mapping" if isinstance(value, Mapping) else "a list"
        raise ValueError(f"expected one value, not {kind}")
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        # Bytes of the environment or the command line that are no text; no JSON file could carry them.
        raise ValueError("is not valid UTF-8") from None
    return value


def line(value: Any) -> str:
    """Return a scalar as one line of printable text: a path, a word or a directive."""
    text = scalar_text(value)
    if not text.isprintable():
        raise ValueError(f"{text!r} must be one line of printable characters")
    return text


def within_workdir(text: str) -> str:
    """Return a path in its shortest form, which does not lead out of the directory that it starts in."""
    if not text.strip():
        raise ValueError("must not be empty")
    normal = posixpath.normpath(text)
    if normal == ".." or normal.startswith("../"):
        raise ValueError(f"{text!r} lies outside the workdir: only the workdir travels to the nodes")
    return normal


def env_name(value: Any) -> str:
    """Return the name of an environment variable that the job may set."""
    if not isinstance(value, str) or not re.fullmatch(_ENV_NAME, value):
        raise ValueError(f"{value!r} is not a name of an environment variable (letters, digits and _, no digit first)")
    if value in DERIVED_ENV:
        raise ValueError(f"{value} is set by orc on every node and cannot be set here")
    return value


def module_name(value: Any) -> str:
    """Return a dotted Python module name."""
    if not isinstance(value, str) or not re.fullmatch(_MODULE, value):
        hint = (
            "; for a file use `script:`" if isinstance(value, str) and (value.endswith(".py") or "/" in value) else ""
        )
        raise ValueError(f"{value!r} is not the name of a Python module{hint}")
    return value


def flags(arguments: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return command-line words for a mapping: ``{lr: 0.1, verbose: true, tags: [a, b], x: null}``.

    A key becomes ``--key`` (one that starts with a dash is taken as it is), ``true`` the flag alone, ``false`` and
    ``null`` nothing, a list several words after one flag. A text value that starts with a dash and is no number is
    joined with ``=``, so that it is not taken for another flag.
    """
    words: list[str] = []
    problems: list[tuple[Path, str]] = []
    for key, value in arguments.items():
        try:
            words += _flag(key, value)
        except LocatedError as error:
            problems += error.problems
    if problems:
        raise LocatedError(*problems)
    return tuple(words)


def _flag(key: Any, value: Any) -> list[str]:
    name = scalar_text(key)
    if not name or re.search(r"[\s=]", name):
        raise LocatedError(((key,), f"{name!r} is not the name of an argument"))
    flag = name if name.startswith("-") else f"--{name}"
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple)):
        return [flag, *texts(value, (key,))] if value else []
    text = texts([value], (key,), single=True)[0]
    return [f"{flag}={text}"] if _looks_like_flag(text) and flag.startswith("--") else [flag, text]


def named_flags(words: Sequence[str]) -> dict[str, Any] | None:
    """Return a mapping of which `flags` makes *words*; `None` where there is none."""
    named: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if _looks_like_flag(word):
            name, equals, text = word.removeprefix("--").partition("=")
            if name in named:
                return None
            named[name] = [text] if equals else []
        elif not name:
            return None
        else:
            named[name].append(word)
    found = {key: values if len(values) > 1 else next(iter(values), True) for key, values in named.items()}
    try:
        return found if flags(found) == tuple(words) else None
    except LocatedError:
        return None


def texts(values: Sequence[Any], path: Path = (), *, single: bool = False) -> list[str]:
    """Return each value as `scalar_text` has it. Raises `LocatedError` with *path* and the index of each bad one."""
    found: list[str] = []
    problems: list[tuple[Path, str]] = []
    for index, value in enumerate(values):
        try:
            found.append(scalar_text(value))
        except ValueError as error:
            problems.append((path if single else (*path, index), str(error)))
    if problems:
        raise LocatedError(*problems)
    return found


def _looks_like_flag(text: str) -> bool:
    if not text.startswith("-"):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False

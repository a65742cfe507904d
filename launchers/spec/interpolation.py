"""``${env:NAME}``, ``${env:NAME:-default}`` and ``${job.key.path}`` in the texts of a job file.

Anything else that looks like a shell variable (``$HOME``, ``${HOME}``) stays as it is, for the shell on the node.
``$$`` before a brace is a literal ``$``: ``$${env:X}`` arrives as ``${env:X}``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from typing import Any

from orc.launchers.errors import SpecError
from orc.launchers.spec.problems import Problem, dotted
from orc.launchers.spec.source import MAX_BYTES, Document, KeyPath, Reading, scalar

_REFERENCE = re.compile(r"\$\$(?=\{)|\$\{(?P<kind>env:|job\.)(?P<rest>[^}]*)(?P<end>\}?)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class _BadReference(Exception):
    """Reference that cannot be replaced; becomes a `Problem` at the text that holds it."""


class Interpolation:
    """Replacement of the references of one document.

    *defaults* answers for keys that a job file leaves out: it gets a path and returns the default, or raises
    `KeyError` with what to add to the message; `None` means that this is no job file, so ``${job.x}`` is refused.
    *secrets* are the names whose values must not be copied into a spec.
    """

    def __init__(
        self,
        document: Document,
        secrets: Collection[str],
        reading: Callable[[KeyPath], Reading],
        defaults: Callable[[KeyPath], Any] | None,
    ) -> None:
        self._document = document
        self._secrets = secrets
        self._reading = reading
        self._defaults = defaults
        self._done: dict[KeyPath, Any] = {}
        self._open: list[KeyPath] = []
        self._size = 0  # characters that references have become

    def run(self) -> list[Problem]:
        """Replace every reference in place; return the problems of those that could not be replaced."""
        problems: list[Problem] = []
        self._document.data = self._walk(self._document.data, (), problems)
        return problems

    def _walk(self, value: Any, path: KeyPath, problems: list[Problem]) -> Any:
        if isinstance(value, dict):
            return {key: self._walk(item, (*path, key), problems) for key, item in value.items()}
        if isinstance(value, list):
            return [self._walk(item, (*path, index), problems) for index, item in enumerate(value)]
        try:
            return self._value(path, value)
        except _BadReference as refused:
            origin = self._document.origin(path)
            problems.append(Problem(origin.where, dotted(path), str(refused), order=origin.order))
            return value

    def _value(self, path: KeyPath, value: Any) -> Any:
        """Return the scalar at *path* with its references replaced."""
        if not isinstance(value, str) or "${" not in value:
            return value
        if path in self._done:
            return self._done[path]
        if path in self._open:
            chain = " -> ".join(dotted(p) for p in [*self._open[self._open.index(path) :], path])
            raise _BadReference(f"refers to itself: {chain}")
        self._open.append(path)
        try:
            text = _REFERENCE.sub(self._replace, value)
        finally:
            self._open.pop()
        # In a place for numbers, ${env:NODES} is the number, also where YAML demands quotes around it.
        whole = self._document.origin(path).plain or _REFERENCE.fullmatch(value) is not None
        retype = text != value and whole and self._reading(path) != "text"
        try:
            result = scalar(text) if retype else text
        except ValueError:
            raise _BadReference(f"{text[:40]!r} is not a number that can be read") from None
        if self._reading(path) == "flags" and result is not None and not isinstance(result, bool):
            result = text
        self._done[path] = result
        return result

    def _replace(self, match: re.Match[str]) -> str:
        if match["kind"] is None:
            return "$"
        if not match["end"]:
            raise _BadReference(f"{match[0][:40]!r} has no closing brace")
        text = self._variable(match["rest"]) if match["kind"] == "env:" else self._key(match["rest"])
        # References to values that hold references multiply; a limit keeps a small file small.
        self._size += len(text)
        if self._size > MAX_BYTES:
            where = self._document.origin(self._open[-1]).where
            what = f"the references of the file expand to more than {MAX_BYTES >> 20} MiB"
            raise SpecError(what, where=where, hint="check the values that refer to each other")
        return text

    def _variable(self, rest: str) -> str:
        name, has_default, default = rest.partition(":-")
        if not _NAME.fullmatch(name):
            raise _BadReference(f"${{env:{rest}}} names no environment variable")
        if name in self._secrets:
            raise _BadReference(f"${{env:{name}}} would copy a secret into the job; a rank reads it as ${name}")
        value = os.environ.get(name)
        if has_default and not value:
            return default
        if value is None:
            raise _BadReference(
                f"the environment variable {name} is not set; set it, or write ${{env:{name}:-default}}"
            )
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _BadReference(f"the value of the environment variable {name} is not valid UTF-8") from None
        return value

    def _key(self, rest: str) -> str:
        if self._defaults is None:
            raise _BadReference(f"${{job.{rest}}} has a meaning in job files only")
        target: Any = self._document.data
        actual: list[str | int] = []
        for part in rest.split("."):
            if isinstance(target, list) and part.isdigit() and int(part) < len(target):
                actual.append(int(part))
                target = target[int(part)]
            elif isinstance(target, dict) and part in target:
                actual.append(part)
                target = target[part]
            else:
                return self._text(self._default(rest), rest)
        return self._text(target if isinstance(target, (dict, list)) else self._value(tuple(actual), target), rest)

    def _default(self, rest: str) -> Any:
        assert self._defaults is not None
        try:
            return self._defaults(tuple(rest.split(".")))
        except KeyError as error:
            raise _BadReference(f"${{job.{rest}}}: the job has no such key{error.args[0]}") from None

    def _text(self, value: Any, rest: str) -> str:
        if value is None:
            raise _BadReference(f"${{job.{rest}}} has no value")
        if not isinstance(value, (str, int, float)):
            raise _BadReference(f"${{job.{rest}}} is not one value")
        return ("true" if value else "false") if isinstance(value, bool) else str(value)

"""Docstrings of what users call: every parameter is named, and so are the result and the errors that it raises."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import orc.launchers
import orc.orchestrator
import orc.runtime
from orc.launchers.backends.base import Backend

# Their methods are those of `JobsClient`, which has the docstrings.
TWINS = {"ServiceClient", "AsyncServiceClient", "Client"}
# Beginnings without a noun, and persons in the place of programs and files.
VAGUE = re.compile(
    r"(What|Whether|How|Where)\b|.*\b(says?|said|asks?|asked|knows?|tells?|told|whoever|(some|no|any|every)body)\b"
)


def public() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes that the packages offer, by their names."""
    for package in (orc.runtime, orc.launchers, orc.orchestrator):
        for name in package.__all__:
            if callable(found := getattr(package, name)) and found.__module__.startswith("orc."):
                yield f"{package.__name__}.{name}", found
    yield "orc.launchers.backends.base.Backend", Backend


def callables() -> Iterator[tuple[str, Any, str]]:
    """Yield each public function and method, and the docstrings that describe it: its own, and of what it overrides."""
    for name, found in public():
        if not inspect.isclass(found):
            yield name, found, found.__doc__ or ""
            continue
        if (
            "__init__" in vars(found)
            and not getattr(found, "_is_protocol", False)
            and not hasattr(found, "__dataclass_fields__")
        ):
            yield name, found.__init__, f"{found.__doc__}\n{found.__init__.__doc__ or ''}"
        above = [*found.__mro__, *([orc.orchestrator.JobsClient] if found.__name__ in TWINS else [])]
        for key, value in vars(found).items():
            method = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if key[0] != "_" and inspect.isfunction(method) and method.__module__.startswith("orc."):
                yield (
                    f"{name}.{key}",
                    method,
                    "\n".join(getattr(one, key).__doc__ or "" for one in above if hasattr(one, key)),
                )


def test_docstrings_of_public_functions_name_every_parameter() -> None:
    missing = []
    for name, found, text in callables():
        parameters = [
            key for key in inspect.signature(found).parameters if key not in ("self", "cls", "args", "kwargs")
        ]
        missing += [f"{name}: {key}" for key in parameters if key[0] != "_" and not re.search(rf"\b{key}\b", text)]
    assert missing == []


def test_docstrings_of_public_functions_name_the_errors_that_they_raise() -> None:
    missing = []
    for name, found, text in callables():
        tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
        raised = {
            node.exc.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Name)
            and node.exc.func.id[0].isupper()
        }
        missing += [f"{name}: {error}" for error in sorted(raised - {"NotImplementedError"}) if error not in text]
    assert missing == []


def test_docstrings_of_public_functions_name_what_they_return() -> None:
    missing = []
    for name, found, text in callables():
        result = str(inspect.signature(found).return_annotation)
        block = "ContextManager" in result or hasattr(found, "__wrapped__")  # what it is good for is in the block
        if found.__name__ == "__init__" or block or result in ("None", "Self"):
            continue
        if not re.search(r"\b[Rr]eturns\b|(\A|[;.:]\s+)([Rr]eturn|Yield)\b", text):
            missing.append(f"{name} -> {result}")
    assert missing == []


def test_summaries_of_public_names_speak_of_programs_not_of_persons() -> None:
    found = []
    for name, one in public():
        members = {f"{name}.{key}": value for key, value in vars(one).items() if key[0] != "_"}
        for key, value in {name: one, **(members if inspect.isclass(one) else {})}.items():
            member = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            member = member.fget if isinstance(member, property) else member
            if inspect.isclass(member) or inspect.isfunction(member):
                summary = (inspect.getdoc(member) or "").partition("\n")[0]
                found += [f"{key}: {summary}"] if VAGUE.match(summary) else []
    assert found == []

"""What the ranks' Python comes from: the ``environment`` section of a job and of a cluster."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import core_schema as cs

from orc.launchers.spec import grammar
from orc.launchers.spec.grammar import LocatedError
from orc.launchers.spec.model import Model, model, setting

KINDS = ("venv", "conda", "copy", "container")
RUNTIMES = ("docker", "podman", "apptainer")

_TEXT = cs.no_info_plain_validator_function(grammar.scalar_text, json_schema_input_schema=cs.str_schema())
_TEXTS = cs.tuple_schema([_TEXT], variadic_item_index=0)
_BOOL = cs.bool_schema(strict=True)


def _optional(schema: cs.CoreSchema) -> cs.CoreSchema:
    return cs.nullable_schema(schema)


def _path(value: Any) -> str:
    """A path on the nodes (absolute), or one that travels with the job (relative to the workdir)."""
    text = grammar.scalar_text(value)
    if not text.strip():
        raise ValueError("must not be empty")
    if text.startswith("~"):
        raise ValueError(f"{text!r} is in a home directory that the nodes need not share; give an absolute path")
    normal = posixpath.normpath(text)
    if normal == ".." or normal.startswith("../"):
        raise ValueError(f"{text!r} lies outside the workdir: only the workdir travels to the nodes")
    return normal


_PATH = cs.no_info_plain_validator_function(_path, json_schema_input_schema=cs.str_schema())


def _url(value: Any) -> str:
    text = grammar.scalar_text(value).strip()
    if re.match(r"[a-z+]+://[^/@]*@", text, re.IGNORECASE):
        raise ValueError(
            "holds a user name or password; keep it in ~/.netrc on the nodes, or in secrets: [PIP_INDEX_URL]"
        )
    return text


_URL = cs.no_info_plain_validator_function(_url, json_schema_input_schema=cs.str_schema())


@model
class Venv(Model):
    """A virtual environment, built on each node from a requirements file."""

    requirements: str = setting(_PATH, doc="A requirements or lock file in the workdir.")
    python: str | None = setting(
        _optional(_TEXT), default=None, doc="A version like 3.11, or a program; the cluster's Python if not given."
    )
    system_site_packages: bool = setting(_BOOL, default=False, doc="Whether packages of that Python can be imported.")
    index_url: str | None = setting(_optional(_URL), default=None, doc="Package index instead of pip's.")
    extra_index_urls: tuple[str, ...] = setting(
        cs.tuple_schema([_URL], variadic_item_index=0), default=(), doc="Further package indexes."
    )
    find_links: tuple[str, ...] = setting(
        cs.tuple_schema([_PATH], variadic_item_index=0), default=(), doc="Directories with wheels."
    )
    no_index: bool = setting(_BOOL, default=False, doc="Use find_links alone.")

    @classmethod
    def before(cls, data: Any) -> Any:
        """``venv: requirements.txt`` is short for ``venv: {requirements: requirements.txt}``."""
        return {"requirements": data} if isinstance(data, str) else data

    def check(self) -> None:
        """The file is one that pip reads; ``no_index`` has something to look into."""
        name = posixpath.basename(self.requirements)
        if name in ("uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock"):
            tool = {"uv.lock": "uv export", "pdm.lock": "pdm export", "Pipfile.lock": "pipenv requirements --hash"}
            export = tool.get(name, "poetry export")
            what = f"pip cannot read {name}; write one that it can: {export} > requirements.lock"
            raise LocatedError((("requirements",), what))
        if self.no_index and (self.index_url or self.extra_index_urls):
            raise LocatedError((("no_index",), "no_index and an index exclude each other"))


@model
class Conda(Model):
    """A conda environment: made on each node from a file, or unpacked from an archive of conda-pack."""

    file: str | None = setting(_optional(_PATH), default=None, doc="An environment.yml in the workdir.")
    archive: str | None = setting(_optional(_PATH), default=None, doc="What conda-pack has made.")

    @classmethod
    def before(cls, data: Any) -> Any:
        """``conda: environment.yml`` is short for ``conda: {file: environment.yml}``."""
        if not isinstance(data, str):
            return data
        return {"file" if data.endswith((".yml", ".yaml")) else "archive": data}

    def check(self) -> None:
        """One of both."""
        if (self.file is None) == (self.archive is None):
            raise LocatedError(((), "give either file (environment.yml) or archive (made by conda-pack)"))
        if self.file is not None and not self.file.endswith((".yml", ".yaml")):
            raise LocatedError((("file",), f"{self.file!r} is no environment.yml; an archive goes to `archive`"))


@model
class Copy(Model):
    """The virtual environment of the submitting machine, brought along."""

    venv: str | None = setting(
        _optional(_TEXT), default=None, doc="Its directory, relative to the job file; the active one if not given."
    )
    exclude: tuple[str, ...] = setting(_TEXTS, default=(), doc="Patterns (gitignore syntax) of what stays at home.")

    @classmethod
    def before(cls, data: Any) -> Any:
        """``copy: .venv`` is short for ``copy: {venv: .venv}``."""
        return {"venv": data} if isinstance(data, str) else {} if data is None else data


@model
class Container(Model):
    """A container image that the ranks run in."""

    image: str = setting(_TEXT, doc="What the runtime calls the image: a reference, or a .sif file for apptainer.")
    runtime: str = setting(cs.literal_schema(list(RUNTIMES)), default="docker", doc="docker, podman or apptainer.")
    python: str = setting(_TEXT, default="python3", doc="The Python inside.")
    options: tuple[str, ...] = setting(_TEXTS, default=(), doc="Further options of the runtime's run command.")
    mounts: tuple[str, ...] = setting(_TEXTS, default=(), doc="/on/the/node[:/inside[:ro]], besides orc's own.")

    @classmethod
    def before(cls, data: Any) -> Any:
        """``container: image`` is short for ``container: {image: image}``."""
        return {"image": data} if isinstance(data, str) else data

    def check(self) -> None:
        """The image is one word, the mounts are absolute."""
        problems: list[tuple[grammar.Path, str]] = []
        if not self.image or self.image.startswith("-") or any(c.isspace() for c in self.image):
            problems.append((("image",), f"{self.image!r} is not the name of an image"))
        for index, mount in enumerate(self.mounts):
            parts = mount.split(":")
            good = (
                len(parts) <= 3
                and all(part.startswith("/") for part in parts[:2])
                and parts[2:] in ([], ["ro"], ["rw"])
            )
            if not good:
                problems.append((("mounts", index), f"{mount!r} is not /on/the/node, /on/the/node:/inside or ...:ro"))
        if problems:
            raise LocatedError(*problems)


@model
class Environment(Model):
    """At most one of the four; nothing at all leaves the choice to the cluster."""

    venv: Venv | None = setting(_optional(Venv.core_schema), default=None, doc="Built from requirements.", section=Venv)
    conda: Conda | None = setting(_optional(Conda.core_schema), default=None, doc="Made by conda.", section=Conda)
    copy: Copy | None = setting(_optional(Copy.core_schema), default=None, doc="Brought along.", section=Copy)
    container: Container | None = setting(
        _optional(Container.core_schema), default=None, doc="An image.", section=Container
    )
    none: bool = setting(_BOOL, default=False, doc="The cluster's Python as it is, whatever the cluster says.")

    @classmethod
    def before(cls, data: Any) -> Any:
        """``environment: none`` and ``environment: copy`` need no mapping."""
        if isinstance(data, str):
            if data == "none":
                return {"none": True}
            if data == "copy":
                return {"copy": {}}
            raise ValueError(
                f"expected none, copy, or a mapping such as {{venv: requirements.txt}} (known are {', '.join(KINDS)}), "
                f"not {data!r}"
            )
        if isinstance(data, Mapping) and "copy" in data and data["copy"] is None and len(data) == 1:
            return {"copy": {}}
        return data

    @property
    def kind(self) -> str:
        """``venv``, ``conda``, ``copy``, ``container``, ``none``, or empty when nothing is said."""
        return next((kind for kind in KINDS if getattr(self, kind) is not None), "none" if self.none else "")

    def check(self) -> None:
        """No two at once."""
        given = [kind for kind in KINDS if getattr(self, kind) is not None] + ["none"] * self.none
        for kind in given[1:]:
            raise LocatedError(((kind,), f"only one kind of environment can be given; {given[0]} is given too"))


def chosen(job: Environment, cluster: Environment) -> Environment:
    """The job's word counts; where it says nothing, the cluster's."""
    return job if job.kind else cluster

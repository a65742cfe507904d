"""Sections that a job and its cluster both have: ``environment``, the source of the ranks' Python, and ``network``, the
network between the nodes of a run. What the job says goes over what the cluster says.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from orc.launchers.oldest_python import python_problem
from orc.launchers.spec import grammar
from orc.launchers.spec.grammar import LocatedError
from orc.launchers.spec.options import Flag, FrozenModel, Text


def _interface(value: Any) -> str:
    text = grammar.scalar_text(value)
    if not re.fullmatch(r"[^\s/,=^:!]{1,15}", text):  # as the kernel takes it, without what NCCL's lists are made of
        raise ValueError(f"{text!r} is not the name of a network interface, such as eth0 or ib0")
    return text


def _cidr(value: Any) -> str:
    import ipaddress

    text = grammar.scalar_text(value).strip()
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(f"is not a network such as 10.1.0.0/16: {error}") from None


class Network(FrozenModel):
    """The network that ranks of several nodes listen on. Ranks of one node stay on its loopback interface."""

    interface: Annotated[str, BeforeValidator(_interface)] | None = Field(
        None, description="The interface that the nodes use among each other, as eth0."
    )
    cidr: Annotated[str, BeforeValidator(_cidr)] | None = Field(
        None, description="The network that every node's address must lie in, as 10.1.0.0/16."
    )


def chosen_network(job: Network, cluster: Network) -> dict[str, str]:
    """Return the ``network`` of ``agent.json``: each value of the job goes over the cluster's."""
    chosen = {name: getattr(job, name) or getattr(cluster, name) for name in ("interface", "cidr")}
    return {name: value for name, value in chosen.items() if value}


KINDS = ("venv", "conda", "copy", "container")


def _path(value: Any) -> str:
    """Return a path on the nodes (absolute), or one that travels with the job (relative to the workdir)."""
    text = grammar.scalar_text(value)
    if text.startswith("~"):
        raise ValueError(f"{text!r} is in a home directory that the nodes need not share; give an absolute path")
    return grammar.within_workdir(text)


BundledPath = Annotated[str, BeforeValidator(_path)]


def _url(value: Any) -> str:
    text = grammar.scalar_text(value).strip()
    if re.match(r"[a-z+]+://[^/@]*@", text, re.IGNORECASE):
        raise ValueError(
            "holds a user name or password; keep it in ~/.netrc on the nodes, or in secrets: [PIP_INDEX_URL]"
        )
    return text


Url = Annotated[str, BeforeValidator(_url)]


class Venv(FrozenModel):
    """A virtual environment, built on each node from a requirements file."""

    short_form = "requirements"

    requirements: BundledPath = Field(description="A requirements or lock file in the workdir.")
    python: Text | None = Field(
        None, description="A version like 3.11, or a program; the cluster's Python if not given."
    )
    system_site_packages: Flag = Field(False, description="Whether packages of that Python can be imported.")
    index_url: Url | None = Field(None, description="Package index instead of pip's.")
    extra_index_urls: tuple[Url, ...] = Field((), description="Further package indexes.")
    find_links: tuple[BundledPath, ...] = Field((), description="Directories with wheels.")
    no_index: Flag = Field(False, description="Use find_links alone.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check that pip can read the file, and that ``no_index`` leaves a source."""
        name = posixpath.basename(self.requirements)
        if name in ("uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock"):
            tool = {"uv.lock": "uv export", "pdm.lock": "pdm export", "Pipfile.lock": "pipenv requirements --hash"}
            export = tool.get(name, "poetry export")
            what = f"pip cannot read {name}; write one that it can: {export} > requirements.lock"
            raise LocatedError((("requirements",), what))
        version = [int(part) for part in (self.python or "").split(".") if part.isdigit()]
        if len(version) > 1 and ".".join(map(str, version)) == self.python and (problem := python_problem(version)):
            raise LocatedError((("python",), problem))
        if self.no_index and (self.index_url or self.extra_index_urls):
            raise LocatedError((("no_index",), "no_index and an index exclude each other"))
        return self


class Conda(FrozenModel):
    """A conda environment: made on each node from a file, or unpacked from an archive of conda-pack."""

    other_forms = ({"type": "string"},)

    file: BundledPath | None = Field(None, description="An environment.yml in the workdir.")
    archive: BundledPath | None = Field(None, description="What conda-pack has made.")

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, data: Any) -> Any:
        """Expand ``conda: environment.yml`` to ``conda: {file: environment.yml}``."""
        if not isinstance(data, str):
            return data
        return {"file" if data.endswith((".yml", ".yaml")) else "archive": data}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check that exactly one of both is given."""
        if (self.file is None) == (self.archive is None):
            raise LocatedError(((), "give either file (environment.yml) or archive (made by conda-pack)"))
        if self.file is not None and not self.file.endswith((".yml", ".yaml")):
            raise LocatedError((("file",), f"{self.file!r} is no environment.yml; an archive goes to `archive`"))
        return self


class Copy(FrozenModel):
    """The virtual environment of the submitting machine, brought along."""

    other_forms = (
        {"type": "string"},
        {"type": "null"},
    )

    venv: Text | None = Field(None, description="Its directory, relative to the job file; the active one if not given.")
    exclude: tuple[Text, ...] = Field((), description="Patterns (gitignore syntax) of what stays at home.")

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, data: Any) -> Any:
        """Expand ``copy: .venv`` to ``copy: {venv: .venv}``."""
        return {"venv": data} if isinstance(data, str) else {} if data is None else data


class Container(FrozenModel):
    """A container image that the ranks run in."""

    short_form = "image"

    image: Text = Field(description="What the runtime calls the image: a reference, or a .sif file for apptainer.")
    runtime: Literal["docker", "podman", "apptainer"] = Field("docker", description="docker, podman or apptainer.")
    python: Text = Field("python3", description="The Python inside.")
    options: tuple[Text, ...] = Field((), description="Further options of the runtime's run command.")
    mounts: tuple[Text, ...] = Field((), description="/on/the/node[:/inside[:ro]], besides orc's own.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check that the image is one word and that the mounts are absolute."""
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
        return self


class Environment(FrozenModel):
    """Environment of the ranks: at most one kind; without any the cluster's counts."""

    other_forms = ({"enum": ["none", "copy"]},)

    venv: Venv | None = Field(None, description="Built from requirements.")
    conda: Conda | None = Field(None, description="Made by conda.")
    copied: Copy | None = Field(None, alias="copy", description="Brought along.")  # `copy` is a method of every model
    container: Container | None = Field(None, description="An image.")
    none: Flag = Field(False, description="The cluster's Python as it is, whatever the cluster says.")

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, data: Any) -> Any:
        """Expand ``environment: none`` and ``environment: copy``."""
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
        """``venv``, ``conda``, ``copy``, ``container`` or ``none``; empty without a choice."""
        return next((kind for kind in KINDS if self._given(kind)), "none" if self.none else "")

    def _given(self, kind: str) -> bool:
        return getattr(self, "copied" if kind == "copy" else kind) is not None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check that at most one kind is given."""
        given = [kind for kind in KINDS if self._given(kind)] + ["none"] * self.none
        for kind in given[1:]:
            raise LocatedError(((kind,), f"only one kind of environment can be given; {given[0]} is given too"))
        return self

"""What can be said about TPUs: ``options:`` of a cluster and ``resources.options.tpu`` of a job. Checked once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import ValidationError
from pydantic_core import core_schema as cs

from orc.launchers.backends.tpu import accelerators
from orc.launchers.errors import SpecError
from orc.launchers.remote.ssh.hosts import Access
from orc.launchers.remote.ssh.options import (
    DEFAULT_ROOT,
    jump_hosts,
    maybe,
    path,
    read,
    seconds,
    several,
    user_name,
    word,
)
from orc.launchers.spec import grammar
from orc.launchers.spec.grammar import LocatedError
from orc.launchers.spec.model import Model, fields, model, setting

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.spec.source import Document, KeyPath

_DAY = 86400.0
_PROJECT = r"(?:[a-z0-9.-]{1,63}:)?[a-z][a-z0-9-]{4,28}[a-z0-9]"
_ZONE = r"[a-z]+-[a-z]+[0-9]+-[a-z]"
_NODE = r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"
_LABEL_KEY, _LABEL_VALUE = r"[a-z][-_a-z0-9]{0,62}", r"[-_a-z0-9]{0,63}"
_METADATA_KEY = r"[A-Za-z0-9_-]{1,128}"
LABEL_PREFIX = "orc-"  # of labels that are ours
_OURS = ("ssh-keys", "startup-script")  # metadata with an option of its own
_METADATA_BYTES = 256 * 1024  # of one value; the service's limit


def _matching(pattern: str, what: str, example: str) -> cs.CoreSchema:
    def check(value: Any) -> str:
        text = grammar.scalar_text(value).strip()
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} is not {what}; write for example {example}")
        return text

    return read(check)


def _labels(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("expected a mapping such as {team: vision}")
    found: dict[str, str] = {}
    problems = []
    for key, given in value.items():
        text = grammar.scalar_text(given)
        if not re.fullmatch(_LABEL_KEY, str(key)) or not re.fullmatch(_LABEL_VALUE, text):
            problems.append(((key,), "labels are lower-case letters, digits, - and _, 63 at most; keys begin with one"))
        elif str(key).startswith(LABEL_PREFIX):
            problems.append(((key,), f"labels that begin with {LABEL_PREFIX} are orc's own"))
        found[str(key)] = text
    if problems:
        raise LocatedError(*problems)
    return found


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("expected a mapping such as {serial-port-logging-enable: 'TRUE'}")
    found: dict[str, str] = {}
    for key, given in value.items():
        if key in _OURS:
            raise LocatedError(((key,), f"use the option {'ssh_key' if key == 'ssh-keys' else 'startup_script'}"))
        if not re.fullmatch(_METADATA_KEY, str(key)):
            raise LocatedError(((key,), "keys of metadata are letters, digits, - and _, 128 at most"))
        found[str(key)] = _text(given)
    return found


def _text(value: Any) -> str:
    text = grammar.scalar_text(value)
    if len(text.encode()) > _METADATA_BYTES:
        raise ValueError(f"{len(text.encode())} bytes are more than the {_METADATA_BYTES} that a value may have")
    return text


def _endpoint(value: Any) -> str:
    text = grammar.scalar_text(value).strip()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]{1,5})?", text):
        raise ValueError(f"{text!r} is not an endpoint; write host or host:port")
    return text


@model
class Disk(Model):
    """A disk that exists and is attached to the TPU."""

    source: str = setting(
        _matching(r"projects/[^/\s]+/(?:zones|regions)/[^/\s]+/disks/[^/\s]+", "a disk", "projects/P/zones/Z/disks/D"),
        doc="Its full name.",
    )
    mode: str = setting(cs.literal_schema(["read_write", "read_only"]), default="read_only", doc="How it is attached.")

    @classmethod
    def before(cls, data: Any) -> Any:
        """A text is short for ``{source: text}``."""
        return {"source": data} if isinstance(data, str) else data


@model
class ServiceAccount(Model):
    """Who the worker machines are, towards Google Cloud."""

    email: str = setting(_matching(r"[^@\s]+@[^@\s]+", "an address", "me@p.iam.gserviceaccount.com"), doc="Its name.")
    scopes: tuple[str, ...] = setting(
        several(read(word)), default=("https://www.googleapis.com/auth/cloud-platform",), doc="What it may ask for."
    )

    @classmethod
    def before(cls, data: Any) -> Any:
        """A text is short for ``{email: text}``."""
        return {"email": data} if isinstance(data, str) else data


_FLAG = cs.bool_schema(strict=True)
_ZONES = several(_matching(_ZONE, "a zone", "us-central2-b"))
_TYPE = read(lambda value: accelerators.check(grammar.scalar_text(value)))
_NAME = _matching(_NODE, "the name of a TPU", "my-tpu")
_RESERVATION = _matching(
    r"projects/[^/\s]+/locations/[^/\s]+/reservations/[^/\s]+", "a reservation", "projects/P/locations/Z/reservations/R"
)
_FINISH = cs.literal_schema(["delete", "keep", "idle"])


@model
class Options(Model):
    """``options:`` of a cluster of kind tpu."""

    project: str = setting(_matching(_PROJECT, "a project id", "my-project-1234"), doc="The Google Cloud project.")
    zones: tuple[str, ...] = setting(_ZONES, doc="Where to look for capacity, in this order.")
    accelerator_type: str = setting(_TYPE, doc="v4-16, or v4: then resources.nodes gives the size.")
    runtime_version: str = setting(
        _matching(r"[a-z0-9][a-z0-9.-]*", "a runtime version", "tpu-ubuntu2204-base"),
        default="tpu-ubuntu2204-base",
        doc="The software on the worker machines.",
    )
    name: str | None = setting(maybe(_NAME), default=None, doc="A TPU that exists and is used as it is, never deleted.")
    queued: bool = setting(_FLAG, default=True, doc="Ask with a queued resource; false: create the node at once.")
    spot: bool = setting(_FLAG, default=False, doc="Capacity that may be taken away.")
    reserved: bool = setting(_FLAG, default=False, doc="From the project's reservation.")
    reservation: str | None = setting(maybe(_RESERVATION), default=None, doc="Name of the reservation, in full.")
    valid_until: float | None = setting(
        maybe(seconds(60, 30 * _DAY)),
        default=None,
        doc="How long a request waits in one zone before the next is tried.",
    )
    network: str | None = setting(maybe(read(word)), default=None, doc="VPC network.")
    subnetwork: str | None = setting(maybe(read(word)), default=None, doc="VPC subnetwork.")
    external_ips: bool = setting(_FLAG, default=True, doc="Whether the workers get external addresses.")
    internal: bool = setting(_FLAG, default=False, doc="Log in by internal addresses although there are external ones.")
    tags: tuple[str, ...] = setting(several(read(word)), default=(), doc="Network tags.")
    labels: Mapping[str, str] = setting(read(_labels), default_factory=dict, doc="Labels of the TPU.")
    metadata: Mapping[str, str] = setting(read(_metadata), default_factory=dict, doc="Metadata of the workers.")
    startup_script: str | None = setting(maybe(read(_text)), default=None, doc="Text that each worker runs at boot.")
    data_disks: tuple[Disk, ...] = setting(
        cs.tuple_schema([Disk.core_schema], variadic_item_index=0), default=(), doc="Disks to attach."
    )
    service_account: ServiceAccount | None = setting(
        maybe(ServiceAccount.core_schema),
        default=None,
        doc="Identity of the workers; the project's default unless given.",
    )
    on_finish: str = setting(_FINISH, default="delete", doc="What becomes of the TPU after the attempt.")
    idle_timeout: float = setting(seconds(60, 30 * _DAY), default=1800.0, doc="For on_finish: idle.")
    provision_timeout: float = setting(
        seconds(1, 7 * _DAY), default=1800.0, doc="A TPU that is still being created after this is given up."
    )
    boot_timeout: float = setting(
        seconds(1, _DAY), default=900.0, doc="Workers nobody can log in to this long after creation are given up."
    )
    delete_timeout: float = setting(
        seconds(1, _DAY), default=900.0, doc="How long the end of a job waits for a deletion that does not work."
    )
    os_login: bool = setting(_FLAG, default=False, doc="Log in with OS Login instead of keys in the metadata.")
    ssh_key: str | None = setting(
        maybe(read(path)), default=None, doc="Private key to log in with; its .pub goes to the workers."
    )
    user: str | None = setting(maybe(read(user_name)), default=None, doc="Who logs in.")
    port: int = setting(cs.int_schema(ge=1, le=65535, strict=True), default=22, doc="sshd's port on the workers.")
    via: str | None = setting(maybe(read(jump_hosts)), default=None, doc="Jump host, [user@]host[:port].")
    ssh_config: str | None = setting(maybe(read(path)), default=None, doc="Instead of the user's ~/.ssh/config.")
    connect_timeout: float = setting(seconds(0.1, 600), default=10.0, doc="Seconds until a worker counts as silent.")
    peer_timeout: float = setting(seconds(2, 3600), default=30.0, doc="Silence after which a worker is lost.")
    endpoint: str | None = setting(maybe(read(_endpoint)), default=None, doc="Another address of the TPU API.")
    insecure: bool = setting(_FLAG, default=False, doc="Without TLS and credentials; for an endpoint in tests.")

    def check(self) -> None:
        """What contradicts itself."""
        wrong: list[tuple[tuple[str, ...], str]] = []
        if self.insecure and self.endpoint is None:
            wrong.append((("insecure",), "only for an `endpoint` of your own; Google's is never asked without TLS"))
        if self.spot and (self.reserved or self.reservation):
            wrong.append((("spot",), "a TPU is spot or reserved, not both"))
        if self.os_login and self.ssh_key:
            wrong.append(
                (("os_login",), "with OS Login no key goes to the workers; remove `ssh_key` or set IdentityFile")
            )
        if not self.queued and (self.valid_until is not None or self.reservation is not None):
            key = "valid_until" if self.valid_until is not None else "reservation"
            wrong.append(((key,), "only queued resources have this; remove `queued: false`"))
        if not self.external_ips and self.internal:
            wrong.append((("internal",), "there are no other addresses with `external_ips: false`; remove it"))
        if self.ssh_key and "%" in self.ssh_key:
            wrong.append((("ssh_key",), "ssh gives % in a path a meaning of its own; move the key"))
        there = self.reservation.split("/")[3] if self.reservation else None
        if there and self.zones != (there,):
            wrong.append((("reservation",), f"it is in {there}, not in {', '.join(self.zones)}; name its zone alone"))
        if len(set(self.zones)) != len(self.zones) or not self.zones:
            wrong.append((("zones",), "a zone is listed twice" if self.zones else "name at least one zone"))
        if wrong:
            raise LocatedError(*wrong)


# What a job may decide for itself.
JOB_KEYS = (
    *("zones", "accelerator_type", "runtime_version", "queued", "spot", "reserved", "reservation"),
    *("valid_until", "labels", "startup_script", "data_disks", "on_finish", "idle_timeout"),
)


@dataclass(frozen=True)
class Settings:
    """A cluster of kind tpu."""

    options: Options
    root: str  # of orc's files on the workers; may begin with ~
    python: str | None
    public_key: str | None  # the text of ssh_key's .pub

    @property
    def access(self) -> Access:
        """How workers are reached, but for their keys."""
        return Access("strict", self.options.ssh_config, self.options.connect_timeout)


def read_settings(cluster: Cluster) -> Settings:
    """The settings of *cluster*. Raises `SpecError` that lists every mistake with its place."""
    from orc.launchers.spec.clusters import options_document

    document = options_document(cluster)
    options = _validate(cluster.options, document, [field.name for field in fields(Options)])
    root = (cluster.root or DEFAULT_ROOT).rstrip("/") or "/"
    if not root.startswith(("/", "~/")):
        raise SpecError(f"root: {root!r} is neither absolute nor below the home directory", where=cluster.name)
    return Settings(options, root, cluster.python, _public_key(options, document))


def for_job(job: JobSpec, settings: Settings) -> Options:
    """The cluster's options with what the job says over them. Raises `SpecError`."""
    from orc.launchers.spec.source import document_of

    document = document_of(job.resources.options.get("tpu", {}), f"{job.name}: resources.options.tpu")
    for key in document.data:
        if key not in JOB_KEYS:
            from orc.launchers.spec.problems import choose

            known = [field.name for field in fields(Options)]
            what = "is for the cluster to say" if key in known else f"unknown option{choose(key, JOB_KEYS)}"
            raise SpecError(f"{key}: {what}", where=document.origin((key,), key=True).where)
    if not document.data:
        return settings.options
    given = settings.options.model_dump()
    labels = {"labels": {**given["labels"], **document.data["labels"]}} if _is_map(document.data.get("labels")) else {}
    options = _validate({**given, **document.data, **labels}, document, JOB_KEYS)
    for zone in options.zones:
        if zone not in settings.options.zones:  # passes and sweeps look in the cluster's zones alone
            what = f"zones: {zone} is none of the cluster's; they are {', '.join(settings.options.zones)}"
            raise SpecError(what, where=document.origin(("zones",)).where)
    return options


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _validate(data: Mapping[str, Any], document: Document, known: Any) -> Options:
    try:
        return Options.model_validate(dict(data))
    except ValidationError as error:
        from orc.launchers.spec.problems import SpecProblems, choose, translate

        def suggest(path: KeyPath, name: str) -> str:
            inner = {"data_disks": Disk, "service_account": ServiceAccount}.get(str(path[0])) if path else None
            return choose(name, [field.name for field in fields(inner)] if inner else known)

        raise SpecProblems(translate(error, document, suggest)) from None


def _public_key(options: Options, document: Document) -> str | None:
    """The key that goes into the workers' metadata. Raises `SpecError` when it cannot be read."""
    if options.ssh_key is None:
        return None
    file = Path(os.path.expanduser(options.ssh_key) + ".pub")  # noqa: PTH111 - a text
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"ssh_key: its public half {file} cannot be read: {getattr(error, 'strerror', None) or error}",
            where=document.origin(("ssh_key",)).where,
            hint=f"Make one: ssh-keygen -t ed25519 -f {options.ssh_key}",
        ) from None
    if not re.fullmatch(r"(?:ssh|ecdsa|sk)-\S+ [A-Za-z0-9+/=]+(?: [^\n]*)?", text):
        raise SpecError(f"ssh_key: {file} does not hold a public key", where=document.origin(("ssh_key",)).where)
    if options.user is None:
        raise SpecError(
            "ssh_key: the key has to be somebody's on the workers",
            where=document.origin(("ssh_key",)).where,
            hint="Set `user:` to the name that logs in.",
        )
    return text

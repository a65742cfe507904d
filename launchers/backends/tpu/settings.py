"""Options of TPUs: ``options:`` of a cluster and ``resources.options.tpu`` of a job. Checked once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from orc.launchers.backends.tpu import accelerators
from orc.launchers.errors import SpecError
from orc.launchers.remote.ssh.options import DEFAULT_ROOT, JumpHosts, UserName, refuse_home
from orc.launchers.remote.ssh.routes import ConnectOptions
from orc.launchers.spec import grammar
from orc.launchers.spec.grammar import LocatedError
from orc.launchers.spec.options import (
    Argument,
    Flag,
    FrozenModel,
    Number,
    PathText,
    Port,
    Reader,
    matching,
    seconds,
    several,
    validate_options,
)

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.spec.source import Document

_DAY = 86400.0
_PROJECT = r"(?:[a-z0-9.-]{1,63}:)?[a-z][a-z0-9-]{4,28}[a-z0-9]"
_ZONE = r"[a-z]+-[a-z]+[0-9]+-[a-z]"
_NODE = r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"
_LABEL_KEY, _LABEL_VALUE = r"[a-z][-_a-z0-9]{0,62}", r"[-_a-z0-9]{0,63}"
_METADATA_KEY = r"[A-Za-z0-9_-]{1,128}"
LABEL_PREFIX = "orc-"  # of labels that are ours
_OURS = ("ssh-keys", "startup-script")  # metadata with an option of its own
_METADATA_BYTES = 256 * 1024  # of one value; the service's limit


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


def _accelerator(value: Any) -> str:
    return accelerators.check(grammar.scalar_text(value))


Zone = Annotated[str, matching(_ZONE, "a zone", "us-central2-b")]
Reservation = Annotated[
    str,
    matching(
        r"projects/[^/\s]+/locations/[^/\s]+/reservations/[^/\s]+",
        "a reservation",
        "projects/P/locations/Z/reservations/R",
    ),
]


class Disk(FrozenModel):
    """A disk that exists and is attached to the TPU."""

    short_form = "source"

    source: Annotated[
        str,
        matching(r"projects/[^/\s]+/(?:zones|regions)/[^/\s]+/disks/[^/\s]+", "a disk", "projects/P/zones/Z/disks/D"),
    ] = Field(description="Its full name.")
    mode: Literal["read_write", "read_only"] = Field("read_only", description="How it is attached.")


class ServiceAccount(FrozenModel):
    """Identity of the worker machines at Google Cloud."""

    short_form = "email"

    email: Annotated[str, matching(r"[^@\s]+@[^@\s]+", "an address", "me@p.iam.gserviceaccount.com")] = Field(
        description="Its name."
    )
    scopes: Annotated[tuple[Argument, ...], several] = Field(
        ("https://www.googleapis.com/auth/cloud-platform",), description="What it may ask for."
    )


class JobOptions(FrozenModel):
    """Options that a job has, over those of its cluster: ``resources.options.tpu``."""

    zones: Annotated[tuple[Zone, ...], several] = Field(description="Where to look for capacity, in this order.")
    accelerator_type: Annotated[str, Reader(_accelerator, str)] = Field(
        description="v4-16, or v4: then resources.nodes gives the size."
    )
    runtime_version: Annotated[str, matching(r"[a-z0-9][a-z0-9.-]*", "a runtime version", "tpu-ubuntu2204-base")] = (
        Field("tpu-ubuntu2204-base", description="The software on the worker machines.")
    )
    queued: Flag = Field(True, description="Ask with a queued resource; false: create the node at once.")
    spot: Flag = Field(False, description="Capacity that may be taken away.")
    reserved: Flag = Field(False, description="From the project's reservation.")
    reservation: Reservation | None = Field(None, description="Name of the reservation, in full.")
    valid_until: Annotated[Number, seconds(60, 30 * _DAY)] | None = Field(
        None, description="How long a request waits in one zone before the next is tried."
    )
    labels: Annotated[dict[str, str], Reader(_labels)] = Field({}, description="Labels of the TPU.")
    startup_script: Annotated[str, Reader(_text, str)] | None = Field(
        None, description="Text that each worker runs at boot."
    )
    data_disks: Annotated[tuple[Disk, ...], several] = Field((), description="Disks to attach.")
    on_finish: Literal["delete", "keep", "idle"] = Field(
        "delete", description="What becomes of the TPU after the attempt."
    )
    idle_timeout: Annotated[Number, seconds(60, 30 * _DAY)] = Field(1800.0, description="For on_finish: idle.")


class Options(JobOptions):
    """``options:`` of a cluster of kind tpu."""

    project: Annotated[str, matching(_PROJECT, "a project id", "my-project-1234")] = Field(
        description="The Google Cloud project."
    )
    name: Annotated[str, matching(_NODE, "the name of a TPU", "my-tpu")] | None = Field(
        None, description="A TPU that exists and is used as it is, never deleted."
    )
    network: Argument | None = Field(None, description="VPC network.")
    subnetwork: Argument | None = Field(None, description="VPC subnetwork.")
    external_ips: Flag = Field(True, description="Whether the workers get external addresses.")
    internal: Flag = Field(False, description="Log in by internal addresses although there are external ones.")
    tags: Annotated[tuple[Argument, ...], several] = Field((), description="Network tags.")
    metadata: Annotated[dict[str, str], Reader(_metadata)] = Field({}, description="Metadata of the workers.")
    service_account: ServiceAccount | None = Field(
        None, description="Identity of the workers; the project's default unless given."
    )
    provision_timeout: Annotated[Number, seconds(1, 7 * _DAY)] = Field(
        1800.0, description="A TPU that is still being created after this is given up."
    )
    boot_timeout: Annotated[Number, seconds(1, _DAY)] = Field(
        900.0, description="Workers that refuse logins this long after creation are given up."
    )
    delete_timeout: Annotated[Number, seconds(1, _DAY)] = Field(
        900.0, description="How long the end of a job waits for a deletion that does not work."
    )
    os_login: Flag = Field(False, description="Log in with OS Login instead of keys in the metadata.")
    ssh_key: PathText | None = Field(None, description="Private key to log in with; its .pub goes to the workers.")
    user: UserName | None = Field(None, description="Who logs in.")
    sudo: Flag = Field(False, description="Run everything on the workers as root, with sudo.")
    port: Port = Field(22, description="sshd's port on the workers.")
    via: JumpHosts | None = Field(None, description="Jump host, [user@]host[:port].")
    ssh_config: PathText | None = Field(None, description="Instead of the user's ~/.ssh/config.")
    connect_timeout: Annotated[Number, seconds(0.1, 600)] = Field(
        10.0, description="Seconds until a worker counts as silent."
    )
    peer_timeout: Annotated[Number, seconds(2, 3600)] = Field(30.0, description="Silence after which a worker is lost.")
    endpoint: (
        Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]{1,5})?", "an endpoint", "host or host:port")]
        | None
    ) = Field(None, description="Another address of the TPU API.")
    insecure: Flag = Field(False, description="Without TLS and credentials; for an endpoint in tests.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
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
        return self


JOB_KEYS = tuple(JobOptions.model_fields)  # what a job may decide for itself


@dataclass(frozen=True)
class Settings:
    """Settings of a cluster of kind tpu."""

    options: Options
    root: str  # of orc's files on the workers; may begin with ~
    python: str | None
    public_key: str | None  # the text of ssh_key's .pub

    @property
    def access(self) -> ConnectOptions:
        """Access to the workers, but for their keys."""
        return ConnectOptions("strict", self.options.ssh_config, self.options.connect_timeout)


def read_settings(cluster: Cluster) -> Settings:
    """Return the settings of *cluster*. Raises `SpecError` that lists every mistake with its place."""
    from orc.launchers.spec.clusters import options_document

    document = options_document(cluster)
    options = validate_options(Options, cluster.options, document.where)
    root = (cluster.root or DEFAULT_ROOT).rstrip("/") or "/"
    refuse_home(cluster.python, options.sudo, cluster.name)
    if not root.startswith(("/", "~/")):
        raise SpecError(f"root: {root!r} is neither absolute nor below the home directory", where=cluster.name)
    return Settings(options, root, cluster.python, _public_key(options, document))


def for_job(job: JobSpec, settings: Settings) -> Options:
    """Return the cluster's options with the job's own over them. Raises `SpecError`."""
    from orc.launchers.spec.source import Placed, document_of

    document = document_of(job.resources.options.get("tpu", {}), f"{job.name}: resources.options.tpu")
    for key in document.data:
        if key not in JOB_KEYS:
            from orc.launchers.spec.problems import choose

            what = (
                "is for the cluster to say" if key in Options.model_fields else f"unknown option{choose(key, JOB_KEYS)}"
            )
            raise SpecError(f"{key}: {what}", where=document.origin((key,), key=True).where)
    if not document.data:
        return settings.options
    given = {**dict(settings.options), **document.data}
    if isinstance(labels := document.data.get("labels"), Mapping):
        given["labels"] = {**settings.options.labels, **labels}
    options = validate_options(Options, Placed(given, document, ()), document.where)
    for zone in options.zones:
        if zone not in settings.options.zones:  # passes and sweeps look in the cluster's zones alone
            what = f"zones: {zone} is none of the cluster's; they are {', '.join(settings.options.zones)}"
            raise SpecError(what, where=document.origin(("zones",)).where)
    return options


def _public_key(options: Options, document: Document) -> str | None:
    """Return the key that goes into the workers' metadata. Raises `SpecError` when it cannot be read."""
    if options.ssh_key is None:
        return None
    file = Path(os.path.expanduser(options.ssh_key) + ".pub")  # noqa: PTH111 - a text
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        what = f"ssh_key: its public half {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        hint = f"Make one: ssh-keygen -t ed25519 -f {options.ssh_key}"
        raise SpecError(what, where=document.origin(("ssh_key",)).where, hint=hint) from None
    if not re.fullmatch(r"(?:ssh|ecdsa|sk)-\S+ [A-Za-z0-9+/=]+(?: [^\n]*)?", text):
        raise SpecError(f"ssh_key: {file} does not hold a public key", where=document.origin(("ssh_key",)).where)
    if options.user is None:
        what = "ssh_key: the key belongs to a user of the workers, and none is named"
        hint = "Set `user:` to the name that logs in."
        raise SpecError(what, where=document.origin(("ssh_key",)).where, hint=hint)
    return text

"""Named clusters from ``clusters.yaml``, and the built-in ``local``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
)

from orc.launchers.errors import SpecError
from orc.launchers.paths import clusters_file
from orc.launchers.plugins import BACKENDS
from orc.launchers.spec import source
from orc.launchers.spec.environment import Environment, Network
from orc.launchers.spec.grammar import LocatedError
from orc.launchers.spec.options import Duration, FrozenModel, Line, Name, Number, ShellLines, Variables, Whole
from orc.launchers.spec.source import Document, KeyPath, Reading

if TYPE_CHECKING:
    from orc.launchers.spec.job import JobSpec

LOCAL = "local"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.@\\+-]{0,127}"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"


def _absolute(root: str) -> str:
    if not root.startswith(("/", "~")):
        raise ValueError(f"{root!r} is not an absolute path")
    return root


Root = Annotated[Line, AfterValidator(_absolute)]


def _login_name(user: str) -> str:
    if not re.fullmatch(_USER, user):
        raise ValueError(f"{user!r} is not the name of a user")
    return user


def _said(error: Any) -> str:
    """Return pydantic's error about a part of an account, in the words of the other errors."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden":
        return "an account has user, root and options"
    return str(error["msg"]).lower()


def _run_as(given: Any) -> Any:
    if isinstance(given, dict):
        # By itself, because the complaints of a union name every form that it might have had.
        try:
            return TypeAdapter(dict[str, Account]).validate_python(given)
        except ValidationError as error:
            raise LocatedError(*[(one["loc"], _said(one)) for one in error.errors(include_url=False)]) from None
    if given is None or given == "service":
        return given
    raise ValueError(f"expected `service` or a mapping of users to their accounts, not {given!r}")


class Limits(FrozenModel):
    """Limits of what orc has at a cluster at one time; further jobs wait in the ledger."""

    max_jobs: Annotated[Whole, Field(ge=1)] | None = Field(None, description="Jobs of all users.")
    max_jobs_per_user: Annotated[Whole, Field(ge=1)] | None = Field(None, description="Jobs of one user.")
    max_gpus: Annotated[Whole, Field(ge=0)] | None = Field(None, description="GPUs of all jobs.")
    max_gpus_per_user: Annotated[Whole, Field(ge=0)] | None = Field(None, description="GPUs of the jobs of one user.")


class Prices(FrozenModel):
    """Prices of a cluster, for `orc cost`. What is not given is unknown, not free."""

    node_hour: Annotated[Number, Field(ge=0)] | None = Field(None, description="Of one node for one hour.")
    gpu_hour: Annotated[Number, Field(ge=0)] | None = Field(None, description="Of one GPU, beside its node.")
    instance_hour: dict[str, Annotated[Number, Field(ge=0)]] = Field(
        {}, description="Of one machine by its type, in place of both."
    )
    currency: Name = Field("USD", description="Their currency.")


class Account(FrozenModel):
    """Account of a user on a cluster. ``name`` alone is short for ``{user: name}``."""

    short_form = "user"

    user: Annotated[str, AfterValidator(_login_name)] = Field(description="Name that the user's jobs log in with.")
    root: Root | None = Field(None, description="Absolute path of orc's files there, unless it is the cluster's.")
    options: dict[str, Any] = Field({}, description="Settings of the kind, over the cluster's.")


class Cluster(FrozenModel):
    """A place where jobs can run. Without `root` its backend has a default."""

    name: str = Field(pattern=f"^{_NAME}$", description="Its name.")
    kind: Name = Field(description="The backend: local, slurm, ssh, kubernetes, sagemaker, tpu, or that of a package.")
    root: Root | None = Field(None, description="Absolute path of orc's files there.")
    python: Line | None = Field(None, description="The Python that runs agents and ranks.")
    env: Variables = Field({}, description="Environment of every rank; the job's goes over it.")
    setup: ShellLines = Field((), description="Shell lines on every node, before the job's own.")
    environment: Environment = Field(
        default_factory=Environment.model_construct, description="Where Python comes from, unless the job says so."
    )
    network: Network = Field(
        default_factory=Network.model_construct, description="Which network its nodes use, unless the job says so."
    )
    run_as: Annotated[Literal["service"] | dict[str, Account] | None, BeforeValidator(_run_as)] = Field(
        None,
        description="With `orc serve`: `service`, everybody's jobs run as the service's account, or that of each user.",
    )
    limits: Limits = Field(default_factory=Limits.model_construct, description="What orc has there at one time.")
    lost_after: Duration | None = Field(
        None, description="For how long an attempt that is gone without a record may come back before it is LOST."
    )
    prices: Prices | None = Field(None, description="What its hours cost.")
    options: dict[str, Any] = Field({}, description="Settings of the kind.")

    _login: str | None = PrivateAttr(None)

    @property
    def login(self) -> str | None:
        """Name to log in with on all of its machines, whatever else is configured; `None` for what is configured."""
        return self._login

    def of_account(self, account: Account) -> Cluster:
        """Return the cluster as *account* has it."""
        changes: dict[str, Any] = {"run_as": None, "root": account.root or self.root}
        if account.options:
            changes["options"] = {**self.options, **account.options}
        made = self.model_copy(update=changes)
        made._login = account.user
        return made

    def at_root(self, root: str | None) -> Cluster:
        """Return the cluster with orc's files below *root*; `None` is where its kind has them."""
        made = self.model_copy(update={"root": root})
        made._login = self._login
        return made


def environment_of(job: JobSpec, cluster: Cluster) -> Environment:
    """Return the job's environment, or the cluster's where the job chooses none."""
    return job.environment if job.environment.kind else cluster.environment


def options_document(cluster: Cluster) -> Document:
    """Return the options of *cluster* with their places in the clusters file, as far as it was read from one."""
    return source.document_of(cluster.options, f"cluster {cluster.name}: options")


def builtin_local() -> Cluster:
    """Return the cluster that needs no configuration: this machine."""
    return Cluster.model_construct(name=LOCAL, kind=LOCAL)  # needs no validator: start-up time


def load_clusters(path: Path | None = None) -> dict[str, Cluster]:
    """Return all clusters by name, ``local`` first, then in the order of the file.

    Without *path* it is `clusters_file`, which need not exist unless ``ORC_CLUSTERS`` names it. Raises `SpecError`.
    """
    file = clusters_file() if path is None else path
    if path is None and not os.environ.get("ORC_CLUSTERS") and not os.path.lexists(file):
        return {LOCAL: builtin_local()}
    return {LOCAL: builtin_local(), **_clusters(_document(file))}


def _document(file: Path) -> Document:
    return source.read_settings(file, "clusters file", _reading)


def read_clusters(path: Path | None = None) -> tuple[dict[str, Cluster], dict[str, SpecError]]:
    """Return the clusters of `load_clusters`, and by name the error of each entry that is wrong by itself.

    Raises `SpecError` for a file that cannot be read as a whole.
    """
    try:
        return load_clusters(path), {}
    except SpecError:  # of one entry, or of the file: then reading it raises that once more
        file = clusters_file() if path is None else path
        whole = _document(file)
    found: dict[str, Cluster] = {LOCAL: builtin_local()}
    wrong: dict[str, SpecError] = {}
    for name, entry in whole.data.items():
        try:
            found |= _clusters(Document({name: entry}, whole.where, whole.keys, whole.values))
        except SpecError as error:
            wrong[name] = error
    return found, wrong


def get_cluster(name: str, path: Path | None = None) -> Cluster:
    """Return the cluster called *name*, whatever is wrong with others. Raises `SpecError` that lists the known ones."""
    clusters, wrong = read_clusters(path)
    if name in clusters and name not in wrong:
        return clusters[name]
    if name in wrong:
        raise wrong[name]
    from orc.launchers.spec.problems import nearest

    file = clusters_file() if path is None else path
    raise SpecError(
        f"unknown cluster {name!r}{nearest(name, clusters)}",
        hint=f"known clusters: {', '.join(sorted(clusters))}; define others in {file}",
    )


def _clusters(document: Document) -> dict[str, Cluster]:
    """Return the clusters of a file. Raises `SpecProblems`."""
    from orc.launchers.spec.interpolation import Interpolation
    from orc.launchers.spec.problems import SpecProblems, at, choose, translate

    problems = Interpolation(document, (), _reading, None).run() if document.has_references() else []
    entries: dict[str, Any] = {}
    for name, data in document.data.items():
        if what := _refuse(name, data):
            problems.append(at(document, (name,), what, key=True))
        else:
            entries[name] = {"name": name, "kind": LOCAL, **data} if name == LOCAL else {"name": name, **data}
    clusters: dict[str, Cluster] = {}
    try:
        clusters = TypeAdapter(dict[str, Cluster]).validate_python(entries)
    except ValidationError as error:
        problems += translate(error, document, _suggest)
    for cluster in clusters.values():
        if not BACKENDS.has(cluster.kind):
            what = f"unknown kind {cluster.kind!r}{choose(cluster.kind, BACKENDS.kinds())}"
            problems.append(at(document, (cluster.name, "kind"), what))
    if problems:
        raise SpecProblems(problems)
    for cluster in clusters.values():
        cluster.__dict__["options"] = source.Placed(cluster.options, document, (cluster.name, "options"))
    return clusters


def _refuse(name: str, data: Any) -> str:
    """Return the fault of an entry that is no cluster at all; empty for others."""
    if not re.fullmatch(_NAME, name):
        return "a cluster's name is made of letters, digits, dots, dashes and underscores, 63 at most"
    if not isinstance(data, dict):
        return "expected a mapping such as {kind: slurm, root: /shared/orc}"
    if "name" in data:
        return "a cluster's name is its key; remove `name`"
    if name == LOCAL and data.get("kind", LOCAL) != LOCAL:
        return "the cluster local is built in and stays of kind local; choose another name"
    return ""


def _suggest(path: KeyPath, name: str) -> str:
    """Return the suggestion for the unknown key *name*. Sections of a cluster are those of a job."""
    from orc.launchers.spec.load import known_keys
    from orc.launchers.spec.problems import choose

    return choose(name, known_keys(path[1:]) if path[1:] else _KEYS)


def _reading(path: KeyPath) -> Reading:
    textual = len(path) > 1 and path[1] in ("kind", "root", "python", "env", "setup")
    return "text" if textual or path[1:4] == ("environment", "venv", "python") else "typed"


_KEYS = [name for name in Cluster.model_fields if name != "name"]

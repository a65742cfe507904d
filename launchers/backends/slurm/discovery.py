"""Discovery of a Slurm cluster: its first entry for clusters.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.base import DiscoveredCluster, PartitionReport
from orc.launchers.backends.slurm.options import read_settings
from orc.launchers.errors import BackendError, LaunchError, SpecError
from orc.launchers.findings import Finding
from orc.launchers.spec.grammar import clock

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.client import SlurmClient
    from orc.launchers.remote.transport import Transport

# Who we are there, and the first Python that has torch, else the first that can run agents.
_PROBE = """\
id -un
for look in 'import importlib.util as u; sys.exit(not u.find_spec("torch"))' ''; do
    for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9; do
        "$python" -c "import sys; sys.version_info < (3, 9) and sys.exit(1)
$look" 2>/dev/null && command -v "$python" && echo "${look:+torch}" && exit
    done
done
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class ClusterFacts:
    """Facts about a cluster, as its own commands report them."""

    cluster: str
    version: str
    accounting: bool
    partitions: tuple[PartitionReport, ...]
    account: str = ""  # the default one
    accounts: tuple[str, ...] = ()
    python: str = ""  # the first one, 3.9 or newer, where the cluster is entered; one with torch if there is any
    torch: bool = True  # it has torch


def discover(options: Mapping[str, Any]) -> ClusterFacts:
    """Return the facts about the cluster that *options* (those of clusters.yaml) lead to. Raises `LaunchError`."""
    from orc.launchers.backends.slurm.client import SlurmClient
    from orc.launchers.backends.slurm.login import open_transport
    from orc.launchers.spec.clusters import Cluster

    settings = read_settings(options, where="options")
    transport = open_transport(Cluster(name="new", kind="slurm"), settings)
    try:
        return _ask(SlurmClient(transport, settings), transport)
    finally:
        transport.close()


def describe(options: Mapping[str, Any], name: str | None) -> DiscoveredCluster:
    """Return an entry for the cluster that *options* lead to, called *name* or by its own name."""
    facts = discover(options)
    called = name or entry_name(facts)
    text = entry(called, facts, options)
    if facts.python and facts.torch:
        return DiscoveredCluster(called, text, asdict(facts))
    lacking = f"{facts.python} has no torch" if facts.python else "no Python 3.9 or newer was found"
    do = f"change `python:` of {called} to one that the nodes have; `orc clusters check {called}` looks at it"
    warning = Finding("warning", lacking, "where the cluster is entered", do)
    return DiscoveredCluster(called, text, asdict(facts), (warning,))


def _ask(client: SlurmClient, transport: Transport) -> ClusterFacts:
    version = client.version()
    config = client.config()
    user, python, torch, *_ = [*transport.run(("/bin/sh", "-c", _PROBE), timeout_s=60).stdout.split("\n"), "", "", ""]
    accounting = config.get("AccountingStorageType", "").rpartition("/")[2] not in ("", "none", "(null)")
    account, accounts = client.accounts(user) if accounting else ("", ())
    return ClusterFacts(
        cluster=config.get("ClusterName", ""),
        version=version,
        accounting=accounting,
        partitions=tuple(client.partitions()),
        account=account,
        accounts=accounts,
        python=python,
        torch=torch == "torch",
    )


def entry_name(facts: ClusterFacts) -> str:
    """Return the cluster's own name, if it can be one in clusters.yaml, else ``slurm``."""
    return facts.cluster if _NAME.fullmatch(facts.cluster) and facts.cluster != "local" else "slurm"


def entry(name: str, facts: ClusterFacts, options: Mapping[str, Any]) -> str:
    """Return the text of an entry called *name*. *options* are those that led there. Pure. Raises `LaunchError`."""
    if not facts.partitions:
        raise BackendError("sinfo shows no partition that you may use", where=facts.cluster)
    lines = [
        f"{_scalar(name)}:  # {facts.version}",
        "  kind: slurm",
        "  root: ~/orc  # must be on a file system that the login node and all nodes share",
        f"  python: {_scalar(facts.python or 'python3')}  # {_about_python(facts)}",
        "  options:",
    ]
    lines += [f"    {key}: {_scalar(value)}" for key, value in options.items()]
    if facts.account:
        others = f"  # yours: {', '.join(facts.accounts)}" if len(facts.accounts) > 1 else ""
        lines.append(f"    account: {_scalar(facts.account)}{others}")
    elif facts.accounts:
        lines.append(f"    account: {_scalar(facts.accounts[0])}  # yours: {', '.join(facts.accounts)}")
    up = [partition for partition in facts.partitions if partition.state == "up"] or list(facts.partitions)
    default = next((partition for partition in up if partition.default), up[0])
    lines.append(f"    partition: {_scalar(default.name)}  # or another of these:")
    lines += [f"    #   {_described(partition)}" for partition in facts.partitions]
    if not facts.accounting:
        lines.append("    accounting: false  # there is no slurmdbd")
    text = "\n".join(line if line.isprintable() else _printable(line) for line in lines) + "\n"
    _verify(name, text)
    return text


def _about_python(facts: ClusterFacts) -> str:
    if not facts.python:
        return "CHANGE THIS: no Python 3.9 or newer was found; on the nodes it must be, with torch"
    return "on the nodes; must have torch" if facts.torch else "CHANGE THIS: it has no torch where it was looked for"


def _described(partition: PartitionReport) -> str:
    limit = _limit(partition.limit_s)
    gres = f", {', '.join(partition.resources)}" if partition.gres else ""
    state = "" if partition.state == "up" else f", {partition.state}"
    return f"{partition.name}: {partition.nodes} nodes, {partition.cpus} cores, {limit}{gres}{state}"


def _limit(seconds: float | None) -> str:
    if seconds is None:
        return "no time limit"
    days, rest = divmod(int(seconds), 86400)
    return f"at most {days} d {clock(rest)}" if days else f"at most {clock(rest)}"


def _scalar(value: Any) -> str:
    import yaml

    from orc.launchers.spec.source import kind_of

    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
    # An account called 12e3 is a text to PyYAML, and a number to who reads the file.
    return f"'{text}'" if isinstance(value, str) and text == value and kind_of(value) != "str" else text


def _printable(line: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in line)


def _verify(name: str, text: str) -> None:
    """Check that the clusters file can hold the entry: its names come from elsewhere."""
    from orc.launchers.backends.slurm.options import read_options
    from orc.launchers.spec import source

    try:
        options = source.parse(text, name).data[name]["options"]
    except (SpecError, KeyError, TypeError) as error:
        raise LaunchError(f"the cluster's answers make no entry: {error}", where=name) from None
    read_settings(options, where=name)
    read_options(options, {}, cluster_where=name)

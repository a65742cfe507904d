"""Draft of a job and its clusters while a configuration is converted, with notes about what has no equivalent.

The clusters are hosts over SSH, a TPU, or Amazon SageMaker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orc.launchers.accelerate.config_file import AccelerateConfig
from orc.launchers.accelerate.keys import of_group
from orc.launchers.oldest_python import OLDEST_PYTHON
from orc.launchers.spec.problems import dotted


@dataclass(frozen=True)
class Note:
    """Key of a file, its place, and what becomes of it."""

    key: str
    where: str
    text: str


class Notes:
    """Notes of one conversion, and the options that are accounted for."""

    def __init__(self, config: AccelerateConfig) -> None:
        self._config = config
        self._settled: set[str] = set()
        self._notes: dict[str, list[Note]] = {}

    def settle(self, name: str) -> None:
        """Account for the option *name*."""
        self._settled.add(name)

    def add(self, name: str, text: str) -> None:
        """Note *text* about the option *name*, and account for it."""
        self.settle(name)
        given = self._config.given.get(name)
        key = dotted(given.path) if given else name
        self._notes.setdefault(name, []).append(Note(key, self._config.where(name), text))

    def settle_rest(self) -> None:
        """Note the reason of the table for every option with a value that nothing has accounted for."""
        for name, given in self._config.given.items():
            if name not in self._settled and not given.option.says_nothing(given.value):
                text = given.option.does
                self.add(name, text[:1].lower() + text[1:].rstrip("."))

    def all(self) -> tuple[Note, ...]:
        """Return the notes in the order of the file, those about what it leaves out last."""
        order = {name: number for number, name in enumerate(self._config.given)}
        names = sorted(self._notes, key=lambda name: order.get(name, len(order)))
        return tuple(note for name in names for note in self._notes[name])


# What orc decides for every attempt, and a file of one machine says for nothing.
_DECIDED = {
    "machine_rank": "orc numbers the nodes of each attempt; one job file serves all of them",
    "main_process_port": "node 0 takes a free port for each attempt",
}


@dataclass
class Draft:
    """Job and clusters while they are written."""

    config: AccelerateConfig
    notes: Notes
    job: dict[str, Any]
    runtime: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, Any] = field(default_factory=dict)
    launcher: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of the option *name*, for which this accounts."""
        self.notes.settle(name)
        return self.config.get(name, default)


def cluster_name(title: str, suffix: str) -> str:
    """Return the name of the cluster of the job *title*."""
    return title if suffix in title else f"{title[: 62 - len(suffix)]}-{suffix}"


def decided(draft: Draft) -> None:
    """Account for what orc decides itself; with several machines by a note."""
    for name, why in _DECIDED.items():
        if draft.take(name) is not None and draft.config.get("num_machines", 1) > 1:
            draft.notes.add(name, why)
    draft.notes.settle("same_network")


# What a file does not say, and the user has to write.
PROJECT = "my-project"
ZONE = "us-central2-b"
CHIPS = 4  # of a TPU machine, but for those of v5e and v6e with one or eight
# The newest images, without and with Transformers, in the tables of `orc.launchers.backends.sagemaker.images`; a test
# compares.
STOCK_IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.10.0-cpu-py313"
NEWEST_IMAGE = {"py_version": "py312", "pytorch_version": "2.9.0", "transformers_version": "5.3.0"}


def on_machines(draft: Draft, title: str) -> None:
    """The cluster of a run on this machine, which is ``local``, or of one on several, which are hosts over SSH."""
    decided(draft)
    files = [name for name in ("mpirun_hostfile", "deepspeed_hostfile") if draft.config.get(name)]
    for name in ("mpirun_hostfile", "deepspeed_hostfile"):
        draft.notes.settle(name)
    nodes, first = draft.resources["nodes"], draft.take("main_process_ip")
    if nodes == 1 and not files:
        draft.job["cluster"] = "local"
        return
    name = cluster_name(title, "hosts")
    draft.job["cluster"] = name
    options: dict[str, Any] = {}
    if files and (hostfile := Path(draft.config.get(files[0])).expanduser()).is_file():
        options["hostfile"] = str(hostfile.absolute())
    else:
        options["hosts"] = [first or "node-0.example", *(f"node-{number}.example" for number in range(1, nodes))]
        what = f"there is no such file here; list the {nodes} machines in the cluster, or give it as `hostfile`"
        if files:
            draft.notes.add(files[0], what)
        else:
            draft.notes.add(
                "num_machines", f"write the names of the {nodes} machines into the cluster, instead of *.example"
            )
    draft.clusters[name] = {"kind": "ssh", "options": options}


def on_tpu(draft: Draft, title: str) -> None:
    """The cluster of kind tpu, and the launcher with one process for each chip."""
    decided(draft)
    for name in ("tpu_cluster", "main_process_ip", "rdzv_backend"):
        draft.notes.settle(name)
    nodes = draft.take("num_machines", 1)
    if draft.take("num_processes") is not None:
        draft.notes.add("num_processes", "each machine of the TPU gets one process for each of its chips")
    name = cluster_name(title, "tpu")
    draft.job["cluster"] = name
    draft.launcher["kind"] = "xla"
    if (function := draft.take("main_training_function", "main")) != "main":  # `main` is what a script calls itself
        draft.launcher["options"] = {"function": function}
    zone = draft.take("tpu_zone")
    options: dict[str, Any] = {"project": PROJECT, "zones": [zone or ZONE], "accelerator_type": f"v4-{8 * nodes}"}
    missing = "its Google Cloud project and accelerator_type" + ("" if zone else ", and its zone")
    if tpu_name := draft.take("tpu_name"):
        options["name"] = tpu_name
    if not draft.config.get("vm"):
        draft.notes.add("tpu_name" if tpu_name else "distributed_type", f"the file does not say {missing}: write them")
    for pair in draft.take("env", []):
        key, _, value = str(pair).partition("=")
        draft.env[key] = value
    if file := draft.take("command_file"):
        path = Path(file).expanduser()
        if path.is_file():
            draft.setup += [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        else:
            draft.notes.add("command_file", "there is no such file here; its commands go into `setup`")
    draft.setup += draft.take("commands", [])
    if draft.take("tpu_use_sudo"):
        options["sudo"] = True
    if machines := draft.take("vm"):  # that are named one by one: hosts over SSH, each with its chips
        draft.resources |= {"nodes": len(machines), "procs_per_node": CHIPS}
        what = f"`gcloud compute config-ssh` makes names that SSH knows; a machine has {CHIPS} chips, or write how many"
        draft.notes.add("vm", what)
        options = {"hosts": machines, **({"sudo": True} if "sudo" in options else {})}
    draft.clusters[name] = {"kind": "ssh" if machines else "tpu", "options": options}


def on_sagemaker(draft: Draft, title: str) -> None:
    """The cluster of kind sagemaker, or this one for the local mode; what belongs to the one job stays with the job."""
    for name in ("num_processes", "machine_rank", "rdzv_backend", "same_network"):
        draft.notes.settle(name)
    draft.resources["nodes"] = draft.take("num_machines", 1)
    given = {option.name: draft.take(option.name) for option in of_group("sagemaker")}
    options = {name: value for name, value in given.items() if value not in (None, {})}
    if options.get("ec2_instance_type") in ("local", "local_gpu"):
        _container_here(draft, title, options)
        return
    own: dict[str, Any] = {}
    if base := options.pop("base_job_name", None):
        own["base_job_name"] = base
    kind = draft.config.get("distributed_type", "NO")
    if kind == "DATA_PARALLEL":
        own["distributed_type"] = kind
    _supported_image(draft, options)
    if own:
        draft.resources["options"] = {"sagemaker": own}
    name = cluster_name(title, "sagemaker")
    draft.job["cluster"] = name
    draft.clusters[name] = {"kind": "sagemaker", "options": options}


def _container_here(draft: Draft, title: str, options: dict[str, Any]) -> None:
    """The documented local mode: the job on this machine, in the image by docker; its model stays in its directory."""
    image = options.pop("image_uri", None)
    if image is None:
        what = "its registry asks docker for a login; or write the image that the versions stand for"
        draft.notes.add("image_uri", f"{STOCK_IMAGE}, the newest stock image: {what}")
    if options.pop("ec2_instance_type") == "local_gpu":
        draft.resources["gpus_per_node"] = 1
        draft.notes.add("ec2_instance_type", "one GPU; write how many the job gets: resources.gpus_per_node")
    for name in options:
        draft.notes.add(name, "a job on this machine has none")
    draft.env["SM_MODEL_DIR"] = "model"
    draft.setup.append("mkdir -p model")
    name = draft.job["cluster"] = cluster_name(title, "local")
    draft.clusters[name] = {"kind": "local", "environment": {"container": image or STOCK_IMAGE}}


def _supported_image(draft: Draft, options: dict[str, Any]) -> None:
    """Replace versions of a stock image whose Python is too old for ranks by those of the newest image."""
    torch, python = options.get("pytorch_version"), options.get("py_version")
    old = (
        int(python[3:]) < OLDEST_PYTHON[1]
        if python and re.fullmatch(r"py3[0-9]+", python)
        else torch is not None and torch.partition(".")[0] in ("0", "1")  # images of PyTorch 1 have Python 3.9 at most
    )
    if "image_uri" in options or not old:
        return
    oldest = ".".join(map(str, OLDEST_PYTHON))
    text = f"the stock image has a Python older than {oldest}, which ranks need; the newest image instead"
    given = [name for name in NEWEST_IMAGE if name in options]
    for name in given:
        draft.notes.add(name, text)
    options |= {name: NEWEST_IMAGE[name] for name in {*given, "pytorch_version"}}

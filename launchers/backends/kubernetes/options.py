"""Options of clusters of kind kubernetes, and of jobs for them."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import Field

from orc.launchers.errors import SpecError
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster
from orc.launchers.spec.options import (
    Flag,
    FrozenModel,
    Memory,
    PathText,
    Text,
    Word,
    joined,
    matching,
    one_of,
    seconds,
    several,
    validate_options,
    whole,
)

KIND = "kubernetes"
Object = Annotated[str, matching(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "the name of an object", "training-data")]
Device = Annotated[str, matching(r"[-A-Za-z0-9.]+/[-A-Za-z0-9_.]+", "the name of a device", "nvidia.com/gpu")]
Effect = Annotated[str, one_of("NoSchedule", "PreferNoSchedule", "NoExecute")]
Medium = Annotated[str, one_of("disk", "memory")]
Count = Annotated[int, whole(0, 4096)]
Url = Annotated[str, matching(r"[a-z][-+.a-z0-9]*://\S+", "the URL of a place in an object store", "s3://bucket/orc")]
Period = Annotated[float, seconds(1, 365 * 86400)]


class Toleration(FrozenModel):
    """Taint of nodes that pods bear. A bare text is its key."""

    short_form = "key"

    key: Word | None = Field(None, description="The taint; all of them unless given.")
    value: Text | None = Field(None, description="Its value; any unless given.")
    effect: Effect | None = Field(None, description="What the taint does; all of it unless given.")


class Volume(FrozenModel):
    """Volume at a path of the pods: exactly one of the other keys says what it is."""

    path: PathText = Field(description="Where the pods have it.")
    claim: Object | None = Field(None, description="A PersistentVolumeClaim.")
    host_path: PathText | None = Field(None, description="A directory of the node.")
    config_map: Object | None = Field(None, description="A ConfigMap, a file for each key.")
    secret: Object | None = Field(None, description="A Secret, a file for each key.")
    empty: Medium | None = Field(None, description="Empty, on `disk` or in `memory`, and gone with the pod.")
    size: Memory | None = Field(None, description="The most that an empty one may hold.")
    sub_path: Text | None = Field(None, description="A directory in the volume, instead of all of it.")
    read_only: Flag = Field(False, description="Nothing is written to it.")


class PodTemplate(FrozenModel):
    """Part of the template of pods, as in a Job."""

    metadata: dict[str, Any] = Field({}, description="As in `template.metadata`.")
    spec: dict[str, Any] = Field({}, description="As in `template.spec`.")


class PodOptions(FrozenModel):
    """Options of the pods: a cluster's, and a job's over them."""

    image: Word | None = Field(None, description="Image of the pods, with Python 3.9 or newer and what the job needs.")
    image_pull_secrets: Annotated[tuple[Object, ...], several] = Field((), description="Secrets to pull images with.")
    service_account: Object | None = Field(None, description="Account whose token the pods get; none unless given.")
    node_selector: dict[Word, Text] = Field({}, description="Labels that nodes must have.")
    tolerations: Annotated[tuple[Toleration, ...], several] = Field((), description="Taints that pods bear.")
    affinity: dict[str, Any] | None = Field(None, description="Affinity, as in a pod's `spec.affinity`.")
    priority_class: Object | None = Field(None, description="PriorityClass of the pods.")
    gpu: Device = Field("nvidia.com/gpu", description="The device that `resources.gpus_per_node` counts.")
    devices: dict[Device, Count] = Field({}, description="More devices of a pod: {rdma/hca: 1}, {google.com/tpu: 4}.")
    shm_size: Memory | None = Field(None, description="Bound of /dev/shm; the pod's memory unless given.")
    host_network: Flag = Field(False, description="Pods use the network of their node.")
    volumes: Annotated[tuple[Volume, ...], several] = Field((), description="Volumes; a job's follow the cluster's.")
    labels: dict[Word, Text] = Field({}, description="Labels of the Job and its pods.")
    queue: Object | None = Field(None, description="LocalQueue of Kueue that admits the Job, all pods at once.")
    pod_template: PodTemplate = Field(default_factory=PodTemplate, description="All else; merged into that of pods.")
    start_within: Period = Field(600.0, description="How long some pods wait for the rest before the attempt is ended.")
    keep: Period = Field(86400.0, description="How long Kubernetes keeps a Job that has ended.")


class Access(FrozenModel):
    """The way to the API server."""

    context: Text | None = Field(None, description="Context of the kubeconfig; its current one unless given.")
    kubeconfig: PathText | None = Field(None, description="The kubeconfig; $KUBECONFIG or ~/.kube/config unless given.")
    in_cluster: Flag = Field(False, description="Sign in with the token of the pod that orc runs in.")
    namespace: Object | None = Field(None, description="Namespace of everything; that of the context unless given.")


class ClusterOptions(PodOptions, Access):
    """Options of a cluster of kind kubernetes."""

    store: Url | None = Field(None, description="Place in an object store for orc's files, where there is no `root`.")
    jobset: Flag = Field(False, description="Attempts are JobSets, of the controller that is installed, not Jobs.")


def read_cluster(cluster: Cluster) -> ClusterOptions:
    """Return the options of *cluster*. Raises `SpecError`."""
    where = f"cluster {cluster.name}"
    options = validate_options(ClusterOptions, cluster.options, f"{where}: options")
    _check_volumes(options.volumes, where)
    if cluster.root is not None and (root_volume(options, cluster.root) is None or options.store):
        why = "is in no volume that all pods share and can write"
        why = "and there is a store: give one of both" if options.store else why
        hint = "Write for example  root: /shared/orc, and in the options  volumes: [{claim: data, path: /shared}]."
        raise SpecError(f"root: {cluster.root} {why}", where=where, hint=hint)
    return options


def root_volume(options: PodOptions, root: str) -> Volume | None:
    """Return the volume with orc's files."""
    lasting = [each for each in options.volumes if (each.claim or each.host_path) and not each.read_only]
    above = [each for each in lasting if PurePosixPath(root).is_relative_to(each.path)]
    return max(above, key=lambda each: len(each.path), default=None)


def _check_volumes(volumes: tuple[Volume, ...], where: str) -> None:
    for number, each in enumerate(volumes):
        kinds = [key for key in ("claim", "host_path", "config_map", "secret", "empty") if getattr(each, key)]
        if len(kinds) != 1:
            said = " and ".join(kinds) or "nothing"
            raise SpecError(f"volumes: the one at {each.path} is {said}", where=where, hint="Give one kind of volume.")
        if each.path in [other.path for other in volumes[:number]]:
            raise SpecError(f"volumes: two are at {each.path}", where=where)


def read_job(options: ClusterOptions, job: JobSpec) -> PodOptions:
    """Return the options of *job*, over those of the cluster: lists go on, mappings are merged. Raises `SpecError`."""
    where = f"{job.name}: resources.options.{KIND}"
    own = validate_options(PodOptions, job.resources.options.get(KIND, {}), where)
    found = joined(options, own, whole=("affinity",))
    _check_volumes(found.volumes, where)
    return found

"""The backend of kind kubernetes: an attempt is one indexed Job.

Its pods share a volume with orc's files, or bring what must outlive them to an object store, or leave it with the API.
"""

from __future__ import annotations

import base64
import json
import posixpath
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from orc.launchers.agent.config import AgentConfig
from orc.launchers.attempts.agent_config import agent_config, agent_file
from orc.launchers.attempts.reader import AttemptRecords
from orc.launchers.backends import base
from orc.launchers.backends.base import Handle, Leftover, Observation, Phase, Placement, Snapshot
from orc.launchers.backends.ends import ask_to_end, read_all, read_ends, write_end
from orc.launchers.backends.kubernetes import checks, manifests, queueing, verdict
from orc.launchers.backends.kubernetes.api import GROUPS, Api
from orc.launchers.backends.kubernetes.options import KIND, Access, ClusterOptions, PodOptions, read_cluster, read_job
from orc.launchers.backends.kubernetes.transport import GateTransport, PodFiles
from orc.launchers.containers.http import ApiRefusal, Uncertain, unless_refused
from orc.launchers.containers.inputs import private_inputs
from orc.launchers.containers.layout import AGENT, SECRETS, refuse_container
from orc.launchers.containers.objects import UrlTransport
from orc.launchers.containers.own_disk import OwnDisk
from orc.launchers.containers.transport import wait_for
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable, LaunchError
from orc.launchers.findings import Finding
from orc.launchers.ids import AttemptId
from orc.launchers.paths import Layout
from orc.launchers.plan import Plan, PlanCommand, PlanFile
from orc.launchers.remote.transport import Transport
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster
from orc.launchers.transfer.targets import Targets

FEW = 20  # attempts whose names fit into a query
GONE_S = 60.0  # until something that was deleted is gone
MOST = (1 << 20) - (1 << 14)  # bytes of a ConfigMap: 1 MiB, with room for what is kept of a cancellation or an end
LOST = "; code, records and checkpoints are in the pods alone, and go with them: there is neither `root` nor `store`"


class KubernetesBackend(base.Backend):
    """Attempts as Jobs of one namespace."""

    kind = KIND
    protocol = 1
    options_model = ClusterOptions
    job_options_model = PodOptions
    visibility_s = 10.0
    lost_after_s = 60.0  # so long a network file system may hide a record from the gate
    avoids = True
    discovery_options = {  # noqa: RUF012 - the protocol has a mapping
        "context": ("NAME", "Context of the kubeconfig; its current one by default."),
        "namespace": ("NAME", "Namespace; that of the context by default."),
        "kubeconfig": ("FILE", "The kubeconfig; $KUBECONFIG or ~/.kube/config by default."),
    }

    def __init__(self, cluster: Cluster, *, state_dir: Path | None = None) -> None:
        super().__init__(cluster, state_dir=state_dir)
        self.options = read_cluster(cluster)
        self.keeps_work = cluster.root is not None
        place = OwnDisk(manifests.HOME, manifests.INPUTS, f"{manifests.PRIVATE}/own", self.options.store)
        self.own = place if cluster.root is None else None  # of pods that share no volume
        self.layout, self.python = place.layout() if self.own else Layout.at(self.root), cluster.python or "python3"
        self.jobs, self.others = ("jobsets", "jobs") if self.options.jobset else ("jobs", "jobsets")
        self.api = Api(self.options, f"cluster {cluster.name}")

    @property
    def root(self) -> str:
        """The directory of orc's files, as the pods see it, or the place in the object store."""
        return posixpath.normpath(str(self.cluster.root)) if self.cluster.root else self.options.store or manifests.HOME

    def checkpoint_dir(self, spec: Mapping[str, Any], job: str) -> str:
        """Return the place of the checkpoints, for people."""
        return self.own.checkpoints(spec["checkpoint"]["dir"], job) if self.own else super().checkpoint_dir(spec, job)

    @cached_property
    def transport(self) -> Transport:
        """The way to the shared volume, or to the object store."""
        if self.options.store:
            return UrlTransport(self.api.where)
        gate = manifests.gate_manifest(self.options, self.root, self.python, self.api.where)
        return GateTransport(self.api, gate, self.python)

    def close(self) -> None:
        """Close all connections; they are made anew when they are needed again."""
        self.api.close()

    def addresses(self, hosts: Collection[str] = ()) -> dict[str, str]:
        """Return context and namespace, as far as the entry says."""
        return {name: str(value) for name in ("context", "namespace") if (value := getattr(self.options, name))}

    # -- before the start

    def check_installed(self) -> None:
        """Raise `BackendUnreachable` where the client library is missing."""
        self.api.check_installed()

    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        """``agent.json``, and the manifests that are sent."""
        options = read_job(self.options, job)
        base.refuse_range(job, "a Job has one number of pods")
        config, command = self._pods(job, snapshot, attempt)
        wanted = (self.own, config.nnodes > 1 and not self.options.jobset, job.secrets or config.link)
        owns = [resource for resource, has in zip(manifests.OWNED, wanted, strict=True) if has]
        made = manifests.job_manifest(job, attempt, command, options, placement.avoid if placement else (), owns)
        bodies = {self.jobs: manifests.jobset_manifest(made) if self.options.jobset else made}
        bodies |= {resource: manifests.owned_manifest(resource, attempt) for resource in owns}
        agents, directory = agent_file(config), self.layout.attempt(attempt)
        files = [
            PlanFile(f"{directory}/{name.removesuffix('s')}.json", json.dumps(body, indent=2) + "\n", 0o600)
            for name, body in bodies.items()
        ]
        where = f"in the namespace {self.options.namespace or 'of the context'}"
        where += LOST if self.own and not self.own.store else ""
        # The Job last: then no pod waits for the others.
        commands = [PlanCommand((f"{KIND}:create", file.path), purpose=where) for file in reversed(files)]
        return self.plan_of(job, snapshot, attempt, config.env, (agents, *files), commands)

    def _pods(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId) -> tuple[AgentConfig, list[str]]:
        """Return the configuration of an attempt's agents, and the command of its pods."""
        image = "resources.options.kubernetes.image"
        hosts = manifests.pod_names(attempt, job.resources.max_nodes, self.options.jobset)
        if self.own:
            config = self.own.config(job, snapshot, attempt, self.cluster, hosts, image)
            return config, self.own.command(self.python, KIND, snapshot, manifests.INDEX, manifests.REPORT)
        refuse_container(job, self.cluster, image)
        config = agent_config(job, snapshot, attempt, self.cluster, self.layout, deadline_s=job.resources.time_s)
        config = config.replace(private_dir=manifests.PRIVATE if job.secrets else None)
        return config, manifests.shared_command(config, hosts)

    def stage(self, snapshot: Snapshot, plan: Plan | None = None) -> None:
        """Bring the trees to the shared volume, or their archive to the object store or the attempt's ConfigMap."""
        if self.own is None:
            super().stage(snapshot, plan)
            return
        agents = plan.files[0].content if plan else ""
        inputs = self.own.stage(snapshot, self.state_dir, MOST - len(agents.encode()))
        if plan is not None:
            content = {name: base64.b64encode(file).decode() for name, file in inputs.items()}
            data = {"data": {AGENT: agents}, "binaryData": content}
            if self.api.create("configmaps", {**json.loads(_bodies(plan)["configmaps"]), **data}) is None:
                # Of an earlier try, whose plan may have been another.
                self.api.request("PATCH", self.api.path("configmaps", manifests.job_name(plan.attempt)), body=data)

    def preflight(self, plan: Plan) -> list[Finding]:
        """Does the API server take the Job (a dry run, with quotas), and are the claims there?"""
        return checks.preflight(self.api, self.options, self.jobs, _bodies(plan)[self.jobs], self.cluster.name)

    def check(self) -> list[Finding]:
        """Can the namespace be used, are the claims there?"""
        return checks.check(self.api, self.options, self.cluster.name)

    @classmethod
    def discover(cls, options: Mapping[str, str], name: str | None) -> base.DiscoveredCluster:
        """Describe the namespace of a context: a claim that pods can share, and the devices of its nodes."""
        return checks.discover(options, name)

    def stores(self, plan: Plan | None = None) -> Targets:
        """Return the store on the shared volume."""
        if self.own:
            return super().stores(plan)
        return Targets({self.cluster.name: (self.transport, self.root)}, {self.cluster.name: self.python}, shared=True)

    # -- the start

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Write ``agent.json``, and create the Secret and the Job. A Job that is there already is adopted."""
        values, name = base.require_secrets(plan, secrets), manifests.job_name(plan.attempt)
        if (there := self._adopt(plan.marker)) is not None:
            return there
        bodies, (transport, home) = _bodies(plan), self.files(Handle(self.cluster.name, self.kind, plan.marker, name))
        for file in () if isinstance(transport, PodFiles) else plan.files:
            transport.write(f"{home}/{posixpath.basename(file.path)}", file.content.encode(), mode=file.mode)
        try:
            if "services" in bodies:
                self.api.create("services", bodies["services"])
            if "secrets" in bodies:
                private = private_inputs(plan.files[0].content if self.own else "{}", values)
                if self.api.create("secrets", {**json.loads(bodies["secrets"]), "stringData": private}) is None:
                    # Of an earlier try, or of one at the same time, which may have pods that know its token.
                    again = {"stringData": {key: text for key, text in private.items() if key == SECRETS}}
                    self.api.request("PATCH", self.api.path("secrets", name), body=again)
            self.api.create(self.jobs, bodies[self.jobs])
        except Uncertain as error:
            with suppress(LaunchError):
                if (there := self._adopt(plan.marker)) is not None:
                    return there
            raise AmbiguousSubmit(error.what, where=error.where) from None
        except LaunchError as error:
            # What was staged stays for who tries it again.
            kept = {"configmaps"} if isinstance(error, BackendUnreachable) else set()
            if left := self._forget(name, *(bodies.keys() & {*manifests.OWNED}) - kept):
                error.hint = f"{error.hint} {left}".lstrip()
            raise
        if (handle := self._adopt(plan.marker)) is None:
            raise AmbiguousSubmit("the Job has gone again", where=f"Job {name}")
        return handle

    def _forget(self, name: str, *resources: str) -> str:
        """Delete objects of an attempt; return what to tell where that failed."""
        left = ""
        for resource in resources:
            try:
                self.api.delete(resource, name)
            except LaunchError as error:
                left = f"{name} may still be among the {resource}: {error.what}"
        return left

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """Return the Job of the attempt. Without one, its Secret goes where nothing more is to be submitted."""
        handle = self._adopt(marker)
        if handle is None and not complete:
            self._forget(manifests.job_name(AttemptId.from_marker(marker)), *manifests.OWNED)
        return handle

    def _adopt(self, marker: str) -> Handle | None:
        """Return the Job of an attempt, with which its other objects go from now on."""
        name = manifests.job_name(AttemptId.from_marker(marker))
        kind, job = self._job(name)
        if job is None:
            return None
        meta = job["metadata"]
        if (said := meta.get("annotations") or {}).get(manifests.MARKER) != marker:
            what = f"there is a Job named {name} already, and it is not this attempt's"
            raise BackendError(what, where=self.api.where, hint="Submit again.")
        owner = {"apiVersion": GROUPS[kind], "kind": job["kind"], "name": name, "uid": meta["uid"]}
        for resource in said.get(manifests.OWNS, "").split():
            with suppress(LaunchError):  # `reap` deletes it after the attempt, or `orc prune` later
                body = {"metadata": {"ownerReferences": [owner]}}
                self.api.request("PATCH", self.api.path(resource, name), body=body)
        at = verdict.seconds(meta["creationTimestamp"]) or 0.0
        return Handle(self.cluster.name, self.kind, marker, name, at)

    def _job(self, name: str) -> tuple[str, dict[str, Any] | None]:
        """Return a Job or a JobSet and which of both it is: `jobset` may have been switched since."""
        if (job := self.api.get(self.jobs, name)) is None:
            with unless_refused(403):  # who may not see the other kind has made none
                if (job := self.api.get(self.others, name)) is not None:
                    return self.others, job
        return self.jobs, job

    # -- afterwards

    def files(self, handle: Handle) -> tuple[Transport, str]:
        """Return the way to the attempt's directory, and its path there."""
        attempt = AttemptId.from_marker(handle.marker)
        home = str(self.layout.attempt(attempt))
        if self.own is None:
            return self.transport, home
        if self.own.store:
            return self.transport, self.own.stored(attempt)
        return PodFiles(self.api, handle.native_id, home, self.python), home

    def _objects(self, handles: Sequence[Handle]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Return the Jobs of attempts, and the pods of each, by the Job's name."""
        pods: dict[str, list[Any]] = {handle.native_id: [] for handle in handles}
        if not handles:
            return {}, pods
        labels = f"{manifests.ATTEMPT} in ({','.join(pods)})" if len(pods) <= FEW else manifests.ATTEMPT
        jobs = {job["metadata"]["labels"][manifests.ATTEMPT]: job for job in self.api.items("jobs", labels)}
        for pod in self.api.items("pods", labels):
            pods.get(pod["metadata"]["labels"][manifests.ATTEMPT], []).append(pod)
        return {name: job for name, job in jobs.items() if name in pods}, pods

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """Return observations: Jobs and pods in two lists, then the records of those whose pods have begun."""
        jobs, pods = self._objects(handles)
        files = {handle: self.files(handle) for handle in handles}
        begun = [files[h] for h in handles if verdict.may_have_records(jobs.get(h.native_id), pods[h.native_id])]
        records = read_all(begun, {files[handle][1]: handle.nodes for handle in handles})
        ends = read_ends(files[handle] for handle in handles if handle.native_id not in jobs)
        said, found = queueing.complaints(self.api, jobs, pods), {}
        for handle, (transport, home) in files.items():
            name, own, now = handle.native_id, records.get(home) or AttemptRecords(home), time.time()
            if home in ends and not own.complete:
                found[handle] = ends[home]
                continue
            job, why = jobs.get(name), said.get(name, "")
            seen, end_it = verdict.judge(job, pods[name], own, now, handle.submitted_at, why)
            if isinstance(transport, PodFiles) and transport.unread and not seen.phase.ended:
                seen = Observation(Phase.UNKNOWN, reason=transport.unread)
            if end_it:
                if seen.phase.ended:
                    write_end(transport, home, seen)
                self._end(name)
            if seen.phase.ended and (own.has_secrets or end_it):
                self._forget(name, "secrets")
            if seen.phase.ended and job is not None and own.cancel is not None and not end_it:
                self._adopt(handle.marker)  # what was kept of the request goes with the Job after all
            found[handle] = seen
        return found

    def _end(self, name: str) -> None:
        """Delete the Job of an attempt. Where a ConfigMap keeps how it ended, it does so without the code."""
        self.api.delete(self._job(name)[0], name)
        if self.own and not self.own.store:
            with suppress(ApiRefusal):  # it has gone with the Job
                self.api.request("PATCH", self.api.path("configmaps", name), body={"binaryData": None})

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """Tell the agents by ``cancel.json``; a Job some of whose pods do not run yet is deleted."""
        unreached: dict[str, LaunchError] = {}
        jobs, pods = self._objects(handles)
        for handle in handles:
            job, (transport, home) = jobs.get(handle.native_id), self.files(handle)
            if job is None or verdict.has_ended(job):
                continue
            try:
                ask_to_end(transport, home, grace)
                running = [pod for pod in pods[handle.native_id] if pod["status"].get("phase") == "Running"]
                if len(running) < job["spec"]["completions"]:
                    self._end(handle.native_id)
            except LaunchError as error:
                unreached[handle.marker] = error
        base.raise_unreached(unreached)

    def reap(self, handle: Handle) -> None:
        """Delete a Job that goes on although its attempt is over, and the Secret; without a Job, what else is left."""
        kind, job = self._job(handle.native_id)
        if job is not None and verdict.has_ended(job):
            self._adopt(handle.marker)
            self._forget(handle.native_id, "secrets")
        else:
            self._forget(handle.native_id, kind, *manifests.OWNED)

    def entries(self, handle: Handle) -> list[base.NodeEntry]:
        """Return the ways to the pods, by a program of orc that speaks to the API server."""
        job = self._objects([handle])[0].get(handle.native_id, {"spec": {"completions": 0}})
        access = json.dumps({name: getattr(self.options, name) for name in Access.model_fields})
        home = str(self.layout.attempt(AttemptId.from_marker(handle.marker)))
        start = (sys.executable, "-m", "orc.launchers.backends.kubernetes.shell", access)

        def entry(node: int) -> base.NodeEntry:
            plain, terminal = ((*start, mode, self.python, handle.native_id, str(node)) for mode in ("plain", "tty"))
            return base.NodeEntry(node, f"pod {node}", home, self.python, plain, terminal)

        return [entry(node) for node in range(job["spec"]["completions"])]

    def queue(self, handles: Sequence[Handle]) -> base.QueueReport:
        """Return the kinds of nodes with what is free on them, and our attempts with what they wait for."""
        return queueing.report(self.api, handles, *self._objects(handles))

    def leftovers(self, live: Collection[str], over: Collection[str]) -> list[Leftover]:
        """Return Jobs that go on for no live attempt, Secrets without one, and the gates where nothing is live."""
        return list(queueing.leftovers(self.api, (self.jobs, self.others), live, over))

    def sweep(self, leftover: Leftover) -> None:
        """Delete it and what it owns, and wait until it is gone."""
        resource, _, name = leftover.native_id.partition("/")
        self.api.delete(resource, name)
        if not wait_for(lambda: self.api.get(resource, name) is None, GONE_S):
            raise BackendError(f"{leftover.what} is still there after {GONE_S:g} s", where=self.api.where)


def _bodies(plan: Plan) -> dict[str, str]:
    """Return the manifests of a plan, by their resources."""
    return {f"{posixpath.basename(file.path).removesuffix('.json')}s": file.content for file in plan.files[1:]}

"""The backend of kind kubernetes: an attempt is one indexed Job, whose pods share a volume with orc's files."""

from __future__ import annotations

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

from orc.launchers.attempts.agent_config import agent_config, agent_file
from orc.launchers.attempts.reader import AttemptRecords, read_attempts
from orc.launchers.backends import base
from orc.launchers.backends.base import Cause, Handle, Leftover, Observation, Phase, Placement, Snapshot
from orc.launchers.backends.kubernetes import checks, manifests, queueing, verdict
from orc.launchers.backends.kubernetes.api import Api, Uncertain
from orc.launchers.backends.kubernetes.options import KIND, Access, ClusterOptions, PodOptions, read_cluster, read_job
from orc.launchers.backends.kubernetes.transport import GateTransport
from orc.launchers.errors import AmbiguousSubmit, BackendError, LaunchError, RenderError
from orc.launchers.findings import Finding
from orc.launchers.ids import AttemptId
from orc.launchers.paths import Layout
from orc.launchers.plan import Plan, PlanCommand, PlanFile
from orc.launchers.remote.transport import Transport
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster
from orc.launchers.transfer.targets import Targets

ENDED = "ended.json"  # how an attempt ended whose Job was deleted
FEW = 20  # attempts whose names fit into a query
GONE_S = 60.0  # until something that was deleted is gone
COMPLAINTS = 10  # attempts without pods whose events are read in one look


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
        self.layout, self.python = Layout.at(self.root), cluster.python or "python3"
        self.api = Api(self.options, f"cluster {cluster.name}")

    @property
    def root(self) -> str:
        """The directory of orc's files, as the pods see it."""
        return posixpath.normpath(str(self.cluster.root))

    @cached_property
    def transport(self) -> GateTransport:
        """The way to the shared volume."""
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
        if job.resources.min_nodes != job.resources.max_nodes:
            what = f"resources.nodes = {job.resources.nodes}: a Job has one number of pods"
            raise RenderError(what, where=job.name, hint="Write one number.")
        config = agent_config(job, snapshot, attempt, self.cluster, self.layout, deadline_s=job.resources.time_s)
        if (config.environment or {}).get("kind") == "container":
            hint = "Name the image in resources.options.kubernetes.image."
            raise RenderError("environment.container: the pods are containers already", where=job.name, hint=hint)
        agents = agent_file(config.replace(private_dir=manifests.PRIVATE if job.secrets else None))
        avoid = placement.avoid if placement else ()
        made = {"job": manifests.job_manifest(job, attempt, config, agents.path, options, avoid)}
        if job.secrets:
            made["secret"] = manifests.secret_manifest(attempt)
        directory = self.layout.attempt(attempt)
        files = [PlanFile(f"{directory}/{name}.json", json.dumps(made[name], indent=2) + "\n", 0o600) for name in made]
        where = f"in the namespace {self.options.namespace or 'of the context'}"
        return Plan(
            attempt=attempt,
            cluster=self.cluster.name,
            backend=self.kind,
            files=(agents, *files),
            # The Secret first: then no pod waits for it.
            commands=tuple(PlanCommand((f"{KIND}:create", file.path), purpose=where) for file in reversed(files)),
            env=config.env,
            trees=snapshot.digests,
            secrets=tuple(job.secrets),
        )

    def preflight(self, plan: Plan) -> list[Finding]:
        """Does the API server take the Job (a dry run, with quotas), and are the claims there?"""
        return checks.preflight(self.api, self.options, plan.files[1].content, self.cluster.name)

    def check(self) -> list[Finding]:
        """Can the namespace be used, are the claims there?"""
        return checks.check(self.api, self.options, self.cluster.name)

    @classmethod
    def discover(cls, options: Mapping[str, str], name: str | None) -> base.DiscoveredCluster:
        """Describe the namespace of a context: a claim that pods can share, and the devices of its nodes."""
        return checks.discover(options, name)

    def stores(self, plan: Plan | None = None) -> Targets:
        """Return the store on the shared volume."""
        name = self.cluster.name
        return Targets({name: (self.transport, self.root)}, {name: self.python}, shared=True)

    # -- the start

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Write ``agent.json``, and create the Secret and the Job. A Job that is there already is adopted."""
        values, name = base.require_secrets(plan, secrets), manifests.job_name(plan.attempt)
        if (there := self._adopt(plan.marker)) is not None:
            return there
        for file in plan.files:
            self.transport.write(file.path, file.content.encode(), mode=file.mode)
        try:
            if values:
                body = {**json.loads(plan.files[2].content), "stringData": {"secrets.json": json.dumps(values)}}
                if self.api.create("secrets", body) is None:  # of an earlier try, or of one at the same time
                    self.api.request("PATCH", self.api.path("secrets", name), body=body)
            self.api.create("jobs", plan.files[1].content)
        except Uncertain as error:
            with suppress(LaunchError):
                if (there := self._adopt(plan.marker)) is not None:
                    return there
            raise AmbiguousSubmit(error.what, where=error.where) from None
        except LaunchError as error:
            if values and (left := self._forget_secret(name)):
                error.hint = f"{error.hint} {left}".lstrip()
            raise
        if (handle := self._adopt(plan.marker)) is None:
            raise AmbiguousSubmit("the Job has gone again", where=f"Job {name}")
        return handle

    def _forget_secret(self, name: str) -> str:
        """Delete the Secret of an attempt; return what to tell where that failed."""
        try:
            self.api.delete("secrets", name)
        except LaunchError as error:
            return f"Its Secret {name} may still be there: {error.what}"
        return ""

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """Return the Job of the attempt. Without one, its Secret goes where nothing more is to be submitted."""
        handle = self._adopt(marker)
        if handle is None and not complete:
            self._forget_secret(manifests.job_name(AttemptId.from_marker(marker)))
        return handle

    def _adopt(self, marker: str) -> Handle | None:
        """Return the Job of an attempt, whose Secret goes with it from now on."""
        name = manifests.job_name(AttemptId.from_marker(marker))
        if (job := self.api.get("jobs", name)) is None:
            return None
        meta = job["metadata"]
        if (meta.get("annotations") or {}).get(manifests.MARKER) != marker:
            what = f"there is a Job named {name} already, and it is not this attempt's"
            raise BackendError(what, where=self.api.where, hint="Submit again.")
        if any(each["name"] == "orc-secret" for each in job["spec"]["template"]["spec"].get("volumes") or ()):
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": meta["uid"]}
            body = {"metadata": {"ownerReferences": [owner]}}
            with suppress(LaunchError):  # `poll` deletes it at the end of the attempt, or `orc prune` later
                self.api.request("PATCH", self.api.path("secrets", name), body=body)
        at = verdict.seconds(meta["creationTimestamp"]) or 0.0
        return Handle(self.cluster.name, self.kind, marker, name, at)

    # -- afterwards

    def files(self, handle: Handle) -> tuple[Transport, str]:
        """Return the way to the attempt's directory on the shared volume."""
        return self.transport, str(self.layout.attempt(AttemptId.from_marker(handle.marker)))

    def _objects(self, handles: Sequence[Handle]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Return the Jobs of attempts, and the pods of each, by the Job's name."""
        pods: dict[str, list[Any]] = {handle.native_id: [] for handle in handles}
        if not handles:
            return {}, pods
        labels = f"{manifests.ATTEMPT} in ({','.join(pods)})" if len(pods) <= FEW else manifests.ATTEMPT
        jobs = {job["metadata"]["name"]: job for job in self.api.items("jobs", labels)}
        for pod in self.api.items("pods", labels):
            pods.get(pod["metadata"]["labels"][manifests.ATTEMPT], []).append(pod)
        return {name: job for name, job in jobs.items() if name in pods}, pods

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """Return observations: Jobs and pods in two lists, then the records of those whose pods have begun."""
        jobs, pods = self._objects(handles)
        homes = {handle: self.files(handle)[1] for handle in handles}
        begun = [
            home for h, home in homes.items() if verdict.may_have_records(jobs.get(h.native_id), pods[h.native_id])
        ]
        planned = {home: handle.nodes for handle, home in homes.items()}
        records = read_attempts(self.transport, begun, planned) if begun else {}
        gone = [f"{home}/{ENDED}" for handle, home in homes.items() if handle.native_id not in jobs]
        ends = self.transport.read_many(gone) if gone else {}
        bare = [
            n for n, job in jobs.items() if len(pods[n]) < job["spec"]["completions"] and not verdict.has_ended(job)
        ]
        said = {name: self._complaints(name) for name in bare[:COMPLAINTS]}
        found = {}
        for handle, home in homes.items():
            name, own = handle.native_id, records.get(home) or AttemptRecords(home)
            if (end := ends.get(f"{home}/{ENDED}")) is not None and not own.complete:
                told = json.loads(end)
                cause = Cause(told["cause"]) if told["cause"] else None
                found[handle] = Observation(Phase(told["phase"]), cause, told["reason"], ended_at=told["at"])
                continue
            seen, end_it = verdict.judge(
                jobs.get(name), pods[name], own, time.time(), handle.submitted_at, said.get(name, "")
            )
            if end_it:
                told = {"phase": seen.phase, "cause": seen.cause, "reason": seen.reason, "at": time.time()}
                if seen.phase.ended:
                    self.transport.write(f"{home}/{ENDED}", json.dumps(told).encode(), mode=0o600)
                self.api.delete("jobs", name)
            if seen.phase.ended and (own.has_secrets or end_it):
                self._forget_secret(name)
            found[handle] = seen
        return found

    def _complaints(self, name: str) -> str:
        """Return what the controller of a Job without its pods says."""
        query = {"fieldSelector": f"involvedObject.name={name},type=Warning", "limit": 50}
        events = self.api.request("GET", self.api.path("events"), query)["items"]
        said = sorted((str(event.get("lastTimestamp") or ""), str(event.get("message") or "")) for event in events)
        return said[-1][1] if said else ""

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """Tell the agents by ``cancel.json``; a Job some of whose pods do not run yet is deleted."""
        unreached: dict[str, LaunchError] = {}
        request = json.dumps(base.cancel_request(grace)).encode()
        jobs, pods = self._objects(handles)
        for handle in handles:
            job, (transport, home) = jobs.get(handle.native_id), self.files(handle)
            if job is None or verdict.has_ended(job):
                continue
            try:
                if not read_attempts(transport, [home])[home].complete:
                    transport.write(f"{home}/cancel.json", request, mode=0o600)
                running = [pod for pod in pods[handle.native_id] if pod["status"].get("phase") == "Running"]
                if len(running) < job["spec"]["completions"]:
                    self.api.delete("jobs", handle.native_id)
            except LaunchError as error:
                unreached[handle.marker] = error
        base.raise_unreached(unreached)

    def reap(self, handle: Handle) -> None:
        """Delete a Job that goes on although its attempt is over, and the Secret."""
        job = self.api.get("jobs", handle.native_id)
        if job is not None and not verdict.has_ended(job):
            self.api.delete("jobs", handle.native_id)
        self._forget_secret(handle.native_id)

    def entries(self, handle: Handle) -> list[base.NodeEntry]:
        """Return the ways to the pods, by a program of orc that speaks to the API server."""
        job = self.api.get("jobs", handle.native_id) or {"spec": {"completions": 0}}
        access = json.dumps({name: getattr(self.options, name) for name in Access.model_fields})
        home = self.files(handle)[1]
        start = (sys.executable, "-m", "orc.launchers.backends.kubernetes.shell", access)
        found = []
        for node in range(job["spec"]["completions"]):
            plain, terminal = ((*start, mode, self.python, handle.native_id, str(node)) for mode in ("plain", "tty"))
            found.append(base.NodeEntry(node, f"pod {node}", home, self.python, plain, terminal))
        return found

    def queue(self, handles: Sequence[Handle]) -> base.QueueReport:
        """Return the kinds of nodes with what is free on them, and our attempts with what they wait for."""
        return queueing.report(self.api, handles, *self._objects(handles))

    def leftovers(self, live: Collection[str], over: Collection[str]) -> list[Leftover]:
        """Return Jobs that go on for no live attempt, Secrets without one, and the gates where nothing is live."""
        return list(queueing.leftovers(self.api, live, over))

    def sweep(self, leftover: Leftover) -> None:
        """Delete it and what it owns, and wait until it is gone."""
        resource, _, name = leftover.native_id.partition("/")
        self.api.delete(resource, name)
        deadline = time.monotonic() + GONE_S
        while self.api.get(resource, name) is not None:
            if time.monotonic() > deadline:
                raise BackendError(f"{leftover.what} is still there after {GONE_S:g} s", where=self.api.where)
            time.sleep(0.25)

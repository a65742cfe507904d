"""Submission of attempts: one, or an array. The order of the steps makes it exactly once."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orc.launchers.attempts.confidential import remove_confidential
from orc.launchers.backends.base import Handle, require_secrets
from orc.launchers.backends.slurm import arrays
from orc.launchers.backends.slurm.login import expand_agent_paths
from orc.launchers.backends.slurm.lookup import KIND, JobLookup
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable
from orc.launchers.remote.transport import NO_LINKS, WholeFile

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.client import SlurmClient
    from orc.launchers.backends.slurm.options import SlurmSettings
    from orc.launchers.paths import Layout
    from orc.launchers.plan import Plan
    from orc.launchers.remote.transport import Transport

SECRETS_NAME = "secrets.json"


class Submitter:
    """Submission to one cluster."""

    def __init__(
        self,
        client: SlurmClient,
        transport: Transport,
        layout: Layout,
        settings: SlurmSettings,
        lookup: JobLookup,
    ) -> None:
        self._client = client
        self._transport = transport
        self._layout = layout
        self._settings = settings
        self._lookup = lookup

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Submit one attempt; see `Backend.submit`."""
        require_secrets(plan, secrets)
        if found := self._lookup.known([plan.marker]).get(plan.marker):
            return found
        self._write([plan], secrets)
        at = time.time()
        (command,) = plan.commands
        *words, script = (self._expand_home(word) for word in command.argv)
        job_id = self._sbatch([*words, script], [plan.marker])
        handle = Handle(plan.cluster, KIND, plan.marker, job_id, at)
        return self._oldest_jobs([handle])[0]

    def submit_array(self, plans: Sequence[Plan], secrets: Mapping[str, str], at_once: int | None) -> list[Handle]:
        """Submit attempts as one array; see `SupportsArrays.submit_array`."""
        if at_once is not None and at_once < 1:
            raise BackendError(f"an array runs at least one of its elements at once, not {at_once}")
        for plan in plans:
            require_secrets(plan, secrets)
        known = self._lookup.known([plan.marker for plan in plans])
        if new := [plan for plan in plans if plan.marker not in known]:
            arrays.check_alike(new)
            name = arrays.array_name(plan.marker for plan in new)
            directory = self._write_array(name, new, secrets)
            at = time.time()
            array = arrays.array_options(name, len(new), at_once, directory)
            program = (self._settings.program("sbatch"), "--parsable")
            job_id = self._sbatch(
                [*program, *array, f"{directory}/{arrays.SCRIPT_NAME}"], [plan.marker for plan in new]
            )
            made = [
                Handle(plan.cluster, KIND, plan.marker, f"{job_id}_{index}", at, group=name)
                for index, plan in enumerate(new)
            ]
            known.update((handle.marker, handle) for handle in self._oldest_jobs(made))
        return [known[plan.marker] for plan in plans]

    def _write(
        self,
        plans: Sequence[Plan],
        secrets: Mapping[str, str],
        others: Sequence[WholeFile] = (),
        links: Mapping[str, str] = NO_LINKS,
    ) -> None:
        """Write the directories of attempts for their agents, with *others* and *links*."""
        files, counted = list(others), []
        directories = [self._lookup.directory(plan.marker) for plan in plans]
        for plan, directory in zip(plans, directories, strict=True):
            if plan.secrets:
                own = json.dumps({name: secrets[name] for name in plan.secrets}).encode()
                files.append(WholeFile(f"{directory}/{SECRETS_NAME}", own, 0o600))
            for file in plan.files:
                path, content = self._transport.expand(file.path), file.content
                if path.endswith("/agent.json"):
                    if self._settings.login:
                        content = expand_agent_paths(content, self._transport.expand)
                    if "nnodes_from" in json.loads(content):
                        counted.append(path)
                files.append(WholeFile(path, content.encode(), file.mode))
        kept = (
            self._transport.read_many(counted) if counted else {}
        )  # jobs may have put their real number of nodes there
        logs = [f"{directory}/logs" for directory in directories]  # Slurm makes no directories for its output
        self._transport.write_many([file for file in files if file.path not in kept], logs, links)

    def _write_array(self, name: str, plans: Sequence[Plan], secrets: Mapping[str, str]) -> str:
        """Write the directories of all attempts and of their array, with links between them; return the array's."""
        directory = self._transport.expand(str(arrays.array_dir(self._layout, name)))
        places = [self._lookup.directory(plan.marker) for plan in plans]
        paths = [f"{place}/{arrays.RECORD_NAME}" for place in places]
        earlier = self._transport.read_many(paths)
        script = arrays.array_script(plans[0], directory).encode()
        own = [WholeFile(f"{directory}/{arrays.SCRIPT_NAME}", script, 0o600)]
        for index, path in enumerate(paths):
            before = [element for element in arrays.elements_of(earlier.get(path, b"")) if element.array != name]
            record = arrays.record_of([*before, arrays.ArrayElement(name, index)])
            own.append(WholeFile(path, record, 0o600))
        links = {f"{directory}/{index}": place for index, place in enumerate(places)}
        self._write(plans, secrets, own, links)
        return directory

    def _sbatch(self, argv: Sequence[str], markers: Sequence[str]) -> str:
        try:
            return self._client.submit(argv)
        except AmbiguousSubmit:
            raise
        except BackendError:  # nothing will ever read them
            remove_confidential(self._transport, [self._lookup.directory(marker) for marker in markers])
            raise

    def _oldest_jobs(self, handles: Sequence[Handle]) -> list[Handle]:
        """Return the oldest job of each marker: concurrent submissions agree on it."""
        try:
            first = self._lookup.queued([handle.marker for handle in handles])
        except BackendUnreachable:
            return list(handles)
        found = [(handle, first.get(handle.marker, handle)) for handle in handles]
        return [own if own.native_id == other.native_id else other for own, other in found]

    def _expand_home(self, word: str) -> str:
        option, equals, value = word.rpartition("=")
        return f"{option}{equals}{self._transport.expand(value)}" if value.startswith("~/") else word

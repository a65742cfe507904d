"""The agents' records in S3, read as if they lay in a directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from orc.launchers.attempts.reader import AttemptRecords, read_attempts
from orc.launchers.backends.sagemaker.rendering import AGENT, RECORDS

if TYPE_CHECKING:
    from orc.launchers.backends.sagemaker.aws import AwsService
    from orc.launchers.remote.transport import Transport


@dataclass(frozen=True)
class AttemptInputs:
    """Inputs of an attempt: the request for its training job, and the configuration of its agents."""

    request: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def nnodes(self) -> int:
        """Number of instances."""
        return int(self.config.get("nnodes", 1))

    @property
    def nproc(self) -> int:
        """Processes on each."""
        return int(self.config.get("nproc", 1))

    @property
    def job_uri(self) -> str:
        """The job's directory, as SageMaker brings it to S3."""
        kept = str(self.request["CheckpointConfig"]["S3Uri"])
        return f"{kept}/{RECORDS}/{self.config['job']}"

    @property
    def records_uri(self) -> str:
        """The attempt's directory there."""
        return f"{self.job_uri}/a{self.config['attempt']}"


class _Objects:
    """As much of a `Transport` as reading records takes; ``agent.json`` is where the submission has put it."""

    def __init__(self, service: AwsService, inputs: Iterable[AttemptInputs]) -> None:
        self._service = service
        self._agents = {f"{each.records_uri}/{AGENT}": each.config for each in inputs}

    def read_many(self, paths: Iterable[str], *, limit: int) -> dict[str, bytes]:
        wanted = list(paths)
        own = {path: json.dumps(self._agents[path]).encode() for path in wanted if path in self._agents}
        return {**self._service.get_many([path for path in wanted if path not in own], limit), **own}


def read_records(service: AwsService, inputs: Sequence[AttemptInputs]) -> dict[str, AttemptRecords]:
    """The records of many attempts, by `AttemptInputs.records_uri`."""
    directories = [each.records_uri for each in inputs]
    return read_attempts(cast("Transport", _Objects(service, inputs)), directories)

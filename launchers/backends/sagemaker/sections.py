"""Sections of the settings: channels of data, the distribution of an estimator. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from orc.launchers.backends.sagemaker import readers as read
from orc.launchers.spec.options import FrozenModel, Reader, text, whole

Text = Annotated[str, text]
Truth = Annotated[bool, Reader(read.truth)]


class Channel(FrozenModel):
    """Channel of data: the keys of the SDK's TrainingInput and FileSystemInput."""

    short_form = "s3_data"

    s3_data: Text | None = None
    distribution: Text = "FullyReplicated"
    s3_data_type: Text = "S3Prefix"
    compression: Text | None = None
    content_type: Text | None = None
    record_wrapping: Text | None = None
    input_mode: Text | None = None
    attribute_names: Annotated[tuple[Text, ...], Reader(read.several)] | None = None
    shuffle_seed: Annotated[int, whole(0, 2**63 - 1)] | None = None
    file_system_id: Text | None = None
    file_system_type: Text | None = None
    directory_path: Text | None = None
    file_system_access_mode: Text = "ro"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.s3_data is None) == (self.file_system_id is None):
            raise ValueError("give either s3_data or file_system_id")
        if self.file_system_id and not (self.file_system_type and self.directory_path):
            raise ValueError("a file system needs file_system_type and directory_path")
        if self.file_system_id and self.input_mode not in (None, "File"):
            raise ValueError(f"a file system is mounted, input_mode {self.input_mode} is for S3")
        if (self.attribute_names is not None) != (self.s3_data_type == "AugmentedManifestFile"):
            raise ValueError("attribute_names and s3_data_type AugmentedManifestFile go together")
        return self


class Switch(FrozenModel):
    """Form of distribution that is on or off."""

    enabled: Truth = False


class Mpi(Switch):
    """Distribution over MPI."""

    processes_per_host: Annotated[int, whole(1, 1024)] | None = None
    custom_mpi_options: Text | None = None


class SmDistributed(FrozenModel):
    """SageMaker's own libraries."""

    dataparallel: Switch = Switch.model_construct()

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "modelparallel" in data:
            raise ValueError("modelparallel is not supported; shard the model with orc.runtime instead")
        return data


class Distribution(FrozenModel):
    """The estimators' ``distribution``: at most one form of it is enabled."""

    torch_distributed: Switch | None = None
    pytorchddp: Switch | None = None
    mpi: Mpi | None = None
    smdistributed: SmDistributed | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.smdistributed and (others := [name for name in self.model_fields_set if name != "smdistributed"]):
            raise ValueError(f"smdistributed cannot be combined with {', '.join(sorted(others))}")
        if len(on := self._enabled()) > 1:
            raise ValueError(f"only one of {' and '.join(on)} can be enabled")
        return self

    @property
    def kind(self) -> Literal["torchrun", "mpi", "data_parallel", "none"]:
        """Return the form that is enabled, as a kind of launcher."""
        if self.smdistributed:
            return "data_parallel" if self.smdistributed.dataparallel.enabled else "none"
        on = self._enabled()
        return "none" if not on else "mpi" if on == ["mpi"] else "torchrun"

    @property
    def processes_per_host(self) -> int | None:
        """Number of processes, which MPI alone is told."""
        return self.mpi.processes_per_host if self.mpi and self.kind == "mpi" else None

    @property
    def arguments(self) -> list[str]:
        """Options of mpirun."""
        return shlex.split(self.mpi.custom_mpi_options or "") if self.mpi and self.kind == "mpi" else []

    def _enabled(self) -> list[str]:
        forms = {"torch_distributed": self.torch_distributed, "pytorchddp": self.pytorchddp, "mpi": self.mpi}
        return [name for name, form in forms.items() if form and form.enabled]

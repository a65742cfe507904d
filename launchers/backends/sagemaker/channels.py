"""The data of a job as channels of the request, and what a channel cannot be. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.backends.sagemaker.sections import Channel
    from orc.launchers.backends.sagemaker.settings import Settings
    from orc.launchers.spec import JobSpec


def own_channel(name: str, uri: str) -> dict[str, Any]:
    """Return an input channel of orc's own."""
    return {
        "ChannelName": name,
        "DataSource": {
            "S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
        },
        "InputMode": "File",
    }


def channels(job: JobSpec, settings: Settings) -> Iterator[dict[str, Any]]:
    """Return the input channels of the job. Raises `RenderError` for those that SageMaker would refuse."""
    for name, entry in settings.inputs.items():
        for what, hint in _wrong(settings, entry):
            raise RenderError(f"inputs: {name}: {what}", where=job.name, hint=hint)
        yield _file_system(name, entry, settings) if entry.file_system_id else _objects(name, entry)


def given(**values: Any) -> dict[str, Any]:
    """Return a part of the request without the keys that have no value."""
    return {key: value for key, value in values.items() if value is not None}


def _wrong(settings: Settings, entry: Channel) -> Iterator[tuple[str, str]]:
    mode = entry.input_mode or settings.input_mode
    if (entry.s3_data or "").startswith("file://"):
        yield (
            f"SageMaker cannot read {entry.s3_data}, which is on this machine",
            "Copy it to S3 (`aws s3 sync`), or run the job here (`--cluster local`).",
        )
    if entry.file_system_id and not settings.subnets:
        yield "a file system is reached from a VPC alone", "Set subnets and security_group_ids to those that see it."
    if entry.s3_data_type == "AugmentedManifestFile" and mode != "Pipe":
        yield f"an AugmentedManifestFile is read with input_mode Pipe, not {mode}", "Set input_mode: Pipe for it."
    if entry.compression == "Gzip" and mode != "Pipe":
        yield f"SageMaker decompresses with input_mode Pipe, not {mode}", "Leave compression out; the job decompresses."


def _file_system(name: str, entry: Channel, settings: Settings) -> dict[str, Any]:
    return given(
        ChannelName=name,
        DataSource={
            "FileSystemDataSource": {
                "FileSystemId": entry.file_system_id,
                "FileSystemAccessMode": entry.file_system_access_mode,
                "FileSystemType": entry.file_system_type,
                "DirectoryPath": entry.directory_path,
            }
        },
        ContentType=entry.content_type,
        # It is mounted, whatever way the other channels come.
        InputMode="File" if settings.input_mode != "File" else entry.input_mode,
    )


def _objects(name: str, entry: Channel) -> dict[str, Any]:
    source = given(
        S3DataType=entry.s3_data_type,
        S3Uri=entry.s3_data,
        S3DataDistributionType=entry.distribution,
        AttributeNames=list(entry.attribute_names) if entry.attribute_names else None,
    )
    return given(
        ChannelName=name,
        DataSource={"S3DataSource": source},
        ContentType=entry.content_type,
        CompressionType=entry.compression,
        RecordWrapperType=entry.record_wrapping,
        InputMode=entry.input_mode,
        ShuffleConfig=None if entry.shuffle_seed is None else {"Seed": entry.shuffle_seed},
    )

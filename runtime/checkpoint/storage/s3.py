"""Amazon S3, and what speaks its protocol, through boto3: the few operations of a file system that checkpoints need.

They are named as fsspec names them, whose drivers serve all other stores. Credentials, region and endpoint come from
where boto3 takes them (``AWS_PROFILE``, ``AWS_ENDPOINT_URL``, the machine's role ...). What goes wrong is an `OSError`.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

SCHEMES = ("s3", "s3a")
_PART = 16 * 1024 * 1024  # bytes of the first parts of an upload; S3 takes 10,000 parts, so later ones are larger
_LARGER_AFTER = 1000  # parts
_PARTS = 4  # of one upload under way
_BATCH = 1000  # objects that one request can remove
AT_ONCE = 16  # requests under way
T = TypeVar("T")


class OutOfRange(OSError):
    """An object has no such bytes."""


class S3:
    """Objects by ``bucket/key``."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: there are no directories."""

    def invalidate_cache(self) -> None:
        """Nothing is remembered here."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """The object, or its bytes from *start* up to *end*; none behind its end. Raises `FileNotFoundError`."""
        part = {} if start is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        try:
            with _errors(path):
                return bytes(self._client.get_object(**_object(path), **part)["Body"].read())
        except OutOfRange:
            return b""

    def pipe_file(self, path: str, data: bytes) -> None:
        """Make the object be *data*, in one step."""
        with _errors(path):
            self._client.put_object(**_object(path), Body=data)

    def info(self, path: str) -> dict[str, int]:
        """``{"size": bytes}``. Raises `FileNotFoundError`."""
        with _errors(path):
            return {"size": int(self._client.head_object(**_object(path))["ContentLength"])}

    def exists(self, path: str) -> bool:
        """Return whether there is such an object, or one below that name."""
        with suppress(FileNotFoundError):
            self.info(path)
            return True
        with suppress(FileNotFoundError):  # the bucket
            return bool(next(self._pages(path, MaxKeys=1)).get("KeyCount"))
        return False

    def ls(self, path: str, detail: bool = False) -> list[str]:
        """The names directly below. Raises `FileNotFoundError` for a bucket that is not there."""
        found: list[str] = []
        bucket = path.partition("/")[0]
        for page in self._pages(path, Delimiter="/"):
            found += [f"{bucket}/{entry['Prefix'].rstrip('/')}" for entry in page.get("CommonPrefixes", ())]
            found += [f"{bucket}/{entry['Key']}" for entry in page.get("Contents", ()) if entry["Key"][-1] != "/"]
        return found

    def find(self, path: str, detail: bool = True) -> dict[str, dict[str, int]]:
        """``{"size": bytes}`` of every object below, by name. Raises `FileNotFoundError` as `ls` does."""
        bucket = path.partition("/")[0]
        entries = (entry for page in self._pages(path) for entry in page.get("Contents", ()))
        return {
            f"{bucket}/{entry['Key']}": {"size": int(entry["Size"])} for entry in entries if entry["Key"][-1] != "/"
        }

    def rm_file(self, path: str) -> None:
        """Remove one object, if it is there."""
        with _errors(path):
            self._client.delete_object(**_object(path))

    def rm(self, path: str | Sequence[str], recursive: bool = False) -> None:
        """Remove everything below *path*, or the objects that it lists, if they are there."""
        if isinstance(path, str):
            bucket = path.partition("/")[0]
            for page in self._pages(path):
                self._remove(bucket, [entry["Key"] for entry in page.get("Contents", ())])
            return
        for start in range(0, len(path), _BATCH):
            objects = [_object(one) for one in path[start : start + _BATCH]]
            self._remove(objects[0]["Bucket"], [one["Key"] for one in objects])

    def _remove(self, bucket: str, keys: Sequence[str]) -> None:
        if not keys:
            return
        try:
            with _errors(bucket):
                listed = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
                left = self._client.delete_objects(Bucket=bucket, Delete=listed).get("Errors", [])
        except OSError:  # not all stores that speak S3 know this request
            left = [{"Key": key} for key in keys]
        for entry in left:  # says why, where it cannot be removed
            self.rm_file(f"{bucket}/{entry['Key']}")

    def open(self, path: str, mode: str) -> Any:
        """The object front to back (``rb``), or a new one that is there once it is closed (``wb``)."""
        if mode == "wb":
            return _Upload(self._client, path)
        with _errors(path):
            return _Download(path, self._client.get_object(**_object(path))["Body"])

    def _pages(self, path: str, **more: Any) -> Iterator[Mapping[str, Any]]:
        """The listing of what is below *path*."""
        bucket, _, key = path.partition("/")
        with _errors(path):
            prefix = f"{key.rstrip('/')}/" if key else ""
            yield from self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **more)


class _Download(io.RawIOBase):
    """An object that is read once, front to back."""

    def __init__(self, path: str, body: Any) -> None:
        self._path = path
        self._body = body

    def read(self, size: int = -1) -> bytes:
        with _errors(self._path):
            return bytes(self._body.read(None if size < 0 else size))

    def close(self) -> None:
        self._body.close()
        super().close()


class _Upload:
    """A new object, sent in parts, some of them at once; small ones in one piece. It is there after `close`."""

    def __init__(self, client: Any, path: str) -> None:
        self._client = client
        self._path = path
        self._buffer = bytearray()
        self._upload: dict[str, str] = {}  # of a multipart upload
        self._parts: list[dict[str, Any]] = []
        self._sent = 0
        self._under_way: deque[Future[dict[str, Any]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self.closed = False

    def write(self, data: memoryview) -> int:
        self._buffer += data
        size = _PART * (1 + self._sent // _LARGER_AFTER)
        while len(self._buffer) >= size:
            self._send(bytes(self._buffer[:size]))
            del self._buffer[:size]
        return len(data)

    def close(self) -> None:
        """Send what is left, and make the object appear."""
        if self.closed:
            return
        self.closed = True
        with _errors(self._path):
            if not self._upload:
                self._client.put_object(**_object(self._path), Body=bytes(self._buffer))
                return
        try:
            if self._buffer:
                self._send(bytes(self._buffer))
            self._wait(0)
            with _errors(self._path):
                self._client.complete_multipart_upload(
                    **_object(self._path), **self._upload, MultipartUpload={"Parts": self._parts}
                )
        except BaseException:
            self.discard()
            raise
        self._end_threads()

    def discard(self) -> None:
        """Forget it: nothing appears, and nothing that was sent is kept (and paid for)."""
        self.closed = True
        self._end_threads()
        if self._upload:
            with _errors(self._path):
                self._client.abort_multipart_upload(**_object(self._path), **self._upload)
            self._upload = {}

    def _send(self, data: bytes) -> None:
        if self._pool is None:
            with _errors(self._path):
                made = self._client.create_multipart_upload(**_object(self._path))
            self._upload = {"UploadId": made["UploadId"]}
            self._pool = ThreadPoolExecutor(_PARTS, "orc-s3")
        self._wait(_PARTS - 1)
        self._sent += 1
        with _errors(self._path):
            self._under_way.append(submit(self._pool, self._put, self._sent, data))

    def _put(self, number: int, data: bytes) -> dict[str, Any]:
        done = self._client.upload_part(**_object(self._path), **self._upload, PartNumber=number, Body=data)
        return {"PartNumber": number, "ETag": done["ETag"]}

    def _wait(self, most: int) -> None:
        """Until at most *most* parts are under way. Raises what went wrong with one."""
        while len(self._under_way) > most:
            with _errors(self._path):
                self._parts.append(self._under_way.popleft().result())

    def _end_threads(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def open_url(url: str) -> tuple[S3, str]:
    """The store of ``s3://bucket/key``, and ``bucket/key``. Raises `ImportError` without boto3, `ValueError`."""
    parts = urlsplit(url)
    if not parts.netloc:
        raise ValueError("there is no bucket in it")
    return S3(_client(os.getpid())), f"{parts.netloc}{parts.path}".rstrip("/")


@lru_cache(maxsize=1)
def _client(pid: int) -> Any:
    """Return the boto3 client of process *pid*, its own because connections are not shared across a fork."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise ImportError("it needs boto3: pip install boto3") from None
    with _errors("the configuration of AWS"):
        return boto3.client("s3", config=Config(max_pool_connections=AT_ONCE))


def submit(pool: ThreadPoolExecutor, action: Callable[..., T], *arguments: Any) -> Future[T]:
    """Start *action* in *pool*; where the interpreter waits for its last threads, and starts no others, do it here."""
    try:
        return pool.submit(action, *arguments)
    except RuntimeError:
        done: Future[T] = Future()
        done.set_result(action(*arguments))
        return done


def _object(path: str) -> dict[str, str]:
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """Raise what boto3 raises as the `OSError` that a file system would raise."""
    from botocore import exceptions

    try:
        yield
    except exceptions.ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        kind = {403: PermissionError, 404: FileNotFoundError, 416: OutOfRange}.get(status, OSError)
        raise kind(f"s3://{path}: {error}") from None
    except exceptions.BotoCoreError as error:
        raise OSError(f"s3://{path}: {error}") from None

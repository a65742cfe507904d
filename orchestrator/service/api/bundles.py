"""Routes that bring snapshots: the contents, and the manifests that make trees of them.

What clients send is written beside the store, checked, and made visible together. The store is one for all, by digest.
Whoever wants to use a content has to have sent it, so that nobody gets what others have left by asking for its digest,
which job views show.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, BinaryIO

import anyio.to_thread
from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from orc.launchers.errors import BundleError, LaunchError
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.manifest import FILE, SYMLINK, Bundle, Entry
from orc.launchers.snapshot.tree_store import FULL, write_content
from orc.launchers.transfer import wire
from orc.orchestrator.api.access import MissingContents
from orc.orchestrator.api.call import Kind, shows
from orc.orchestrator.api.submitting import missing_contents
from orc.orchestrator.ledger import content_holders
from orc.orchestrator.ledger.store import Ledger
from orc.orchestrator.service.auth import PrincipalDep
from orc.orchestrator.service.context import Service, ServiceDep
from orc.orchestrator.service.errors import ApiError

router = APIRouter(tags=["bundles"])
_LARGEST_MANIFEST = 64 << 20
_PIECE = 1 << 20
_READS = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string"}}}}}


class Received(BaseModel):
    """Contents that were taken."""

    contents: int


@router.put("/bundles/content", response_model=Received, openapi_extra=_READS)
@shows(Kind.OWN)
async def receive_contents(request: Request, service: ServiceDep, principal: PrincipalDep) -> Any:
    """Store contents that match their hashes; all of them or, where one does not, none."""
    store = await anyio.to_thread.run_sync(_store, service)
    with ExitStack() as stack:
        staging = await anyio.to_thread.run_sync(stack.enter_context, store.staging("upload"))
        stream = staging / "stream"
        with stream.open("wb") as file:  # first the whole: a client that is slow holds no thread
            async for piece in _pieces(request):
                await anyio.to_thread.run_sync(_append, file, piece)
        hashes = await anyio.to_thread.run_sync(publish, store, staging, stream)
        await anyio.to_thread.run_sync(_note_holder, service, principal.user, hashes)
    return JSONResponse({"contents": len(hashes)})


@router.put("/bundles/trees/{digest}", response_model=MissingContents, openapi_extra=_READS)
@shows(Kind.OWN)
async def receive_tree(
    request: Request,
    service: ServiceDep,
    principal: PrincipalDep,
    digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$")],
) -> Any:
    """Make a tree of contents that the caller has sent; the answer names those still to be sent, and then there is no
    tree.
    """
    parts: list[bytes] = []
    taken = 0
    async for piece in request.stream():
        taken += len(piece)
        if taken > _LARGEST_MANIFEST:
            raise ApiError(413, f"a manifest has {_LARGEST_MANIFEST} bytes at most")
        parts.append(piece)
    missing = await anyio.to_thread.run_sync(_make_tree, service, principal.user, digest, b"".join(parts))
    return JSONResponse({"missing": missing, "limit": service.settings.max_upload})


def _store(service: Service) -> ContentStore:
    with service.clients.client() as client:  # others have it while contents come in
        return client.workspace.store


def _note_holder(service: Service, user: str, hashes: list[str]) -> None:
    with service.clients.client(writes=True) as client:
        note_holder(client.workspace.ledger, user, hashes)


def _make_tree(service: Service, user: str, digest: str, text: bytes) -> list[str]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError(422, "the manifest is no JSON", where=digest) from None
    if not isinstance(data, dict):
        raise ApiError(422, "the manifest is no object", where=digest)
    try:
        bundle = Bundle.from_dict(data)
    except BundleError as error:
        raise ApiError(422, error.what, where=error.where, hint=error.hint) from None
    if bundle.digest != digest:
        raise ApiError(422, "the manifest is that of another tree", where=digest)
    wanted = [entry.sha256 for entry in bundle.entries if entry.mode != SYMLINK]
    with service.clients.client(writes=True) as client:
        store, ledger = client.workspace.store, client.workspace.ledger
        if missing := missing_contents(client.workspace, user, wanted):
            return missing
        if not store.use(digest) and (missing := _build(store, bundle)):
            return missing
        note_holder(ledger, user, [digest])
    return []


def _build(store: ContentStore, bundle: Bundle) -> list[str]:
    """Make the tree; return the contents that are not there any more, and then there is none."""
    with store.staging(bundle.digest[:16]) as staging:
        if missing := [entry.sha256 for entry in store.missing([bundle])]:  # a collection was faster
            return missing
        store.build(bundle, staging)
    return []


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in pieces that are worth a thread."""
    held: list[bytes] = []
    size = 0
    async for piece in request.stream():
        held.append(piece)
        size += len(piece)
        if size >= _PIECE:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def note_holder(ledger: Ledger, user: str, digests: Sequence[str]) -> None:
    """Remember that *user* has what *digests* name. Raises `LedgerError`."""
    with ledger.transaction() as tx:
        content_holders.add(tx.connection, user, digests, tx.now)


def _append(file: BinaryIO, piece: bytes) -> None:
    """Write the next bytes of a stream of contents. Raises `BundleError`."""
    try:
        file.write(piece)
    except OSError as error:
        raise _explained(error) from None


def publish(store: ContentStore, staging: pathlib.Path, stream: pathlib.Path) -> list[str]:
    """Check the contents of the file *stream*, and make all visible; return their hashes.

    Raises `BundleError` for what is no stream, or has a content twice; `ApiError` for one that is not what it says.
    """
    entries: list[Entry] = []
    try:
        with stream.open("rb") as file:
            for sha256, size, chunks in wire.receive_contents(file, maybe_gzipped=False):
                entry = Entry(sha256, FILE, sha256, size)
                if not write_content(chunks, os.fsencode(staging / "objects" / sha256), entry, 0o400):
                    raise ApiError(422, "the content does not match its hash", where=sha256)
                entries.append(entry)
        store.publish(staging, entries)
    except wire.WireError as error:
        raise BundleError(str(error), hint="submit again") from None
    except FileExistsError as error:
        raise BundleError("the same content comes twice", where=os.fsdecode(error.filename)[-64:]) from None
    except OSError as error:
        raise _explained(error) from None
    return [entry.sha256 for entry in entries]


def _explained(error: OSError) -> LaunchError:
    hint = "an administrator frees some space" if error.errno in FULL else ""
    return BundleError(f"the service cannot store the contents: {error.strerror or error}", hint=hint)

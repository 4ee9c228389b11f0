"""Upload streams: a body is counted, hashed and written to a temporary file; only a small one is held in memory."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS_MEDIA_TYPE
from foreshock_service.platform.body_limits import PARQUET_MEDIA_TYPE
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.media_types import media_type_of
from foreshock_service.platform.problem import LimitExceeded, ProblemError, UnsupportedMediaType
from foreshock_service.platform.store.temporaries import write_private
from foreshock_service.platform.store.tokens import TokenStore

_BLOCK_BYTES = 1 << 20
SMALL_BODY_BYTES = 64 << 10
"""Up to here a body is held in memory: a change of threads, which its file needs, costs more than its bytes."""

# For `openapi_extra` of an endpoint that takes such a body.
PARQUET_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {PARQUET_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


class UploadIncomplete(ProblemError):
    """A connection that ended before the body did."""

    status = 400
    problem_type = "upload-incomplete"


class Upload:
    """A received body: its digest (`sha256:…`), its size in bytes, and its temporary file.

    The file of a small body is written when `path` is first read, in the thread that reads it.
    """

    def __init__(self, store: TokenStore, digest: str, size: int, body: bytes = b"", path: Path | None = None) -> None:
        self.digest = digest
        self.size = size
        self._store = store
        self._body = body
        self._path = path

    @property
    def path(self) -> Path:
        """Return the temporary file."""
        if self._path is None:
            self._path = self._store.temporary_name()
            write_private(self._path, self._body)
        return self._path

    def remove(self) -> None:
        """Delete the file, if there is one."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


STATISTICS_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {STATISTICS_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


def is_small(request: Request, expected: str) -> bool:
    """Return whether the request declares a plain body of the expected type and of SMALL_BODY_BYTES at most."""
    size = request.headers.get("content-length", "")
    is_plain = request.headers.get("content-encoding", "identity") == "identity"
    return is_plain and size.isdecimal() and int(size) <= SMALL_BODY_BYTES and media_type_of(request) == expected


@asynccontextmanager
async def received_upload(
    request: Request, context: ServiceContext, expected: str = PARQUET_MEDIA_TYPE
) -> AsyncIterator[Upload]:
    """Receive the request's body of the expected type into a temporary file, which is deleted afterwards.

    The upload holds a place until then. Raises UnsupportedMediaType (415); before the body is read UploadsBusy (503)
    and TooManyRequests (429); LimitExceeded (413, before the rest is read) and UploadIncomplete.
    """
    media_type = media_type_of(request)
    if media_type != expected:
        raise UnsupportedMediaType(f"send {expected}, not {media_type[:100] or 'a body without a type'}")
    async with context.uploads.place(getattr(request.state, "key_id", None)):
        receiver = _Receiver(context.store)
        upload: Upload | None = None
        try:
            rest = await _receive(request, receiver, context)
            upload = await _received(receiver, rest, context)
            yield upload
        finally:
            (upload or receiver).remove()


class _Receiver:
    """Writes a body to a temporary file and hashes it."""

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        self._path: Path | None = None
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, block: bytes) -> None:
        """Append to the file, which the first call creates."""
        if self._path is None:
            self._path = self._store.temporary_file()
        with self._path.open("ab") as file:
            file.write(block)
        self._digest.update(block)
        self._size += len(block)

    def upload(self) -> Upload:
        """Return what was received."""
        assert self._path is not None, "write comes first"
        return Upload(self._store, "sha256:" + self._digest.hexdigest(), self._size, path=self._path)

    @property
    def has_blocks(self) -> bool:
        """Return whether something was written."""
        return self._path is not None

    def remove(self) -> None:
        """Delete the file, if there is one."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


async def _received(receiver: _Receiver, rest: bytes, context: ServiceContext) -> Upload:
    """Return the upload of what was written and the rest of the body."""
    if not receiver.has_blocks and len(rest) <= SMALL_BODY_BYTES:
        return Upload(context.store, "sha256:" + hashlib.sha256(rest).hexdigest(), len(rest), rest)
    await context.uploads.run(receiver.write, rest)
    return receiver.upload()


async def _receive(request: Request, receiver: _Receiver, context: ServiceContext) -> bytes:
    """Write the body in blocks; return the last one, which is not written."""
    size, block, limit = 0, bytearray(), context.settings.max_body_bytes
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise LimitExceeded(f"the body has more than the {limit:,} bytes of one shard: send smaller shards")
            block += chunk
            if len(block) >= _BLOCK_BYTES:
                await context.uploads.run(receiver.write, bytes(block))
                block.clear()
    except ClientDisconnect as error:
        raise UploadIncomplete("the connection ended before the body did") from error
    return bytes(block)

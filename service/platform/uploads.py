"""Upload streams: a body is counted, hashed and written to a temporary file, never held in memory as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS_MEDIA_TYPE
from service.platform.body_limits import PARQUET_MEDIA_TYPE
from service.platform.context import ServiceContext
from service.platform.problem import LimitExceeded, ProblemError, UnsupportedMediaType
from service.platform.store.tokens import TokenStore

_BLOCK_BYTES = 1 << 20

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


@dataclass(frozen=True, slots=True)
class Upload:
    """A received body: its temporary file, its digest (`sha256:…`) and its size in bytes."""

    path: Path
    digest: str
    size: int


STATISTICS_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {STATISTICS_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


@asynccontextmanager
async def received_upload(
    request: Request, context: ServiceContext, expected: str = PARQUET_MEDIA_TYPE
) -> AsyncIterator[Upload]:
    """Receive the request's body of the expected type into a temporary file, which is deleted afterwards.

    The upload holds a place until then. Raises UnsupportedMediaType (415); before the body is read UploadsBusy (503)
    and TooManyRequests (429); LimitExceeded (413, before the rest is read) and UploadIncomplete.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type != expected:
        raise UnsupportedMediaType(f"send {expected}, not {media_type[:100] or 'a body without a type'}")
    async with context.uploads.place(getattr(request.state, "key_id", None)):
        receiver = _Receiver(context.store)
        try:
            await _receive(request, receiver, context)
            yield receiver.upload()
        finally:
            receiver.remove()


class _Receiver:
    """Writes a body to a temporary file and hashes it. A small body takes one call: each call changes threads."""

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
        return Upload(self._path, "sha256:" + self._digest.hexdigest(), self._size)

    def remove(self) -> None:
        """Delete the file, if there is one."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


async def _receive(request: Request, receiver: _Receiver, context: ServiceContext) -> None:
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
    await context.uploads.run(receiver.write, bytes(block))

"""Upload streams: a body goes to a temporary file, counted and hashed on the way, never into memory as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from service.platform.body_limits import PARQUET_MEDIA_TYPE
from service.platform.context import ServiceContext
from service.platform.problem import LimitExceeded, ProblemError, UnsupportedMediaType

_BLOCK_BYTES = 1 << 20

# For `openapi_extra` of an endpoint that takes a Parquet body.
PARQUET_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {PARQUET_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


class UploadIncomplete(ProblemError):
    """The client went away before the end of its body."""

    status = 400


@dataclass(frozen=True, slots=True)
class Upload:
    """A received body: where it lies until the request ends, its digest (`sha256:…`) and its size in bytes."""

    path: Path
    digest: str
    size: int


@asynccontextmanager
async def received_upload(request: Request, context: ServiceContext) -> AsyncIterator[Upload]:
    """The request's Parquet body in a temporary file, which is gone afterwards.

    Raises UnsupportedMediaType (415), LimitExceeded (413, before the rest is read) and UploadIncomplete.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type != PARQUET_MEDIA_TYPE:
        raise UnsupportedMediaType(f"send {PARQUET_MEDIA_TYPE}, not {media_type[:100] or 'a body without a type'}")
    path = await run_in_threadpool(context.store.temporary_file)
    try:
        with path.open("wb") as file:
            digest, size = await _receive(request, file, context.settings.max_body_bytes)
        yield Upload(path, digest, size)
    finally:
        path.unlink(missing_ok=True)


async def _receive(request: Request, file: BinaryIO, limit: int) -> tuple[str, int]:
    digest, size, block = hashlib.sha256(), 0, bytearray()

    def flush() -> None:
        digest.update(block)
        file.write(block)
        block.clear()

    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise LimitExceeded(f"the body has more than the {limit:,} bytes of one shard: send smaller shards")
            block += chunk
            if len(block) >= _BLOCK_BYTES:
                await run_in_threadpool(flush)
    except ClientDisconnect as error:
        raise UploadIncomplete("the connection ended before the body did") from error
    await run_in_threadpool(flush)
    return "sha256:" + digest.hexdigest(), size

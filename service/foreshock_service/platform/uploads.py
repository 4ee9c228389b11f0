"""Receive uploads into temporary files; the number of uploads at a time is bounded, in all and per key.

Uploads are refused while the disks are nearly full, because deletions and retention write to the database before they
free space.

Uploads have their own threads, so that other requests are served while uploads wait for a decoder. An upload beyond the
bound is refused before its body is read, and the client sends it again later.
"""

import base64
import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect

from foreshock.errors import RolloutsError
from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS_MEDIA_TYPE
from foreshock_service.platform import keys, problem, request_guards
from foreshock_service.platform.database.engine import parse_database_url
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.decoding.pool import DecoderDied, decoding_key
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import TokenStore

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_BLOCK_BYTES = 1 << 20
_SENT_DIGEST = re.compile(r"\bsha-256=:([A-Za-z0-9+/=]*):")
"""The digest in a header Content-Digest (RFC 9530), which a client may send."""


def _binary_body(media_type: str) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "content": content}}


# For `openapi_extra` of an endpoint that takes such a body.
PARQUET_BODY = _binary_body(request_guards.PARQUET_MEDIA_TYPE)
STATISTICS_BODY = _binary_body(STATISTICS_MEDIA_TYPE)


class UploadsBusy(problem.ProblemError, status=503, problem_type="uploads-busy"):
    """Full: as many uploads as the service takes at a time are being received, decoded or stored."""


class UploadIncomplete(problem.ProblemError, status=400, problem_type="upload-incomplete"):
    """A connection that ended before the body did, or a body of another digest than its Content-Digest."""


class UploadPlaces:
    """The places for uploads of one application. For coroutines of one event loop only."""

    def __init__(self, most: int, *, most_of_one_key: int = 0, folders: Sequence[Path] = ()) -> None:
        self.folders = tuple(folders)
        """Folders that must have room before an upload is received."""
        self.most = most
        """Number of places."""
        self.taken = 0
        """Number of places that are taken."""
        self._most_of_one_key = most_of_one_key
        self._taken_by: Counter[str] = Counter()
        # A place needs one thread at a time.
        self._limiter = CapacityLimiter(most)

    @asynccontextmanager
    async def place(self, key_id: str | None = None) -> AsyncIterator[None]:
        """Hold a place; raises UploadsBusy if none is free, TooManyRequests if the key holds as many as it may."""
        if key_id is not None and 0 < self._most_of_one_key <= self._taken_by[key_id]:
            raise keys.TooManyRequests(
                f"this key has {self._most_of_one_key} uploads under way: try again (FORESHOCK_KEY_UPLOADS of the "
                "service bounds them)",
                headers={"Retry-After": "1"},
            )
        if self.taken >= self.most:
            raise UploadsBusy(
                f"{self.most} uploads are under way: try again (FORESHOCK_DECODE_QUEUE bounds them)",
                headers={"Retry-After": "1"},
            )
        self.taken += 1
        if key_id is not None:
            self._taken_by[key_id] += 1
        # The context is copied into the thread that decodes.
        token = decoding_key.set(key_id)
        try:
            yield
        finally:
            decoding_key.reset(token)
            self.taken -= 1
            if key_id is not None:
                self._taken_by[key_id] -= 1

    async def run(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Run a part of an upload, which holds a place, in one of the threads for uploads."""
        return await to_thread.run_sync(partial(function, *arguments, **named), limiter=self._limiter)


@dataclass(frozen=True, slots=True)
class Upload:
    """A received body: its digest (`sha256:…`), its size in bytes, and its temporary file."""

    digest: str
    size: int
    path: Path


@asynccontextmanager
async def received_upload(
    request: Request,
    places: UploadPlaces,
    store: TokenStore,
    most_bytes: int,
    expected: str = request_guards.PARQUET_MEDIA_TYPE,
) -> AsyncIterator[Upload]:
    """Receive the request's body of the expected type into a temporary file, which is deleted afterwards.

    The upload holds a place until then. Before the body is read, raises UnsupportedMediaType (415), UploadsBusy (503),
    TooManyRequests (429) and StorageFull (507); later LimitExceeded (413, at once) and UploadIncomplete (400).

    A client never sends a body again that was refused as invalid. So such a refusal stands only if the file still has
    the length and the digest of what was received; else the disk is at fault, and OSError (EIO) is raised.
    """
    media_type = request_guards.media_type_of(request)
    if media_type != expected:
        raise problem.UnsupportedMediaType(f"send {expected}, not {media_type[:100] or 'a body without a type'}")
    async with places.place(getattr(request.state, "key_id", None)):
        await places.run(check_room, places.folders)
        path = await places.run(store.temporary_file)
        try:
            upload = await _receive(request, places, most_bytes, path)
            try:
                yield upload
            except (RolloutsError, DecoderDied):
                await places.run(_check_kept, upload)
                raise
        finally:
            path.unlink(missing_ok=True)


def _check_kept(upload: Upload) -> None:
    with upload.path.open("rb") as file:
        digest = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    if (digest, size) != (upload.digest, upload.size):
        raise OSError(errno.EIO, f"{upload.size:,} bytes were received, but {size:,} or other bytes are in the file")


async def _receive(request: Request, places: UploadPlaces, most_bytes: int, path: Path) -> Upload:
    """Write the body to `path` in blocks, and hash it."""
    digest, size, written = hashlib.sha256(), 0, 0
    waiting: list[bytes] = []

    def write(file: BinaryIO, chunks: list[bytes]) -> None:
        data = b"".join(chunks)
        file.write(data)
        # The disk may be full at any byte: then this fails, and not the close.
        file.flush()
        digest.update(data)

    # Not a raw file (`buffering=0`): the write of a raw file may store only a part of the data, without an error.
    with path.open("wb") as file:
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > most_bytes:
                    raise problem.LimitExceeded(
                        f"the body has more than the {most_bytes:,} bytes of one shard: send smaller shards"
                    )
                waiting.append(chunk)
                if size - written >= _BLOCK_BYTES:
                    await places.run(write, file, waiting)
                    waiting, written = [], size
        except ClientDisconnect as error:
            raise UploadIncomplete("the connection ended before the body did") from error
        await places.run(write, file, waiting)
    sent = _SENT_DIGEST.search(request.headers.get("content-digest", ""))
    if sent is not None and sent[1] != base64.b64encode(digest.digest()).decode():
        raise UploadIncomplete(
            f"{size:,} bytes arrived, which do not have the Content-Digest of this request: send them again"
        )
    return Upload("sha256:" + digest.hexdigest(), size, path)


def commit_file(
    database: Database, store: TokenStore, file: str, commit: Callable[[Session], tuple[Result, bool]]
) -> tuple[Result, bool]:
    """Run the transaction that names a published file; remove the file if it returns (…, False): it was not needed.

    If the commit itself fails, it may have happened all the same: the file stays, at worst as an orphan.
    """
    may_be_committed = False

    def work(session: Session) -> tuple[Result, bool]:
        nonlocal may_be_committed
        may_be_committed = False
        found, may_be_committed = commit(session)
        return found, may_be_committed

    try:
        return database.write(work)
    finally:
        if not may_be_committed:
            store.remove(file)


# Room on the disks. SQLite opens no database on a full one: a reserve file beside it is deleted at such a start.

_MOST_KEPT_BYTES = 16 << 20
_PART_KEPT = 16
_NEEDED_TO_OPEN = 1 << 20


def folders_to_watch(settings: Settings) -> list[Path]:
    """Return the local folders that uploads fill: the store's, and a SQLite database's."""
    reserve = _reserve(settings)
    folders = [settings.store_folder] if settings.store_is_folder else []
    return folders if reserve is None else [*folders, reserve.parent]


def check_room(folders: Sequence[Path]) -> None:
    """Raise StorageFull if one of these folders has only the room left that deletions and retention need."""
    for folder in folders:
        free, kept = _free_and_kept(folder)
        if free < kept:
            raise problem.StorageFull(
                "the disk is nearly full: nothing was stored; free space or extend it", headers={"Retry-After": "30"}
            )


def free_reserve(settings: Settings) -> None:
    reserve = _reserve(settings)
    if reserve is not None and reserve.exists() and _free_and_kept(reserve.parent)[0] < _NEEDED_TO_OPEN:
        reserve.unlink()


def make_reserve(settings: Settings) -> None:
    reserve = _reserve(settings)
    if reserve is None or reserve.exists():
        return
    free, kept = _free_and_kept(reserve.parent)
    if free > 4 * kept:
        with contextlib.suppress(OSError), open(reserve, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, kept)


def _reserve(settings: Settings) -> Path | None:
    url = parse_database_url(settings.database_url)
    return Path(f"{url.database}.reserve").absolute() if url.get_backend_name() == "sqlite" else None


def _free_and_kept(folder: Path) -> tuple[int, int]:
    """Return a disk's free bytes, and the bytes that uploads must leave free: 16 MiB, or 1/16 of a small disk."""
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free, min(_MOST_KEPT_BYTES, usage.total // _PART_KEPT)

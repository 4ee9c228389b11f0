"""Space of the database and of the token store, and the work that waits in the database."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import BaseModel, Field
from sqlalchemy import Select, func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.schema import current_revision, newest_revision
from foreshock_service.platform.database.tables import AttemptClient, DueReplay, FileRemoval, Run, Step
from foreshock_service.platform.store.opening import is_folder, local_folder

# A client sends a sign of life at least every half a minute.
_HEARD_SECONDS = 120


class Space(BaseModel):
    """Bytes of the file system that holds a folder."""

    free_bytes: int
    total_bytes: int


class StorageRead(BaseModel):
    """What the database and the token store hold, and the room that is left."""

    database_bytes: int
    database_space: Space | None = Field(description="null: PostgreSQL, on a machine of its own")
    revision: str | None = Field(description="migration that the database has")
    newest_revision: str | None = Field(description="migration that this release requires")
    token_store: str = Field(description="`folder` or `s3`")
    token_space: Space | None = Field(description="null: an S3-compatible store, which has no such bound")


class BacklogRead(BaseModel):
    """Work that waits, of all processes."""

    steps_to_fold: int = Field(description="steps with shards that are not in their measurements yet")
    runs_to_replay: int = Field(description="runs whose detectors are to be replayed after late data")
    files_to_remove: int = Field(description="files of deleted or purged rollouts that wait for their grace")
    clients: int = Field(description="clients of running runs that were heard in the last two minutes")
    undelivered_items: int = Field(description="items that wait in the memory or spool of these clients")


def read_storage(context: ServiceContext) -> StorageRead:
    """Return the space that is taken and left. Raises what the database and the file system raise."""
    settings = context.settings
    with context.database.read() as session:
        taken, revision = _database_bytes(session), current_revision(session.connection())
    file = make_url(settings.database_url).database if context.database.is_sqlite else None
    return StorageRead(
        database_bytes=taken,
        database_space=None if file is None else _space(Path(file).absolute().parent),
        revision=revision,
        newest_revision=newest_revision(),
        token_store="folder" if is_folder(settings) else "s3",
        token_space=_space(local_folder(settings)) if is_folder(settings) else None,
    )


def read_backlog(context: ServiceContext) -> BacklogRead:
    """Return the work that waits."""
    heard = AttemptClient.seen_at_us > now_us() - _HEARD_SECONDS * 1_000_000
    clients = select(func.count(), func.coalesce(func.sum(AttemptClient.undelivered), 0))
    with context.database.read() as session:
        # The runs come first: their clients are found by an index.
        found = clients.join(Run, Run.id == AttemptClient.run_id).where(Run.state == "running", heard)
        number, undelivered = session.execute(found).one()
        return BacklogRead(
            steps_to_fold=_count(session, select(Step.run_id).where(Step.folded_shards < Step.received_shards)),
            runs_to_replay=_count(session, select(DueReplay.run_id)),
            files_to_remove=_count(session, select(FileRemoval.file)),
            clients=number,
            undelivered_items=int(undelivered),
        )


def _count(session: Session, query: Select[str]) -> int:
    return int(session.scalar(select(func.count()).select_from(query.subquery())) or 0)


def _database_bytes(session: Session) -> int:
    if session.get_bind().dialect.name == "postgresql":
        return int(session.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    pages, size = (session.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("page_count", "page_size"))
    return int(pages) * int(size)


def _space(folder: Path) -> Space:
    # A folder that does not exist yet will be in the first one above it that does.
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    usage = shutil.disk_usage(existing)
    return Space(free_bytes=usage.free, total_bytes=usage.total)

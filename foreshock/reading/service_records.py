"""Records of the service itself: its state, and the audit. Times are UTC microseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AuditRecord",
    "BacklogRecord",
    "DatabaseRecord",
    "LongPollsRecord",
    "ProcessRecord",
    "ReadinessRecord",
    "ServiceJobRecord",
    "ServiceRecord",
    "SpaceRecord",
    "StorageRecord",
    "UploadsRecord",
]


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One change: `actor` is a key's id, "anonymous", "service" or "console:<user>"; `subject` the id of what changed.

    `project` is None if the whole service changed.
    """

    id: str
    at_us: int
    actor: str
    action: str
    subject: str
    project: str | None = None
    run_id: str | None = None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """The process that answered, one of `processes` at the address."""

    name: str
    process_id: int
    processes: int
    started_at_us: int
    resident_bytes: int
    event_loop_delay_max_seconds: float


@dataclass(frozen=True, slots=True)
class ReadinessRecord:
    """The outcome of each check: "ok", or why it fails."""

    ready: bool
    checks: Mapping[str, str]
    details: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class UploadsRecord:
    """Uploads of the process that answered."""

    in_progress: int
    places: int
    decoding: int
    decoding_places: int
    shards_per_second: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class DatabaseRecord:
    """The database, as the process that answered sees it."""

    kind: str
    writes_waiting: int
    write_p50_seconds: float
    write_p99_seconds: float


@dataclass(frozen=True, slots=True)
class LongPollsRecord:
    """Requests that wait for a change."""

    waiting: int
    hears_other_processes: bool
    reconnects: int


@dataclass(frozen=True, slots=True)
class SpaceRecord:
    """Bytes of the file system that holds a folder."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """What database and token store hold, and the room that is left; None: they are on no disk of this machine."""

    database_bytes: int
    database_space: SpaceRecord | None
    revision: str | None
    newest_revision: str | None
    token_store: str
    token_space: SpaceRecord | None


@dataclass(frozen=True, slots=True)
class BacklogRecord:
    """Work that waits, of all processes."""

    steps_to_fold: int
    runs_to_replay: int
    files_to_remove: int
    clients: int
    undelivered_items: int


@dataclass(frozen=True, slots=True)
class ServiceJobRecord:
    """A background job of the service; `holder` is the process that did it last, `error` the kind of its last error."""

    name: str
    holder: str
    is_running: bool
    runs: int
    started_at_us: int | None = None
    finished_at_us: int | None = None
    leased_until_us: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """The state of the service; `storage` and `backlog` are None if the database does not answer."""

    version: str
    process: ProcessRecord
    readiness: ReadinessRecord
    uploads: UploadsRecord
    database: DatabaseRecord
    long_polls: LongPollsRecord
    storage: StorageRecord | None = None
    backlog: BacklogRecord | None = None
    jobs: tuple[ServiceJobRecord, ...] = ()

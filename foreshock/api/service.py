"""The state of the service itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from foreshock.api.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord(Record):
    """The process that answered."""

    name: str
    """host, process id and a random part: as `holder` of a job"""
    process_id: int
    processes: int
    """processes that serve this address"""
    started_at_us: int
    resident_bytes: int
    event_loop_delay_max_seconds: float
    """of the last minute"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessRecord(Record):
    """The outcome of each check: `ok`, or the reason why it fails."""

    ready: bool
    checks: Mapping[str, str]
    details: Mapping[str, str]
    """`token_pass`: `compiled`, or numpy and why"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadsRecord(Record):
    """Uploads of this process."""

    in_progress: int
    places: int
    decoding: int
    """bodies that are decoded or wait for a decoder"""
    decoding_places: int
    shards_per_second: float
    """stored, over the last minute or since the start"""
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseRecord(Record):
    """The database, as this process sees it."""

    kind: str
    writes_waiting: int
    write_p50_seconds: float
    """of the newest writes, waiting included"""
    write_p99_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPollsRecord(Record):
    """Requests of this process that wait for a change."""

    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRecord(Record):
    """Bytes of the file system that holds a folder."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRecord(Record):
    """What the database and the token store hold, and the room that is left."""

    database_bytes: int
    database_space: SpaceRecord | None
    """null: PostgreSQL, on a machine of its own"""
    revision: str | None
    """migration that the database has"""
    newest_revision: str | None
    """migration that this release requires"""
    token_store: str
    """`folder` or `s3`"""
    token_space: SpaceRecord | None
    """null: an S3-compatible store, which has no such bound"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogRecord(Record):
    """Work that waits, of all processes."""

    steps_to_fold: int
    """steps with shards that are not in their measurements yet"""
    runs_to_replay: int
    """runs whose detectors are to be replayed after late data"""
    files_to_remove: int
    """files of deleted or purged rollouts that wait for their grace"""
    clients: int
    """clients of running runs that were heard in the last two minutes"""
    undelivered_items: int
    """items that wait in the memory or spool of these clients"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceJobRecord(Record):
    """A background job of the process that answered, `holder`; of several processes one does a job at a time."""

    name: str
    holder: str
    is_running: bool
    runs: int
    started_at_us: int | None = None
    finished_at_us: int | None = None
    error: str | None = None
    """kind of the error of its last run; null: it went well, or runs"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord(Record):
    """The state of the service itself."""

    version: str
    process: ProcessRecord
    readiness: ReadinessRecord
    uploads: UploadsRecord
    database: DatabaseRecord
    long_polls: LongPollsRecord
    storage: StorageRecord | None = None
    """null: the database or the store does not answer"""
    backlog: BacklogRecord | None = None
    """null: the database does not answer"""
    jobs: tuple[ServiceJobRecord, ...] = ()

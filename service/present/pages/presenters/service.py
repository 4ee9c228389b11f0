"""The presenter of the service's own health: every number of `GET /v1/service`, with what it means and its source."""

from foreshock.api.service import BacklogRecord, ServiceJobRecord, ServiceRecord, SpaceRecord, StorageRecord
from foreshock_service.present.pages.rendering import DASH, count, moment
from foreshock_service.present.pages.view_models import JobRow, Label, ServiceFigure, ServiceGroup, ServicePage, Tone

# Shares of the file system that are left.
LOW_SPACE, LEAST_SPACE = 0.10, 0.02
# The bar of /livez; trainers and probes of orchestrators feel more than that.
SLOW_LOOP_SECONDS = 0.1
SLOW_WRITE_SECONDS = 1.0
_CHECKS = {
    "database": ("Database", "A transaction that writes can begin and commit."),
    "migrations": ("Migrations", "The database has the migration of this release; `foreshock serve` migrates it."),
    "token_store": ("Token store", "A file can be written to the store of FORESHOCK_STORE_URL."),
    "decoders": ("Decoders", "The processes that decode uploads have started."),
}
_UNITS = ("B", "kB", "MB", "GB", "TB")


def service_page(state: ServiceRecord) -> ServicePage:
    """Return the page of a state of the service."""
    process = state.process
    return ServicePage(
        version=state.version,
        state=Label("ready", "good") if state.readiness.ready else Label("not ready", "critical"),
        process=f"{process.name}, of {process.processes}",
        started=moment(process.started_at_us),
        groups=[
            ServiceGroup("checks", "Readiness", _checks(state)),
            ServiceGroup("uploads", "Uploads", _uploads(state)),
            ServiceGroup("database", "Database", _database(state)),
            ServiceGroup("storage", "Disk space", _storage(state.storage)),
            ServiceGroup("backlog", "Work that waits", _backlog(state.backlog)),
            ServiceGroup("waiting", "This process", _process(state)),
        ],
        jobs=[_job(each) for each in state.jobs],
    )


def bytes_in_words(value: int) -> str:
    """Return a number of bytes with three digits and its decimal unit."""
    size, unit = float(value), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{value} B" if unit == 0 else f"{size:.3g} {_UNITS[unit]}"


def _checks(state: ServiceRecord) -> list[ServiceFigure]:
    tones: dict[bool, Tone] = {True: "", False: "critical"}
    figures = [
        ServiceFigure(
            *(_CHECKS[name][0], outcome, _CHECKS[name][1], f"/readyz: checks.{name}"), tone=tones[outcome == "ok"]
        )
        for name, outcome in state.readiness.checks.items()
    ]
    token_pass = state.readiness.details["token_pass"]
    words = "Compiled kernels measure tokens; uploads before they are compiled, and without numba, use numpy."
    return [*figures, ServiceFigure("Kernels", token_pass, words, "/readyz: details.token_pass")]


def _uploads(state: ServiceRecord) -> list[ServiceFigure]:
    uploads = state.uploads
    full: Tone = "warning" if uploads.in_progress >= uploads.places else ""
    return [
        ServiceFigure(
            "Ingest", f"{count(round(uploads.tokens_per_second))} tokens/s",
            "Tokens that this process stored, over the last minute.", "uploads.tokens_per_second",
        ),
        ServiceFigure(
            "Shards", f"{uploads.shards_per_second:.3g} /s", "Shards that this process stored, over the last minute.",
            "uploads.shards_per_second",
        ),
        ServiceFigure(
            "Uploads under way", f"{uploads.in_progress} of {uploads.places}",
            "Beyond the places uploads get a 503 and come again. Always full: more decoders, or another process.",
            "uploads.in_progress", full,
        ),
        ServiceFigure(
            "Decode queue", f"{uploads.decoding} of {uploads.decoding_places}",
            "Bodies that are decoded or wait for one of `FORESHOCK_DECODE_PROCESSES`.", "uploads.decoding",
        ),
    ]  # fmt: skip


def _database(state: ServiceRecord) -> list[ServiceFigure]:
    database, storage = state.database, state.storage
    slow: Tone = "warning" if database.write_p99_seconds > SLOW_WRITE_SECONDS else ""
    revision = DASH if storage is None else f"{storage.revision} of {storage.newest_revision}"
    return [
        ServiceFigure("Kind", database.kind, "SQLite has one writer and one process.", "database.kind"),
        ServiceFigure("Migration", revision, "That of the database, and that of this release.", "storage.revision"),
        ServiceFigure(
            "Writes that wait", str(database.writes_waiting), "Transactions that wait for the writer of SQLite.",
            "database.writes_waiting",
        ),
        ServiceFigure(
            "Write, median", _seconds(database.write_p50_seconds), "Of the newest writes, waiting included.",
            "database.write_p50_seconds",
        ),
        ServiceFigure(
            "Write, p99", _seconds(database.write_p99_seconds),
            "Of the newest writes. Above 1 s: a slow disk, or more writes than one writer does.",
            "database.write_p99_seconds", slow,
        ),
    ]  # fmt: skip


def _storage(storage: StorageRecord | None) -> list[ServiceFigure]:
    if storage is None:
        return [ServiceFigure("Space", DASH, "The database or the store does not answer.", "storage", "critical")]
    figures = [
        ServiceFigure(
            "Database", bytes_in_words(storage.database_bytes), "Bytes of the database.", "storage.database_bytes"
        )
    ]
    if storage.database_space is not None:
        figures.append(_free("Free for the database", storage.database_space, "storage.database_space"))
    if storage.token_space is not None:
        figures.append(_free("Free for tokens", storage.token_space, "storage.token_space"))
    else:
        figures.append(ServiceFigure("Tokens", "S3", "An S3-compatible store says no bound.", "storage.token_store"))
    return figures


def _free(name: str, space: SpaceRecord, source: str) -> ServiceFigure:
    share = space.free_bytes / max(space.total_bytes, 1)
    tone: Tone = "critical" if share < LEAST_SPACE else "warning" if share < LOW_SPACE else ""
    words = "Without room uploads get a 507 and stay with their clients. `foreshock retention` frees tokens."
    return ServiceFigure(
        name, f"{bytes_in_words(space.free_bytes)} of {bytes_in_words(space.total_bytes)}", words, source, tone
    )


def _backlog(backlog: BacklogRecord | None) -> list[ServiceFigure]:
    if backlog is None:
        return [ServiceFigure("Backlog", DASH, "The database does not answer.", "backlog", "critical")]
    return [
        ServiceFigure(
            "Steps to fold", count(backlog.steps_to_fold),
            "Steps with shards that are not in their measurements: they miss shards, or the service is behind.",
            "backlog.steps_to_fold",
        ),
        ServiceFigure(
            "Runs to replay", count(backlog.runs_to_replay), "Runs whose detectors are replayed after late data.",
            "backlog.runs_to_replay",
        ),
        ServiceFigure(
            "Files to remove", count(backlog.files_to_remove),
            "Files of deleted or purged rollouts, until `FORESHOCK_REMOVAL_GRACE_SECONDS` are over.",
            "backlog.files_to_remove",
        ),
        ServiceFigure(
            "Clients", count(backlog.clients), "Clients of running runs that were heard in the last two minutes.",
            "backlog.clients",
        ),
        ServiceFigure(
            "Not delivered", count(backlog.undelivered_items),
            "Items in the memory or spool of these clients. Growing: the service is slower than the trainers.",
            "backlog.undelivered_items",
        ),
    ]  # fmt: skip


def _process(state: ServiceRecord) -> list[ServiceFigure]:
    process, polls = state.process, state.long_polls
    slow: Tone = "warning" if process.event_loop_delay_max_seconds > SLOW_LOOP_SECONDS else ""
    return [
        ServiceFigure("Memory", bytes_in_words(process.resident_bytes), "Resident; decoders not included.",
                      "process.resident_bytes"),
        ServiceFigure("Event loop", _seconds(process.event_loop_delay_max_seconds),
                      "The longest that a request waited for its turn in the last minute.",
                      "process.event_loop_delay_max_seconds", slow),
        ServiceFigure("Long polls", count(polls.waiting), "Trainers that wait for a change of advice or alerts.",
                      "long_polls.waiting"),
    ]  # fmt: skip


def _job(job: ServiceJobRecord) -> JobRow:
    if job.error is not None:
        state = Label(f"failed: {job.error}", "critical")
    else:
        state = Label("running", "good", live=True) if job.is_running else Label("waits")
    return JobRow(
        name=job.name.replace("_", " "),
        state=state,
        holder=job.holder,
        runs=count(job.runs),
        started=moment(job.started_at_us),
        finished=moment(job.finished_at_us),
    )


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"

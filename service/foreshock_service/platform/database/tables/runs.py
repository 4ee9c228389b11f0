"""Runs, attempts and their setups, steps and the catalogue of their shards, checkpoints, and what was deleted."""

from typing import Any, Literal

from sqlalchemy import ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from foreshock.model_kind import ModelKind, known_model_kind
from foreshock_service.platform.database.tables import base
from foreshock_service.platform.database.tables.base import Base, CompressedBytes, JsonColumn


class Run(Base):
    """One training job. `deleted_at_us` set: a tombstone, so that late uploads are answered with 410.

    `rows_removed_at_us` is set once the rows of a deleted run are gone, and only the tombstone is left.

    `seen_at_us` is the last sign of life of its clients, None if they send none. `rollouts` and `tokens` (of responses)
    count everything received, superseded steps included; they never decrease. `scalar_names` are the run's own names of
    quantities that the detectors read; None: the well-known ones. `evaluation_names` are the logged evaluation rewards
    (None: none). People set `tags`, `note` and `baseline` (the id of a run to compare with). `tracker_url` is the run's
    page in a tracker, `vocabulary` the digest of its token texts.
    """

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("project", "key"), Index(None, "created_at_us", "id"))

    id: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str]
    key: Mapped[str]
    name: Mapped[str | None]
    model: Mapped[str | None]
    trainer: Mapped[str | None]
    engine: Mapped[str | None]
    hardware: Mapped[str | None]
    initial_learning_rate: Mapped[float | None]
    length_cap: Mapped[int | None]
    declared_model_kind: Mapped[str | None]
    derived_model_kind: Mapped[str | None]
    advice_mode: Mapped[str]
    state: Mapped[str]
    last_step: Mapped[int | None]
    rollouts: Mapped[int] = mapped_column(default=0, server_default="0")
    tokens: Mapped[int] = mapped_column(default=0, server_default="0")
    last_shard_at_us: Mapped[int | None]
    seen_at_us: Mapped[int | None]
    created_at_us: Mapped[int]
    updated_at_us: Mapped[int]
    deleted_at_us: Mapped[int | None]
    rows_removed_at_us: Mapped[int | None]
    scalar_names: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    evaluation_names: Mapped[list[str] | None] = mapped_column(JsonColumn)
    tags: Mapped[list[str]] = mapped_column(JsonColumn, default=list, server_default="[]")
    note: Mapped[str | None]
    baseline: Mapped[str | None]
    tracker_url: Mapped[str | None]
    vocabulary: Mapped[str | None]

    @property
    def model_kind(self) -> ModelKind | None:
        """Return the kind of the model: as declared, else as derived from an announced checkpoint, else None."""
        return known_model_kind(self.declared_model_kind) or known_model_kind(self.derived_model_kind)

    @property
    def model_kind_source(self) -> Literal["declared", "checkpoint"] | None:
        if self.model_kind is None:
            return None
        return "checkpoint" if known_model_kind(self.declared_model_kind) is None else "declared"


class VocabularyPart(Base):
    """Part of the texts of token ids, from the id `first` on, that a worker found beside a run's weights."""

    __tablename__ = "vocabularies"

    project: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True)
    first: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    texts: Mapped[list[str]] = mapped_column(base.CompressedJson)


class Attempt(Base):
    """A run's start or resume; attempts of a run count from 1, as they are registered.

    `OLDEST_ATTEMPT_FIRST` is their order in time: a launch may be registered after a later launch.
    """

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "key"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    key: Mapped[str]
    resume_step: Mapped[int]
    fingerprint: Mapped[dict[str, Any]]
    created_at_us: Mapped[int]
    began_at_us: Mapped[int] = mapped_column(server_default="0")


OLDEST_ATTEMPT_FIRST = (Attempt.began_at_us, Attempt.attempt)
NEWEST_ATTEMPT_FIRST = tuple(column.desc() for column in OLDEST_ATTEMPT_FIRST)


class AttemptClient(Base):
    """A client process that logs an attempt: its last sign of life, the items that it could not deliver, and what the
    hook of its framework warns of (NULL: nothing)."""

    __tablename__ = "attempt_clients"
    __table_args__ = (base.references("attempts"), Index(None, "run_id", "seen_at_us"))

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    client: Mapped[str] = mapped_column(primary_key=True)
    shard: Mapped[int | None]
    undelivered: Mapped[int]
    rejected: Mapped[int]
    dropped: Mapped[int]
    invalid: Mapped[int]
    reason: Mapped[str | None]
    remarks: Mapped[list[str] | None] = mapped_column(base.CompressedJson)
    seen_at_us: Mapped[int]


class RunSetup(Base):
    """A setup that shards of a run name, as JSON. `steps.setups` lists the numbers, which count from 1."""

    __tablename__ = "run_setups"
    __table_args__ = (UniqueConstraint("run_id", "digest"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str]
    setup: Mapped[str]


class AnnouncedChange(base.RowOfStep, Base):
    """A change that the trainer announced; `values` has `before` and `after`, if they were given."""

    __tablename__ = "announced_changes"
    __table_args__ = (base.references("attempts"),)

    kind: Mapped[str] = mapped_column(primary_key=True)
    note: Mapped[str | None]
    values: Mapped[dict[str, Any]]
    announced_at_us: Mapped[int]


class Checkpoint(base.RowOfStep, Base):
    """Weights under a root that the worker's own configuration names; `path` is relative to it."""

    __tablename__ = "checkpoints"
    __table_args__ = (base.references("attempts"),)

    root: Mapped[str]
    path: Mapped[str]
    format: Mapped[str]
    digest: Mapped[str]
    model_kind: Mapped[str | None]
    weights_version: Mapped[int | None]
    expires_at_us: Mapped[int | None]
    announced_at_us: Mapped[int]


class WeightsReport(Base):
    """Weights after a sync: of the trainer (`holder` "trainer", "variant:…"), or held by an engine ("engine:…").

    `report` has digests by tensor, NULL once it is no longer kept. `verdict` is the notary's verdict on an engine, and
    `is_right` its result. Both are compressed JSON that the decoder makes: it takes too long for the writer. `engines`
    is the number of engines, if the report gives it.
    """

    __tablename__ = "weights_reports"
    __table_args__ = (base.references("attempts"),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder: Mapped[str] = mapped_column(primary_key=True)
    report: Mapped[bytes | None]
    verdict: Mapped[bytes | None]
    is_right: Mapped[bool | None]
    engines: Mapped[int | None]
    received_at_us: Mapped[int]


def _where(name: str, condition: str, *columns: str) -> Index:
    return Index(name, *columns, sqlite_where=text(condition), postgresql_where=text(condition))


class Step(base.RowOfStep, Base):
    """All rollouts of one training step in one attempt; `closed_at_us` is set once it is folded.

    `folded_shards` is the number of shards that its measurements include. While it is below `received_shards` the step
    is open, or a late shard waits to be folded.
    """

    __tablename__ = "steps"
    __table_args__ = (
        base.references("attempts"),
        _where("ix_steps_unfolded", "folded_shards < received_shards", "last_shard_at_us"),
        # These two hold few steps; each answer with curves lists them.
        _where(
            "ix_steps_incomplete",
            "closed_at_us IS NOT NULL AND received_shards < expected_shards",
            *("run_id", "attempt", "step"),
        ),
        _where("ix_steps_sent_as_statistics", "full_rollouts IS NOT NULL", "run_id", "attempt", "step"),
    )

    expected_shards: Mapped[int]
    received_shards: Mapped[int]
    folded_shards: Mapped[int]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    # Rollouts that are stored in full, and their response tokens; NULL: all rollouts of the step are.
    full_rollouts: Mapped[int | None]
    full_tokens: Mapped[int | None]
    # Numbers of the shards' setups, ascending, separated by commas; NULL: no shard names one.
    setups: Mapped[str | None]
    first_shard_at_us: Mapped[int]
    last_shard_at_us: Mapped[int]
    closed_at_us: Mapped[int | None]
    # Set by retention: the tokens of all its shards are purged.
    tokens_purged_at_us: Mapped[int | None]


class Shard(base.RowOfStep, Base):
    """The catalogue: a row here is the commit point of an upload. `file` is relative to the token store.

    `tokens_purged_at_us` is set by retention: `file` is no longer in the store.
    """

    __tablename__ = "shards"
    __table_args__ = (base.references("steps"),)

    shard: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str]
    body_bytes: Mapped[int]
    file: Mapped[str]
    file_bytes: Mapped[int]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    # Rollouts in `file` and their response tokens; NULL: all. They are fewer if the client sent statistics, or if
    # they were purged. The first `sampled_rollouts` of them are an unbiased sample.
    full_rollouts: Mapped[int | None]
    full_tokens: Mapped[int | None]
    sampled_rollouts: Mapped[int | None]
    tokens_purged_at_us: Mapped[int | None]
    rollout_set_digest: Mapped[str]
    received_at_us: Mapped[int]


class ShardStatistics(base.RowOfStep, Base):
    """Statistics of one shard: one row per comparison (`rollout` for lengths, rewards and the like).

    A shard that is the whole step has no rows: the step's `measurement_statistics` holds the same bytes.
    """

    __tablename__ = "shard_statistics"
    __table_args__ = (base.references("shards"),)

    shard: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    comparison: Mapped[str] = mapped_column(primary_key=True)
    statistics_version: Mapped[int]
    statistics: Mapped[bytes] = mapped_column(CompressedBytes)
    summaries: Mapped[bytes | None] = mapped_column(CompressedBytes)


class FileRemoval(Base):
    """A file of the token store that no other row names, removed once `due_at_us` is past.

    It outlives its run: a run's rows may be deleted before its files.
    """

    __tablename__ = "file_removals"
    __table_args__ = (Index(None, "due_at_us"),)

    file: Mapped[str] = mapped_column(primary_key=True)
    file_bytes: Mapped[int]
    reason: Mapped[str]
    due_at_us: Mapped[int]

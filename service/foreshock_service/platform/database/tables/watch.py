"""Tables of measurements, scalars and lint, and of alerts, diagnoses, advice and notifications."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from foreshock.measures.registry import MEASURES
from foreshock_service.platform.database.tables import base
from foreshock_service.platform.database.tables.base import Base, CompressedBytes, CompressedJson, JsonColumn

MEASUREMENT_KEY = ("run_id", "attempt", "step", "comparison")

# A measure is NULL if it is not estimable or does not apply to the comparison.
measurements = sa.Table(
    "measurements",
    Base.metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("attempt", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("comparison", sa.String, primary_key=True),
    *(sa.Column(measure.column, sa.Double) for measure in MEASURES),
    # True if only some of the step's rollouts were compared, as in a probe of a sample.
    sa.Column("from_sample", sa.Boolean, nullable=False),
    sa.Column("computed_at_us", sa.BigInteger, nullable=False),
    base.references("attempts"),
)


class MeasurementStatistics(base.RowOfStep, Base):
    """The folded statistics that a measurement row was computed from; buckets and sequence measures come from them."""

    __tablename__ = "measurement_statistics"
    __table_args__ = (base.references("attempts"),)

    comparison: Mapped[str] = mapped_column(primary_key=True)
    statistics_version: Mapped[int]
    statistics: Mapped[bytes] = mapped_column(CompressedBytes)
    summaries: Mapped[bytes | None] = mapped_column(CompressedBytes)


class NewestMeasurement(Base):
    """The newest step that has a comparison, in the attempt with the highest number: cached curves go up to it.

    /metrics shows the newest active step, `shown_step` (−1: none). `revision` grows whenever a measurement of the
    comparison is stored. `rewritten` is the revision of the last one that did not add a newer step. `buckets`, of the
    shown step: the tokens, then the mean k3, float64, of each bucket of probability; NULL if not kept.
    """

    __tablename__ = "newest_measurements"
    __table_args__ = (base.references("attempts"),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    comparison: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    step: Mapped[int]
    revision: Mapped[int]
    rewritten: Mapped[int]
    shown_attempt: Mapped[int]
    shown_step: Mapped[int]
    buckets: Mapped[bytes | None]


class Scalar(base.RowOfStep, Base):
    """One value; NULL if the source reported a number that is not finite."""

    __tablename__ = "scalars"
    __table_args__ = (base.references("attempts"),)

    source: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    received_at_us: Mapped[int]


class ShardLint(base.RowOfStep, Base):
    """The evidence of one shard, and examples by check."""

    __tablename__ = "shard_lint"
    __table_args__ = (base.references("shards"),)

    shard: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    statistics_version: Mapped[int]
    evidence: Mapped[bytes] = mapped_column(CompressedBytes)
    examples: Mapped[dict[str, Any]]


class StepLint(base.RowOfStep, Base):
    """The lint's verdict on a closed step: its report, and the severity of each warning by its name.

    `severity` is the worst one, NULL if all are `info` or there are none. The sums of the surprisal test add up over
    the steps of a run. `sources` has the number and the sum of the rewards of each data source, if there are several,
    `prompts` the least hashes of the prompts.
    """

    __tablename__ = "step_lint"
    __table_args__ = (base.references("steps"), sa.Index(None, "run_id", "severity"))

    severity: Mapped[str | None]
    warnings: Mapped[dict[str, Any]]
    report: Mapped[dict[str, Any]] = mapped_column(CompressedJson)
    surprisal_tokens: Mapped[int]
    surprisal: Mapped[float]
    entropy: Mapped[float]
    surprisal_variance: Mapped[float]
    largest_surprisal: Mapped[float]
    sources: Mapped[dict[str, Any] | None]
    prompts: Mapped[list[int] | None] = mapped_column(JsonColumn)


class StoredFinding(Base):
    """A finding over the active steps of a run. `sentence` and `confidence` are those of `newest_step`."""

    __tablename__ = "findings"
    __table_args__ = (sa.Index(None, "changed_at_us", "run_id", "source", "name"),)

    run_id: Mapped[str] = mapped_column(sa.ForeignKey("runs.id"), primary_key=True)
    source: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    severity: Mapped[str]
    title: Mapped[str]
    sentence: Mapped[str]
    remedy: Mapped[str | None]
    steps: Mapped[int]
    first_step: Mapped[int]
    newest_step: Mapped[int]
    confidence: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    changed_at_us: Mapped[int]


class Alert(Base):
    """A rule that fired at a step. `version` increases with every change of any alert of the run.

    `changed_by` is `detector`, `operator` or `rewind`; `cleared_step` is the step at which the rule no longer fired.
    `opened_at_us` is the newest opening: an alert whose rule fires again at the same step opens again. `quiet`: nobody
    is told of its state: an upgrade, or late data of a run that has ended, changed it in steps that were judged before.
    """

    __tablename__ = "alerts"
    __table_args__ = (
        base.references("attempts"),
        sa.UniqueConstraint("run_id", "attempt", "rule", "step"),
        sa.Index(None, "run_id", "state"),
        sa.Index(None, "run_id", "version"),
        sa.Index(None, "run_id", "step"),
        sa.Index(None, "run_id", "cleared_step"),
        sa.Index(None, "changed_at_us"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str]
    attempt: Mapped[int]
    rule: Mapped[str]
    step: Mapped[int]
    severity: Mapped[str]
    value: Mapped[float]
    threshold: Mapped[float]
    why: Mapped[str]
    what_to_do: Mapped[str]
    moves_learning_rate: Mapped[bool]
    evidence: Mapped[dict[str, Any]]
    state: Mapped[str]
    cleared_step: Mapped[int | None]
    changed_by: Mapped[str]
    version: Mapped[int]
    opened_at_us: Mapped[int]
    changed_at_us: Mapped[int]
    quiet: Mapped[bool] = mapped_column(default=False, server_default=sa.false())


class StoredDiagnosis(Base):
    """The diagnosis of a run; `document` has all of it, the columns are for queries.

    `revision` grows with each change of the content. `judged_by` is the version of the judge; a diagnosis of another
    version is computed again, unless its run has ended. `awaits_shards`: the diagnosis names shards that an open step
    waits for. The verdict is the same since `verdict_revision`; `quiet`: an upgrade has changed it, and nobody is told.
    """

    __tablename__ = "diagnoses"

    run_id: Mapped[str] = mapped_column(sa.ForeignKey("runs.id"), primary_key=True)
    revision: Mapped[int]
    verdict: Mapped[str]
    verdict_revision: Mapped[int]
    since_step: Mapped[int | None]
    headline: Mapped[str]
    short: Mapped[str]
    observed_step: Mapped[int | None]
    awaits_shards: Mapped[bool]
    judged_by: Mapped[str]
    document: Mapped[dict[str, Any]]
    changed_at_us: Mapped[int]
    quiet: Mapped[bool] = mapped_column(default=False, server_default=sa.false())


class DetectorSnapshot(base.RowOfStep, Base):
    """The detectors' state after a step of the active history; rows with `milestone` are kept.

    A state that is missing or was written by another release is derived again.
    """

    __tablename__ = "detector_snapshots"
    __table_args__ = (
        base.references("attempts"),
        sa.Index(None, "run_id", "step"),
        sa.Index(None, "run_id", "milestone", "step"),
    )

    configuration_digest: Mapped[str]
    milestone: Mapped[bool]
    # Not a CompressedBytes: one that is damaged must not keep the row from being read.
    state: Mapped[bytes]


class DueMark(Base):
    """A mark that a run must be advanced, added with each change of what its results come from (`runs/due.py`).

    `from_step`: the detectors judge the steps from it on again; NULL: no step. `source`: its findings are read again.
    Nobody is told of what is found in the steps up to `judged_until`; −1: of none.
    """

    __tablename__ = "due_marks"
    __table_args__ = (sa.Index(None, "run_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(sa.ForeignKey("runs.id"))
    from_step: Mapped[int | None]
    source: Mapped[str | None]
    judged_until: Mapped[int]


class ScalarTail(Base):
    """The newest step with watched scalars in a run without rollouts: no later step closes it.

    It closes `FORESHOCK_STEP_GRACE_SECONDS` after its last scalars, or when the run ends; then `closed` is true.
    """

    __tablename__ = "scalar_tails"

    run_id: Mapped[str] = mapped_column(sa.ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int]
    step: Mapped[int]
    received_at_us: Mapped[int]
    closed: Mapped[bool]


class AdviceDecision(Base):
    """One decision; rows are added, never changed. `decision` holds all of it; the columns are for queries."""

    __tablename__ = "advice_decisions"

    run_id: Mapped[str] = mapped_column(sa.ForeignKey("runs.id"), primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    kind: Mapped[str]
    effective_from_step: Mapped[int]
    reason: Mapped[str]
    author: Mapped[str]
    made_at_us: Mapped[int]
    decision: Mapped[dict[str, Any]]


class FoldedAdvice(Base):
    """The state that a run's log of decisions folds to, so that nothing folds the log again; of its newest revision.

    `state` has the newest points, `earlier_points` the others: a scrape reads the former only. A
    state that another release wrote is folded from the log.
    """

    __tablename__ = "folded_advice"

    run_id: Mapped[str] = mapped_column(sa.ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int]
    revision: Mapped[int]
    state: Mapped[dict[str, Any]]
    earlier_points: Mapped[list[Any]] = mapped_column(JsonColumn)


class AdviceAcknowledgement(base.RowOfStep, Base):
    """The learning rate and the scale that a trainer reported for a step, and the revision of the advice it used."""

    __tablename__ = "advice_acknowledgements"
    __table_args__ = (base.references("attempts"),)

    revision: Mapped[int]
    applied_learning_rate: Mapped[float]
    applied_scale: Mapped[float | None]
    received_at_us: Mapped[int]


class LeverAcknowledgement(Base):
    """What a trainer last reported of a lever beside the rate: the value that it uses, or why it refuses the advice."""

    __tablename__ = "lever_acknowledgements"
    __table_args__ = (base.references("attempts"),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    lever: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int]
    revision: Mapped[int]
    done: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    refused: Mapped[str | None]
    received_at_us: Mapped[int]


class TrainerProgress(Base):
    """The newest step for which a trainer that follows the advice requested, and so received, a scale."""

    __tablename__ = "trainer_progress"
    __table_args__ = (base.references("attempts"),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    polled_step: Mapped[int]


class KnownTarget(Base):
    """A target of notifications and the time since when it is configured. It gets no older alerts of ended runs."""

    __tablename__ = "known_targets"

    target: Mapped[str] = mapped_column(primary_key=True)
    since_us: Mapped[int]


class Notification(Base):
    """A message to one target: an alert was opened or resolved, or a run has another verdict; at most one for each.

    `occurrence` tells the openings of one alert apart by its `opened_at_us`, and verdicts by the diagnosis's revision.
    `state` is `pending`, `sent`, `dropped` (it is obsolete) or `failed`.
    """

    __tablename__ = "notifications"
    __table_args__ = (
        sa.UniqueConstraint("target", "alert_id", "change", "occurrence"),
        sa.Index(None, "target", "state", "due_at_us"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    target: Mapped[str]
    run_id: Mapped[str] = mapped_column(sa.ForeignKey("runs.id"))
    alert_id: Mapped[str]
    change: Mapped[str]
    occurrence: Mapped[int]
    state: Mapped[str]
    tries: Mapped[int]
    due_at_us: Mapped[int]
    error: Mapped[str | None]
    created_at_us: Mapped[int]
    sent_at_us: Mapped[int | None]

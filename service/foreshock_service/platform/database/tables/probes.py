"""Probes, their jobs and leases, their results, the known workers, policies of automatic probes, and certificates."""

from typing import Any

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base, CompressedJson, JsonColumn, RowOfStep, references


class Probe(Base):
    """A request to score rollouts of one step. The rollouts and the checkpoint are pinned when it is made.

    `selection` is `[[shard, digest], …]`: the shards whose rollouts are scored. `max_rollouts` set: only that many.
    `exact_pairs` are the comparisons `target/behaviour` that are computed over the whole vocabulary.
    `priority` is the requested one; None: the service chooses the priority of the jobs.
    `candidates` are the other checkpoints that the doctor tries, in this order; `budget_seconds` is its time.
    """

    __tablename__ = "probes"
    __table_args__ = (
        references("steps"),
        UniqueConstraint("run_id", "request_digest"),
        Index(None, "run_id", "created_at_us", "id"),
        Index(None, "created_at_us", "id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str]
    attempt: Mapped[int]
    step: Mapped[int]
    kind: Mapped[str]
    request_digest: Mapped[str]
    scorers: Mapped[list[dict[str, str]]] = mapped_column(JsonColumn)
    exact_pairs: Mapped[list[str]]
    options: Mapped[dict[str, Any]]
    accelerator: Mapped[str | None]
    environment: Mapped[str | None]
    max_rollouts: Mapped[int | None]
    priority: Mapped[str | None]
    checkpoint: Mapped[dict[str, Any]]
    checkpoint_expires_at_us: Mapped[int | None]
    candidates: Mapped[list[dict[str, Any]] | None] = mapped_column(JsonColumn)
    budget_seconds: Mapped[float | None]
    selection: Mapped[list[list[Any]]] = mapped_column(JsonColumn)
    rollouts: Mapped[int]
    tokens: Mapped[int]
    rollout_set_digest: Mapped[str]
    from_sample: Mapped[bool]
    created_at_us: Mapped[int]


class ProbeJob(Base):
    """A part of a probe that one worker does. `fencing_token` grows with every lease and is never reused.

    `engine` is unique in a probe: the engine's name, the scorer's for a job that was split from its engine's job,
    `exact.` and the pair, or `layers` for a comparison by layer, whose scorers send no scores. `needs` names its
    scorers, pairs and abilities: a worker must offer them all. `reasons` keeps the
    failure of each try; `lease_id` and `lease_expires_at_us` are set while it is leased. `environments` names the
    environments to score in, best first; empty: any. `environment_required`: no other is accepted.
    `environment` is that of the newest try, None if its worker ran unchanged. The queued job with the lowest `rank_us`,
    which follows from `priority` and `queued_at_us`, is leased first. `doing` is what the worker tries now, by its
    newest heartbeat.
    """

    __tablename__ = "probe_jobs"
    __table_args__ = (UniqueConstraint("probe_id", "engine"), Index(None, "state", "rank_us", "id"))

    id: Mapped[str] = mapped_column(primary_key=True)
    probe_id: Mapped[str] = mapped_column(ForeignKey("probes.id"))
    engine: Mapped[str]
    scorers: Mapped[list[dict[str, str]]] = mapped_column(JsonColumn)
    exact_pairs: Mapped[list[str]]
    needs: Mapped[list[str]]
    accelerator: Mapped[str | None]
    environments: Mapped[list[str]]
    environment_required: Mapped[bool]
    environment: Mapped[str | None]
    state: Mapped[str]
    tries: Mapped[int]
    fencing_token: Mapped[int]
    lease_id: Mapped[str | None]
    lease_expires_at_us: Mapped[int | None]
    worker: Mapped[str | None]
    reason: Mapped[str | None]
    reasons: Mapped[list[str]]
    priority: Mapped[str]
    queued_at_us: Mapped[int]
    rank_us: Mapped[int]
    doing: Mapped[str] = mapped_column(server_default="")
    finished_at_us: Mapped[int | None]


class Lease(Base):
    """One try of a job by one worker; kept after it ended, with its outcome."""

    __tablename__ = "leases"
    __table_args__ = (UniqueConstraint("job_id", "token"), Index(None, "outcome", "accelerator"))

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("probe_jobs.id"))
    token: Mapped[int]
    project: Mapped[str]
    worker: Mapped[str]
    accelerator: Mapped[str]
    device_name: Mapped[str]
    outcome: Mapped[str | None]


class RemovedFailures(Base):
    """Failed tries of runs whose rows were removed: the exporter's counter must not decrease."""

    __tablename__ = "removed_failures"

    project: Mapped[str] = mapped_column(primary_key=True)
    accelerator: Mapped[str] = mapped_column(primary_key=True)
    tries: Mapped[int]


class Worker(Base):
    """A worker that asked for jobs. `project` is that of its key, empty if the key is bound to none."""

    __tablename__ = "workers"

    project: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    accelerator: Mapped[str]
    device_name: Mapped[str]
    environments: Mapped[list[str]]
    scorers: Mapped[list[str]]
    exact_pairs: Mapped[list[str]]
    first_seen_at_us: Mapped[int]
    last_seen_at_us: Mapped[int]


class ScoreFile(Base):
    """The catalogue of files of scores: a row is an upload's commit point. `file` is relative to the store.

    Files belong to the try (`token`) that sent them; they count once that try completed its job.
    """

    __tablename__ = "score_files"

    job_id: Mapped[str] = mapped_column(ForeignKey("probe_jobs.id"), primary_key=True)
    token: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    scorer: Mapped[str] = mapped_column(primary_key=True)
    variant: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[str]
    body_bytes: Mapped[int]
    file: Mapped[str]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    fingerprint_digest: Mapped[str]
    fingerprint: Mapped[dict[str, Any]]


class Score(RowOfStep, Base):
    """A finished score of a step: which job and try made it, and so which file holds its values."""

    __tablename__ = "scores"
    __table_args__ = (references("steps"), Index(None, "job_id"))

    rollout_set_digest: Mapped[str] = mapped_column(primary_key=True)
    scorer: Mapped[str] = mapped_column(primary_key=True)
    fingerprint_digest: Mapped[str] = mapped_column(primary_key=True)
    variant: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[dict[str, Any]]
    job_id: Mapped[str] = mapped_column(ForeignKey("probe_jobs.id"))
    token: Mapped[int]
    accelerator: Mapped[str]
    device_name: Mapped[str]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    from_sample: Mapped[bool]
    published_at_us: Mapped[int]


class ProbeResult(Base):
    """A result that one try of a job sent as a document; it counts once that try completed its job.

    `kind` is the kind of its probe (`foreshock.probe_kinds`). `pair` is its comparison, empty if it has none.
    """

    __tablename__ = "probe_results"
    __table_args__ = (references("steps"), Index(None, "run_id", "attempt", "step", "kind", "published_at_us"))

    job_id: Mapped[str] = mapped_column(ForeignKey("probe_jobs.id"), primary_key=True)
    token: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    run_id: Mapped[str]
    attempt: Mapped[int]
    step: Mapped[int]
    kind: Mapped[str]
    pair: Mapped[str]
    document: Mapped[dict[str, Any]]
    published_at_us: Mapped[int | None]


class Attribution(RowOfStep, Base):
    """The attribution of a step. `stale`: scores or rollouts arrived since `document` was computed."""

    __tablename__ = "attributions"
    __table_args__ = (references("steps"), Index(None, "stale", "changed_at_us"))

    stale: Mapped[bool]
    changed_at_us: Mapped[int]
    document: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    computed_at_us: Mapped[int | None]


class ProbePolicy(Base):
    """Which steps of a run are probed automatically, as it was sent; a run without a row has no automatic probes."""

    __tablename__ = "probe_policies"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    policy: Mapped[dict[str, Any]]
    changed_at_us: Mapped[int]


class PolicyProbe(Base):
    """A step for which the policy made a probe, once; `probe_id` is None if the step could not be probed."""

    __tablename__ = "policy_probes"
    __table_args__ = (Index(None, "probe_id"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    probe_id: Mapped[str | None] = mapped_column(ForeignKey("probes.id"))


class StoredCertificate(Base):
    """A certificate whole, and in short as lists have it. `digest` is that of the document as canonical JSON."""

    __tablename__ = "certificates"
    __table_args__ = (UniqueConstraint("project", "digest"), Index(None, "created_at_us", "id"))

    id: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str]
    digest: Mapped[str]
    summary: Mapped[dict[str, Any]] = mapped_column(CompressedJson)
    document: Mapped[dict[str, Any]] = mapped_column(CompressedJson)
    created_at_us: Mapped[int]

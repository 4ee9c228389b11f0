"""Leases: a job, its weights and rollouts, as a worker gets them."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from foreshock.api.probes import ScorerRecord
from foreshock.api.records import Record
from foreshock.probe_kinds import DOCTOR_SECONDS


class JobWeightsRecord(Record):
    """The place of the weights: `path` below a root that the worker's own configuration names."""

    root: str
    path: str
    format: str = "hf_safetensors"
    digest: str
    step: int
    weights_version: int | None = None
    run: str = ""
    """the title of the run that announced them, if it is another one"""


class JobRolloutsRecord(Record):
    """The rollouts to score."""

    count: int
    tokens: int
    """response tokens"""
    digest: str
    """digest of the set of their sample ids"""


class LeasedJobRecord(Record):
    """The job of a lease."""

    id: str
    probe: str
    run: str
    project: str = ""
    """of the run; the worker's weights roots are bound to projects"""
    attempt: int
    step: int
    kind: str = "exact"
    scorers: tuple[ScorerRecord, ...]
    exact_pairs: tuple[str, ...] = ()
    """comparisons `target/behaviour` over the whole vocabulary"""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """options by scorer"""
    environment: str | None = None
    """the environment to score in; null: as the worker is"""
    checkpoint: JobWeightsRecord
    candidates: tuple[JobWeightsRecord, ...] = ()
    """of the doctor: the other weights to try, in this order"""
    budget_seconds: float = DOCTOR_SECONDS
    """of the doctor: the time for its replays"""
    wants_vocabulary: bool = False
    """whether the service has no texts of the run's token ids yet"""
    rollouts: JobRolloutsRecord


class LeaseRecord(Record):
    """A lease of a job. The worker sends `token` with each later request; heartbeats extend the lease."""

    lease: str
    token: int
    expires_at_us: int
    """end of the lease by the database's clock"""
    heartbeat_seconds: float
    """interval of heartbeats"""
    job: LeasedJobRecord

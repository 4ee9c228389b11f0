"""Leases: a job, its weights and rollouts, as a worker gets them."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

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
    run: Annotated[str, "the title of the run that announced them, if it is another one"] = ""


class JobRolloutsRecord(Record):
    """The rollouts to score."""

    count: int
    tokens: Annotated[int, "response tokens"]
    digest: Annotated[str, "digest of the set of their sample ids"]


class LeasedJobRecord(Record):
    """The job of a lease."""

    id: str
    probe: str
    run: str
    project: Annotated[str, "of the run; the worker's weights roots are bound to projects"] = ""
    attempt: int
    step: int
    kind: str = "exact"
    scorers: tuple[ScorerRecord, ...]
    exact_pairs: Annotated[tuple[str, ...], "comparisons `target/behaviour` over the whole vocabulary"] = ()
    options: Annotated[Mapping[str, Mapping[str, Any]], "options by scorer"] = field(default_factory=dict)
    environment: Annotated[str | None, "the environment to score in; null: as the worker is"] = None
    checkpoint: JobWeightsRecord
    candidates: Annotated[tuple[JobWeightsRecord, ...], "of the doctor: the other weights to try, in this order"] = ()
    budget_seconds: Annotated[float, "of the doctor: the time for its replays"] = DOCTOR_SECONDS
    wants_vocabulary: Annotated[bool, "whether the service has no texts of the run's token ids yet"] = False
    rollouts: JobRolloutsRecord


class LeaseRecord(Record):
    """A lease of a job. The worker sends `token` with each later request; heartbeats extend the lease."""

    lease: str
    token: int
    expires_at_us: Annotated[int, "end of the lease by the database's clock"]
    heartbeat_seconds: Annotated[float, "interval of heartbeats"]
    job: LeasedJobRecord

"""Probes: their jobs, the policy of automatic ones, the hardware that they run on."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from foreshock.api.records import Record

JobStateName = Literal["queued", "running", "done", "failed", "skipped"]
PriorityName = Literal["normal", "urgent"]


class ScorerRecord(Record):
    """A scorer and its variant: empty, or `rebatched` for its noise floor."""

    scorer: str
    variant: str = ""

    @property
    def name(self) -> str:
        """The scorer's name with its variant, for messages."""
        return f"{self.scorer} ({self.variant})" if self.variant else self.scorer


class JobRecord(Record):
    """A part of a probe that one worker does; `attempts` counts its tries."""

    id: str
    engine: str
    scorers: tuple[ScorerRecord, ...] = ()
    exact_pairs: tuple[str, ...] = ()
    state: JobStateName
    attempts: int
    reason: str | None = None
    """why it failed or was skipped; queued: the scorers that no live worker offers, null if one does"""
    reasons: tuple[str, ...] = ()
    """the failure of each try"""
    worker: str | None = None
    accelerator: str | None = None
    priority: PriorityName
    environments: tuple[str, ...] = ()
    """names of the environments to score in, best first; empty: any"""
    environment: str | None = None
    """the one that it is scored in; null: queued, or as its worker is"""
    environment_note: str | None = None
    """why it is not scored in one of `environments`"""
    doing: str = ""
    """what it is trying at the moment, as its worker's last heartbeat has it"""


class ProbeRecord(Record):
    """A probe with its jobs. Its state and reason follow from theirs. `run` is the id of its run."""

    id: str
    run: str
    attempt: int
    step: int
    kind: str
    scorers: tuple[ScorerRecord, ...] = ()
    exact_pairs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: str | None = None
    """as requested"""
    priority: PriorityName | None = None
    """as requested; null: the service chooses that of the jobs"""
    state: JobStateName
    reason: str | None = None
    rollouts: int = 0
    tokens: int = 0
    from_sample: bool = False
    """`max_rollouts` left some of the step's rollouts out"""
    jobs: tuple[JobRecord, ...] = ()
    created_at_us: int


class ProbePolicyRecord(Record):
    """The policy of a run's automatic probes."""

    every_steps: int | None
    """probe the first step with a checkpoint in each so many steps; null: none"""
    on_alerts: bool
    """probe the steps near an open alert, before all others"""
    rollouts: int
    """score a sample of so many rollouts, stratified by length"""
    scorers: tuple[ScorerRecord, ...]
    accelerator: str | None
    """only on workers of this accelerator"""
    state: Literal["off", "active"]
    automatic_probes: int = 0
    impossible_steps: int = 0
    """steps that the policy chose and that could not be probed"""
    changed_at_us: int | None = None
    """null: it was never set"""


class WorkerRecord(Record):
    """A worker that asked for jobs."""

    name: str
    accelerator: str
    device_name: str
    environments: tuple[str, ...] = ()
    """the environments that it can score in"""
    scorers: tuple[str, ...] = ()
    """the scorers that it offers"""
    first_seen_at_us: int
    last_seen_at_us: int
    """its last request for a job, or heartbeat"""


class HardwareRecord(Record):
    """The workers, the one seen last first, at most 500."""

    workers: tuple[WorkerRecord, ...]

"""Probes: their jobs, the policy of automatic ones, the hardware that they run on."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

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
    reason: Annotated[str | None, "why it failed or was skipped; queued: scorers that no live worker offers"] = None
    reasons: Annotated[tuple[str, ...], "the failure of each try"] = ()
    worker: str | None = None
    accelerator: str | None = None
    priority: PriorityName
    environments: Annotated[tuple[str, ...], "names of the environments to score in, best first; empty: any"] = ()
    environment: Annotated[str | None, "the one that it is scored in; null: queued, or as its worker is"] = None
    environment_note: Annotated[str | None, "why it is not scored in one of `environments`"] = None
    doing: Annotated[str, "what it is trying at the moment, as its worker's last heartbeat has it"] = ""


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
    environment: Annotated[str | None, "as requested"] = None
    priority: Annotated[PriorityName | None, "as requested; null: the service chooses that of the jobs"] = None
    state: JobStateName
    reason: str | None = None
    rollouts: int = 0
    tokens: int = 0
    from_sample: Annotated[bool, "`max_rollouts` left some of the step's rollouts out"] = False
    jobs: tuple[JobRecord, ...] = ()
    created_at_us: int


class ProbePolicyRecord(Record):
    """The policy of a run's automatic probes."""

    every_steps: Annotated[int | None, "probe the first step with a checkpoint in each so many steps; null: none"]
    on_alerts: Annotated[bool, "probe the steps near an open alert, before all others"]
    rollouts: Annotated[int, "score a sample of so many rollouts, stratified by length"]
    scorers: tuple[ScorerRecord, ...]
    accelerator: Annotated[str | None, "only on workers of this accelerator"]
    state: Literal["off", "active"]
    automatic_probes: int = 0
    impossible_steps: Annotated[int, "steps that the policy chose and that could not be probed"] = 0
    changed_at_us: Annotated[int | None, "null: it was never set"] = None


class WorkerRecord(Record):
    """A worker that asked for jobs."""

    name: str
    accelerator: str
    device_name: str
    environments: Annotated[tuple[str, ...], "the environments that it can score in"] = ()
    scorers: Annotated[tuple[str, ...], "the scorers that it offers"] = ()
    first_seen_at_us: int
    last_seen_at_us: Annotated[int, "its last request for a job, or heartbeat"]


class HardwareRecord(Record):
    """The workers, the one seen last first, at most 500."""

    workers: tuple[WorkerRecord, ...]

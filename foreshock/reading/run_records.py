"""Records of runs and of what belongs to them. Times are UTC microseconds; NaN means "not estimable"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreshock.conclusions.health import HealthVerdict
from foreshock.interval_names import RANGE
from foreshock.model_kind import ModelKind, known_model_kind
from foreshock.reading.parsing import parse

__all__ = [
    "AttemptRecord",
    "ChangeRecord",
    "CheckpointRecord",
    "DeletionRecord",
    "DifferenceRecord",
    "HealthRecord",
    "IncompleteStep",
    "MeasureRecord",
    "PooledRecord",
    "RetentionRecord",
    "RunRecord",
    "StepRecord",
    "run_record",
]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run. `state` is "running", "stale", "finished" or "failed"; `last_step` the newest step with rollouts.

    `scalar_names` are the run's own names of watched quantities, None: the well-known ones.
    """

    id: str
    key: str
    project: str
    state: str
    name: str | None = None
    model: str | None = None
    trainer: str | None = None
    engine: str | None = None
    hardware: str | None = None
    initial_learning_rate: float | None = None
    length_cap: int | None = None
    model_kind: ModelKind | None = None
    model_kind_source: str | None = None
    advice_mode: str | None = None
    scalar_names: Mapping[str, str] | None = None
    last_step: int | None = None
    created_at_us: int | None = None
    updated_at_us: int | None = None
    seen_at_us: int | None = None

    @property
    def title(self) -> str:
        """The run's name, else the client's key."""
        return self.name or self.key


def run_record(value: Mapping[str, Any]) -> RunRecord:
    """Parse a run; a kind of model that this release does not know is None."""
    return parse(RunRecord, {**value, "model_kind": known_model_kind(value.get("model_kind"))})


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """A start or resume of a run; `resume_step` is the first step that it computes."""

    attempt: int
    key: str
    resume_step: int
    created_at_us: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of one attempt; `shards` are stored, `tokens` are response tokens.

    `full_rollouts` are stored in full: all of them, unless shards were sent as statistics. `coverage` says what the
    measures of the step rest on.
    """

    step: int
    attempt: int
    shards: int
    expected_shards: int
    closed: bool
    rollouts: int
    tokens: int
    full_rollouts: int
    coverage: str


@dataclass(frozen=True, slots=True)
class IncompleteStep:
    """A step that closed without some of its shards."""

    step: int
    attempt: int
    shards: int
    expected_shards: int


@dataclass(frozen=True, slots=True)
class DifferenceRecord:
    """A field of the setup, such as `engine.dtype`, and its values before and after a change."""

    name: str
    before: tuple[Any, ...]
    after: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """A change at a step: announced by the trainer, or (`kind` "setup") of the setup that its rollouts name."""

    step: int
    attempt: int
    kind: str
    note: str | None = None
    before: str | int | float | None = None
    after: str | int | float | None = None
    differences: tuple[DifferenceRecord, ...] = ()
    rebaseline: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """Announced weights, below a root that workers configure by name."""

    step: int
    attempt: int
    root: str
    path: str
    format: str
    digest: str
    model_kind: str | None = None
    weights_version: int | None = None
    expires_at_us: int | None = None
    announced_at_us: int | None = None


@dataclass(frozen=True, slots=True)
class DeletionRecord:
    """A deletion of rollouts, "running" or "done". Of the ids only their numbers are kept."""

    id: str
    state: str
    sample_ids: int
    group_ids: int
    steps: int
    rollouts: int
    files: int
    requested_at_us: int
    finished_at_us: int | None = None


@dataclass(frozen=True, slots=True)
class RetentionRecord:
    """The steps that keep their tokens: the newest, each so-many-th, and those near alerts; None: no such rule.

    `last_steps` None keeps all steps. `source` is "run", or "settings": the run has no rules of its own.
    """

    source: str
    last_steps: int | None = None
    every_steps: int | None = None
    alert_steps: int | None = None


@dataclass(frozen=True, slots=True)
class MeasureRecord:
    """A registered measure: its name, the name of its column, unit, direction of a divergence and source."""

    name: str
    column: str
    kind: str
    formula: str
    unit: str
    direction: str
    aggregation: str
    source: str


@dataclass(frozen=True, slots=True)
class PooledRecord:
    """A measure pooled over the newest steps; see `foreshock.conclusions.health`."""

    measure: str
    mean: float
    low: float
    high: float
    verdict: HealthVerdict
    interval: str = RANGE


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """The verdict on a run's newest measured steps, with the service's sentences, the headline first."""

    verdict: HealthVerdict = "unknown"
    sentences: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    measures: tuple[PooledRecord, ...] = ()

"""Records of alerts, advice and probes. Times are UTC microseconds; NaN means "not estimable"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foreshock.json_values import number_or_nan
from foreshock.learning_rate.advice import Advice
from foreshock.learning_rate.applied import Applied

__all__ = [
    "AdviceRecord",
    "AlertRecord",
    "DecisionRecord",
    "JobRecord",
    "ProbeRecord",
    "RiskRecord",
    "ScorerRecord",
    "advice_record",
]


@dataclass(frozen=True, slots=True)
class AlertRecord:
    """An alert in any state: "open", "acknowledged", "resolved" or "retracted".

    `cleared_step` is None while the rule fires. `run`, `run_key` and `project` are set in lists over runs only.
    """

    id: str
    rule: str
    step: int
    severity: str
    state: str
    value: float
    threshold: float
    why: str
    what_to_do: str
    attempt: int | None = None
    moves_learning_rate: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cleared_step: int | None = None
    changed_by: str | None = None
    opened_at_us: int | None = None
    changed_at_us: int | None = None
    run: str | None = None
    run_key: str | None = None
    project: str | None = None


@dataclass(frozen=True, slots=True)
class RiskRecord:
    """The ordinal risk of a run: `score` 0 to 4 is the place of `level` in "calm" … "critical"; no probability."""

    level: str
    score: int
    reasons: tuple[str, ...] = ()
    note: str = ""
    observed_step: int | None = None


@dataclass(frozen=True, slots=True)
class AdviceRecord:
    """The learning-rate advice, the next step at which the service lowers the rate, and what the trainer applied.

    `learning_rate_sum` is Σ η up to the newest closed step, None if no learning rate is logged.
    """

    advice: Advice
    advised_scale: float
    next_decay_step: int | None
    applied: Applied | None = None
    learning_rate_sum: float | None = None


def advice_record(value: Mapping[str, Any]) -> AdviceRecord:
    """Parse the advice. Raises KeyError, TypeError or ValueError if it is invalid."""
    applied = value.get("applied")
    return AdviceRecord(
        Advice.from_json(value),
        number_or_nan(value.get("advised_scale", value.get("scale"))),
        value.get("next_decay_step"),
        None if applied is None else Applied.from_json(applied),
        value.get("learning_rate_sum"),
    )


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """An entry of the append-only log of decisions on the learning rate."""

    revision: int
    attempt: int
    kind: str
    effective_from_step: int
    reason: str
    author: str
    made_at_us: int


@dataclass(frozen=True, slots=True)
class ScorerRecord:
    """A scorer and its variant: empty, or `rebatched` for its noise floor."""

    scorer: str
    variant: str = ""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A part of a probe that one worker does; `attempts` counts its tries, `reason` says why it failed or waits."""

    id: str
    engine: str
    state: str
    attempts: int
    scorers: tuple[ScorerRecord, ...] = ()
    exact_pairs: tuple[str, ...] = ()
    reason: str | None = None
    reasons: tuple[str, ...] = ()
    worker: str | None = None
    accelerator: str | None = None
    priority: str | None = None
    environments: tuple[str, ...] = ()
    environment: str | None = None
    environment_note: str | None = None


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """A probe with its jobs; `run` is the id of its run."""

    id: str
    run: str
    attempt: int
    step: int
    kind: str
    state: str
    scorers: tuple[ScorerRecord, ...] = ()
    exact_pairs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: str | None = None
    priority: str | None = None
    reason: str | None = None
    rollouts: int = 0
    tokens: int = 0
    from_sample: bool = False
    jobs: tuple[JobRecord, ...] = ()
    created_at_us: int | None = None

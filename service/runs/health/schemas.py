"""Schemas of a run's health."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field

from foreshock.diagnosis.health import Health, HealthEvidence, HealthVerdict, JudgedMeasure
from foreshock.interval_names import INTERVAL, RANGE, RANGE_NOTE, interval_name
from foreshock.json_values import finite_or_none


class PooledMeasureRead(BaseModel):
    """A measure pooled over the window, with its verdict."""

    measure: str
    mean: float | None
    low: float | None = Field(description="bootstrap-t interval; null with too few prompts or steps")
    high: float | None
    interval: str = Field(description=f"what low to high is: `{INTERVAL}`, or `{RANGE}`. {RANGE_NOTE}")
    verdict: HealthVerdict

    @classmethod
    def of(cls, judged: JudgedMeasure) -> Self:
        """Convert a judged measure."""
        pooled = judged.pooled
        return cls(
            measure=pooled.measure,
            mean=finite_or_none(pooled.mean),
            low=finite_or_none(pooled.low),
            high=finite_or_none(pooled.high),
            interval=interval_name(pooled.reliable),
            verdict=judged.verdict,
        )


class HealthRead(BaseModel):
    """The mismatch of a run, pooled over its newest measured steps and judged with its intervals."""

    verdict: HealthVerdict
    sentences: list[str] = Field(description="why; the first one is the headline")
    first_step: int | None = Field(description="null before a step is measured")
    last_step: int | None
    steps: int
    tokens: int
    clusters: int = Field(description="prompts × steps that the interval of k3 is over")
    measures: list[PooledMeasureRead]

    @classmethod
    def of(cls, evidence: HealthEvidence, health: Health) -> Self:
        """Convert a verdict and its evidence."""
        return cls(
            verdict=health.verdict,
            sentences=list(health.sentences),
            first_step=evidence.first_step,
            last_step=evidence.last_step,
            steps=evidence.steps,
            tokens=evidence.tokens,
            clusters=evidence.clusters,
            measures=[PooledMeasureRead.of(each) for each in health.measures],
        )

    @classmethod
    def nothing(cls) -> Self:
        """Return the answer before a step is measured."""
        why = "No step has both rollout_log_probs and trainer_log_probs: log both to see the mismatch."
        return cls(
            verdict="unknown", sentences=[why], first_step=None, last_step=None, steps=0, tokens=0, clusters=0,
            measures=[],
        )  # fmt: skip

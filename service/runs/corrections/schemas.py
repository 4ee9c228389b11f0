"""Schemas of evaluated corrections."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, Field

from foreshock.corrections import AffectedSequences, Evaluation, Population, Threshold
from foreshock.json_values import finite_or_none
from foreshock_service.runs.corrections.service import EvaluatedCorrections
from foreshock_service.runs.coverage.schemas import CoverageRead
from foreshock_service.runs.shard_schemas import AnswerOfStep

TOO_LARGE = "a value too large for a float64 is null"


class PopulationRead(BaseModel):
    """Population of sequences, with the means of their logged values."""

    sequences: int
    reward_mean: float | None
    advantage_mean: float | None
    length_mean: float | None = Field(description="model-generated tokens")
    turns_mean: float | None
    lag_mean: float | None = Field(description="weights versions")

    @classmethod
    def of(cls, population: Population) -> PopulationRead:
        """Convert the library's object."""
        return cls(
            sequences=population.sequences,
            reward_mean=finite_or_none(population.reward),
            advantage_mean=finite_or_none(population.advantage),
            length_mean=finite_or_none(population.length),
            turns_mean=finite_or_none(population.turns),
            lag_mean=finite_or_none(population.lag),
        )


class AffectedSequencesRead(BaseModel):
    """Sequences that would be dropped or truncated, and the others."""

    touched: PopulationRead = Field(
        description="sequences that the threshold affects; at token level, with at least one such token"
    )
    untouched: PopulationRead
    groups: int = Field(description="prompt groups of two or more sequences")
    groups_touched: float | None = Field(description="fraction of groups with at least one touched sequence")
    groups_emptied: float | None = Field(description="fraction of groups in which every sequence is touched")

    @classmethod
    def of(cls, affected: AffectedSequences) -> AffectedSequencesRead:
        """Convert the library's object."""
        return cls(
            touched=PopulationRead.of(affected.touched),
            untouched=PopulationRead.of(affected.untouched),
            groups=affected.groups,
            groups_touched=finite_or_none(affected.groups_touched),
            groups_emptied=finite_or_none(affected.groups_emptied),
        )


class CorrectionRead(BaseModel):
    """Effect of one correction at one threshold; null if not estimable."""

    correction: str
    title: str
    formula: str = Field(description="formula of the weight w")
    level: Literal["token", "sequence"] = Field(description="unit that w applies to and that means are taken over")
    effect: Literal["none", "truncated", "dropped"] = Field(description="effect beyond the threshold")
    source: str
    threshold: str | None = Field(description="requested threshold, completed: `2`, or `lower_upper`")
    threshold_used: str | None = Field(description="threshold of these figures: the nearest one with stored counts")
    exact: bool = Field(description="true if threshold and threshold_used are equal")
    kept_tokens: float | None = Field(description="fraction")
    kept_sequences: float | None = Field(description="fraction; a sequence is kept if none of its tokens is dropped")
    touched_tokens: float | None = Field(description="fraction whose weight the threshold changes")
    weight_mean: float | None = Field(description="E w")
    weight_variance: float | None = Field(description="a dropped token or sequence counts as 0")
    ess: float | None = Field(description="(Σw)²/(N Σw²), a fraction of all, unclamped")
    distortion: float | None = Field(description="E|w − ρ| at the correction's level")
    uncorrected_distortion: float | None = Field(description="E|1 − ρ| at the same level")
    token_distortion: float | None = Field(description="E|w − ρ| over tokens; null for weights of whole sequences")
    advantage_distortion: float | None = Field(description="E[(w − ρ)·A]")
    affected: AffectedSequencesRead
    not_estimable: str | None = Field(description="reason why the figures are not available")
    notes: list[str]

    @classmethod
    def of(cls, found: Evaluation) -> CorrectionRead:
        """Convert the library's object."""
        figures = {
            "kept_tokens": found.kept_tokens,
            "kept_sequences": found.kept_sequences,
            "touched_tokens": found.touched_tokens,
            "weight_mean": found.weights.mean,
            "weight_variance": found.weights.variance,
            "ess": found.weights.effective_fraction,
            "distortion": found.distortion,
            "uncorrected_distortion": found.uncorrected_distortion,
            "token_distortion": found.token_distortion,
            "advantage_distortion": found.advantage_distortion,
        }
        too_large = [TOO_LARGE] if any(math.isinf(value) for value in figures.values()) else []
        return cls(
            correction=found.correction.name,
            title=found.correction.title,
            formula=found.correction.formula,
            level=found.correction.level,
            effect=found.correction.effect,
            source=found.correction.source,
            threshold=_text(found.asked),
            threshold_used=_text(found.used),
            exact=found.is_exact,
            **{name: finite_or_none(value) for name, value in figures.items()},
            affected=AffectedSequencesRead.of(found.affected),
            not_estimable=found.not_estimable,
            notes=[*found.notes, *too_large],
        )


class CorrectionsRead(AnswerOfStep):
    """Effects of corrections on a step, by correction and threshold."""

    comparison: str
    step: int
    attempt: int
    tokens: int = Field(description="model-generated tokens with two finite log-probs")
    rollouts: int = Field(description="rollouts of the step, including those without such a token")
    coverage: CoverageRead
    items: list[CorrectionRead]

    @classmethod
    def of(cls, evaluated: EvaluatedCorrections) -> CorrectionsRead:
        """Convert the evaluated corrections."""
        pair = evaluated.pair
        return cls(
            comparison=pair.comparison,
            step=pair.step,
            attempt=pair.attempt,
            tokens=pair.statistics.tokens,
            rollouts=pair.statistics.rollouts,
            coverage=pair.coverage,
            items=[CorrectionRead.of(evaluation) for evaluation in evaluated.evaluations],
        )


def _text(threshold: Threshold) -> str | None:
    return None if threshold == Threshold() else str(threshold)

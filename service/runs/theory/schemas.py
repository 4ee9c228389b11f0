"""Schemas of the theory; null: not estimable, or too large for a float64."""

from __future__ import annotations

import math

from pydantic import BaseModel, Field

from foreshock.interval_names import RANGE, RANGE_NOTE
from foreshock.json_values import finite_or_none
from foreshock.theory import BiasBound, GradientNoise, HorizonBound, SequenceChi2, StepNoise
from foreshock_service.runs.corrections.schemas import TOO_LARGE
from foreshock_service.runs.coverage.schemas import CoverageRead
from foreshock_service.runs.shard_schemas import AnswerOfStep
from foreshock_service.runs.theory.service import FoundTheory


class BiasRead(BaseModel):
    """Bound ‖bias of the uncorrected gradient‖ ≤ B·E_μ[|ρ_seq − 1|·T·|R|], for B = 1."""

    per_unit: float | None = Field(description="per unit of B; null if no rollout has a reward")
    low: float | None = Field(
        description=f"lower end of the bootstrap-t interval by prompt group: a {RANGE}. {RANGE_NOTE}"
    )
    high: float | None = Field(description="upper end of the interval")
    trivial: float | None = Field(description="2·T·max|R| for the mean length T: upper bound for any two policies")
    sequences: int = Field(description="number of sequences with a reward")
    mean_length: float | None = Field(description="measured tokens")
    longest: int = Field(description="measured tokens")
    largest_reward: float | None = Field(description="max|R|")
    notes: list[str]

    @classmethod
    def of(cls, bound: BiasBound) -> BiasRead:
        """Convert the library's object."""
        return cls(
            per_unit=finite_or_none(bound.per_unit),
            low=finite_or_none(bound.low),
            high=finite_or_none(bound.high),
            trivial=finite_or_none(bound.trivial),
            sequences=bound.sequences,
            mean_length=finite_or_none(bound.mean_length),
            longest=bound.longest,
            largest_reward=finite_or_none(bound.largest_reward),
            notes=[*bound.notes, *([TOO_LARGE] if math.isinf(bound.per_unit) else [])],
        )


class HorizonRead(BaseModel):
    """Horizon bound 2·Δmax·T², for B = 1 and |R| ≤ 1, T the longest sequence: with exact Δmax only."""

    value: float | None
    trivial: float = Field(description="2·T")
    vacuous: bool = Field(description="Δmax·T ≥ 1: no better than the trivial bound")
    delta_max: float | None
    not_estimable: str | None

    @classmethod
    def of(cls, bound: HorizonBound, delta_max: float | None) -> HorizonRead:
        """Convert the library's object."""
        return cls(
            value=finite_or_none(bound.value),
            trivial=bound.trivial,
            vacuous=bound.vacuous,
            delta_max=delta_max,
            not_estimable=bound.not_estimable,
        )


class PinskerRead(BaseModel):
    """Bound D_TV ≤ ½√χ², of the token mean of χ²(π‖μ); valid if μ is the sampling distribution and covers π."""

    bound: float | None
    tv_token: float | None = Field(description="direct estimate of D_TV, which does not require that μ covers π")
    notes: list[str] = Field(description="reason, if the estimate exceeds the bound")


class SequenceChi2Read(BaseModel):
    """Extrapolation (1 + χ²)^T of E ρ_seq², for independent tokens that all have the mean χ². Not a bound."""

    value: float | None = Field(description="null if too large for a float64; then use log10")
    log10: float | None
    chi2_token: float | None
    length: float = Field(description="mean length in tokens")
    kind: str = "independent-token extrapolation"

    @classmethod
    def of(cls, found: SequenceChi2) -> SequenceChi2Read:
        """Convert the library's object."""
        return cls(
            value=finite_or_none(found.value),
            log10=finite_or_none(found.log10),
            chi2_token=finite_or_none(found.chi2_token),
            length=found.length,
        )


class GradientRead(BaseModel):
    """Variance V̂ = (‖g_b‖² − ‖g_B‖²)/(1/b − 1/B); estimates may be negative by chance and are not clamped."""

    variance: float | None = Field(description="variance of the gradient of one prompt")
    of_batch: float | None = Field(description="V̂/B")
    signal: float | None = Field(description="‖E g‖²")
    batch_prompts_for_parity: float | None = Field(description="V̂/signal, the simple noise scale")
    notes: list[str]

    @classmethod
    def of(cls, noise: GradientNoise) -> GradientRead:
        """Convert the library's object."""
        return cls(
            variance=finite_or_none(noise.variance),
            of_batch=finite_or_none(noise.of_batch),
            signal=finite_or_none(noise.signal),
            batch_prompts_for_parity=finite_or_none(noise.batch_prompts_for_parity),
            notes=list(noise.notes),
        )


class StepNoiseRead(BaseModel):
    """Noise (η²/2)·[Var + ‖Bias‖²] of the SGA lemma, for L = 1: halving η quarters it."""

    at_learning_rate: float | None = Field(description="at η")
    at_half: float | None = Field(description="at η/2")
    bias_norm: float | None = Field(description="‖Bias‖ in the sum; 0: variance only")

    @classmethod
    def of(cls, noise: StepNoise) -> StepNoiseRead:
        """Convert the library's object."""
        return cls(
            at_learning_rate=finite_or_none(noise.at_learning_rate),
            at_half=finite_or_none(noise.at_half),
            bias_norm=finite_or_none(noise.bias_norm),
        )


class TheoryRead(AnswerOfStep):
    """Values of the papers' bounds at this step."""

    comparison: str
    step: int
    attempt: int
    coverage: CoverageRead
    bias: BiasRead
    horizon: HorizonRead
    pinsker: PinskerRead
    sequence_chi2: SequenceChi2Read | None
    gradient: GradientRead | None
    gradient_missing: str | None = Field(description="reason why gradient noise is not available")
    learning_rate: float | None = Field(description="η")
    learning_rate_source: str | None
    step_noise: StepNoiseRead | None
    step_noise_with_bias: StepNoiseRead | None = Field(
        description="present if `gradient_bound` was given and the bias is estimable"
    )

    @classmethod
    def of(cls, found: FoundTheory) -> TheoryRead:
        """Convert the theory that the service found."""
        theory = found.theory
        return cls(
            comparison=found.pair.comparison,
            step=found.pair.step,
            attempt=found.pair.attempt,
            coverage=found.pair.coverage,
            bias=BiasRead.of(theory.bias),
            horizon=HorizonRead.of(theory.horizon, found.delta_max),
            pinsker=PinskerRead(
                bound=finite_or_none(theory.pinsker),
                tv_token=finite_or_none(theory.tv_token),
                notes=list(theory.pinsker_notes),
            ),
            sequence_chi2=None if theory.sequence_chi2 is None else SequenceChi2Read.of(theory.sequence_chi2),
            gradient=None if theory.gradient is None else GradientRead.of(theory.gradient),
            gradient_missing=found.gradient_missing,
            learning_rate=found.learning_rate,
            learning_rate_source=found.learning_rate_source,
            step_noise=None if theory.step_noise is None else StepNoiseRead.of(theory.step_noise),
            step_noise_with_bias=(
                None if theory.step_noise_with_bias is None else StepNoiseRead.of(theory.step_noise_with_bias)
            ),
        )

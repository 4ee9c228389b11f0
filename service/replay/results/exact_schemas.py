"""The schemas of exact divergences."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, Field

from foreshock.interval_names import INTERVAL, RANGE, RANGE_NOTE, interval_name
from foreshock.json_values import finite_or_none
from foreshock.measures.estimators.intervals import Interval
from foreshock.measures.exact import ExactMeasures
from foreshock.scorers import EXACT_PAIRS, ExactPair
from foreshock_service.platform.database.tables.probes import ExactDivergence


class MeanRead(BaseModel):
    """A token mean with its bootstrap-t interval by prompt group; null if it cannot be estimated."""

    mean: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, interval: Interval) -> Self:
        """Return the interval as it is stored."""
        low, high = finite_or_none(interval.low), finite_or_none(interval.high)
        return cls(mean=finite_or_none(interval.mean), low=low, high=high)


class ExactMeasuresRead(BaseModel):
    """Token means over the whole vocabulary at the states before model-generated tokens, μ the behaviour, π the target.

    The intervals show how the means vary with prompts and rollouts: the states were sampled. The sampling noise of the
    single token, which `k3_kl` has, is not in them.
    """

    kl: MeanRead = Field(description="KL(μ‖π), in nats per token")
    reverse_kl: MeanRead = Field(description="KL(π‖μ), in nats per token")
    tv: MeanRead = Field(description="total variation ½ Σ|π − μ|, 0 to 1")
    delta_max: float | None = Field(description="Δmax: the largest total variation at a visited state")
    top1_flip: MeanRead = Field(description="share of states whose likeliest tokens differ")
    target_entropy: MeanRead = Field(description="H(π), in nats")
    behaviour_entropy: MeanRead = Field(description="H(μ), in nats")
    k3_kl: MeanRead = Field(description="the sampled estimate of `kl` from the log-probs of the same tokens")
    tokens: int = Field(description="states that the means are over")
    rollouts: int = Field(description="rollouts with such a state")
    groups: int = Field(description="prompt groups of these rollouts")
    effective_groups: float | None = Field(description="effective number of groups of `kl`: (Σ S_g)²/Σ S_g²")
    non_finite: int = Field(description="states left out because a value of them is NaN or infinite")
    interval: str = Field(
        default=RANGE, description=f"what the intervals are: `{INTERVAL}`, or `{RANGE}`. {RANGE_NOTE}"
    )

    @classmethod
    def of(cls, measures: ExactMeasures) -> Self:
        """Return the measures as they are stored."""
        means = ("kl", "reverse_kl", "tv", "top1_flip", "target_entropy", "behaviour_entropy", "k3_kl")
        return cls(
            **{name: MeanRead.of(getattr(measures, name)) for name in means},
            delta_max=finite_or_none(measures.delta_max),
            tokens=measures.tokens,
            rollouts=measures.rollouts,
            groups=measures.groups,
            effective_groups=finite_or_none(measures.effective_groups),
            non_finite=measures.non_finite,
            interval=interval_name(measures.reliable),
        )


class ExactRead(ExactMeasuresRead):
    """The exact divergences of a pair at a step, with the fingerprints of both scorers."""

    pair: str = Field(description="the comparison `target/behaviour`, of the same weights")
    name: str
    target: str
    behaviour: str
    from_sample: bool = Field(description="the probe left some of the step's rollouts out")
    target_fingerprint: dict[str, Any]
    behaviour_fingerprint: dict[str, Any]
    accelerator: str
    device_name: str
    published_at_us: int

    @classmethod
    def of_row(cls, row: ExactDivergence) -> Self:
        """Return the divergences as they are read."""
        pair = EXACT_PAIRS.get(row.pair) or ExactPair(*row.pair.split("/", 1))
        return cls(
            **row.measures,
            pair=row.pair,
            name=pair.name,
            target=pair.target,
            behaviour=pair.behaviour,
            from_sample=row.from_sample,
            target_fingerprint=row.target_fingerprint,
            behaviour_fingerprint=row.behaviour_fingerprint,
            accelerator=row.accelerator,
            device_name=row.device_name,
            published_at_us=row.published_at_us,
        )


class ExactStepRead(BaseModel):
    """The exact divergences of a step: the newest of each pair."""

    run: str
    step: int
    attempt: int
    items: list[ExactRead]


class ExactToken(BaseModel):
    """The divergences at the state before one response token; null if they are not finite."""

    sample_id: str
    position: int = Field(description="index in the response, from 0")
    token_id: int
    kl: float | None
    reverse_kl: float | None
    tv: float | None
    top1_flip: bool
    target_entropy: float | None
    behaviour_entropy: float | None
    target_log_prob: float | None
    behaviour_log_prob: float | None


class ExactTokensRead(BaseModel):
    """Response tokens of a step with the exact divergences at their states."""

    pair: str
    step: int
    attempt: int
    sample_id: str | None
    items: list[ExactToken]

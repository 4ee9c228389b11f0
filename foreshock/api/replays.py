"""Exact divergences. Attributions: `attribution`."""

from typing import Annotated, Any

from foreshock.api.records import Measured, Record


class MeanRecord(Record):
    """A token mean with its bootstrap-t interval by prompt group; null if it cannot be estimated."""

    mean: Measured
    low: Measured
    high: Measured


class ExactMeasures(Record):
    """Token means over the whole vocabulary at the states before model-generated tokens, μ the behaviour, π the target.

    The intervals show how the means vary with prompts and rollouts: the states were sampled. The sampling noise of the
    single token, which `k3_kl` has, is not in them. Without states the values are NaN.
    """

    kl: Annotated[MeanRecord, "KL(μ‖π), in nats per token"]
    reverse_kl: Annotated[MeanRecord, "KL(π‖μ), in nats per token"]
    tv: Annotated[MeanRecord, "total variation ½ Σ|π − μ|, 0 to 1"]
    delta_max: Annotated[Measured, "Δmax: the largest total variation at a visited state"]
    top1_flip: Annotated[MeanRecord, "share of states whose likeliest tokens differ"]
    target_entropy: Annotated[MeanRecord, "H(π), in nats"]
    behaviour_entropy: Annotated[MeanRecord, "H(μ), in nats"]
    k3_kl: Annotated[MeanRecord, "the sampled estimate of `kl` from the log-probs of the same tokens"]
    tokens: Annotated[int, "states that the means are over"]
    rollouts: Annotated[int, "rollouts with such a state"]
    groups: Annotated[int, "prompt groups of these rollouts"]
    effective_groups: Annotated[Measured, "effective number of groups of `kl`: (Σ S_g)²/Σ S_g²"]
    non_finite: Annotated[int, "states left out because a value of them is NaN or infinite"]


class ExactComparison(ExactMeasures):
    """The exact divergences of a pair at a step, as a worker sends them, with the fingerprints of both scorers."""

    pair: Annotated[str, "the comparison `target/behaviour`, of the same weights"]
    target_fingerprint: dict[str, Any]
    behaviour_fingerprint: dict[str, Any]


class ExactRecord(ExactComparison):
    """Published exact divergences."""

    name: str
    target: str
    behaviour: str
    from_sample: Annotated[bool, "the probe left some of the step's rollouts out"]
    published_at_us: int


class ExactStepRecord(Record):
    """The exact divergences of a step: the newest of each pair."""

    run: str
    step: int
    attempt: int
    items: tuple[ExactRecord, ...]

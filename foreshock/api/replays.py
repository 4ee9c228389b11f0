"""Exact divergences. Attributions: `attribution`."""

from dataclasses import field
from typing import Any

from foreshock.api.records import Measured, Record, described


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

    kl: MeanRecord = field(metadata=described("KL(μ‖π), in nats per token"))
    reverse_kl: MeanRecord = field(metadata=described("KL(π‖μ), in nats per token"))
    tv: MeanRecord = field(metadata=described("total variation ½ Σ|π − μ|, 0 to 1"))
    delta_max: Measured = field(metadata=described("Δmax: the largest total variation at a visited state"))
    top1_flip: MeanRecord = field(metadata=described("share of states whose likeliest tokens differ"))
    target_entropy: MeanRecord = field(metadata=described("H(π), in nats"))
    behaviour_entropy: MeanRecord = field(metadata=described("H(μ), in nats"))
    k3_kl: MeanRecord = field(metadata=described("the sampled estimate of `kl` from the log-probs of the same tokens"))
    tokens: int = field(metadata=described("states that the means are over"))
    rollouts: int = field(metadata=described("rollouts with such a state"))
    groups: int = field(metadata=described("prompt groups of these rollouts"))
    effective_groups: Measured = field(metadata=described("effective number of groups of `kl`: (Σ S_g)²/Σ S_g²"))
    non_finite: int = field(metadata=described("states left out because a value of them is NaN or infinite"))


class ExactComparison(ExactMeasures):
    """The exact divergences of a pair at a step, as a worker sends them, with the fingerprints of both scorers."""

    pair: str = field(metadata=described("the comparison `target/behaviour`, of the same weights"))
    target_fingerprint: dict[str, Any]
    behaviour_fingerprint: dict[str, Any]


class ExactRecord(ExactComparison):
    """Published exact divergences."""

    name: str
    target: str
    behaviour: str
    from_sample: bool
    """the probe left some of the step's rollouts out"""
    published_at_us: int


class ExactStepRecord(Record):
    """The exact divergences of a step: the newest of each pair."""

    run: str
    step: int
    attempt: int
    items: tuple[ExactRecord, ...]

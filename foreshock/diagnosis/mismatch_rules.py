"""Rules on how far π and μ are apart: k3, k3 / entropy, |d| at low probability, χ² both ways, |d|.

They pool steps: a step of a few prompts says little, and healthy k3 changes tenfold between two such steps.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Final

from foreshock.comparisons import TRAINER_ROLLOUT, comparison_name
from foreshock.diagnosis.least_tokens import LEAST_TOKENS
from foreshock.diagnosis.rule import ThresholdRule
from foreshock.healthy_ranges import HealthyRange, required_range, threshold_number
from foreshock.measures.statistics.conditions import LOW_PROBABILITY
from foreshock.model_kind import ModelKind
from foreshock.scorers import ENGINE_REPLAY, NOISE_FLOOR_VARIANT, score_name

K3 = f"{TRAINER_ROLLOUT}:k3_kl"
LOW_PROBABILITY_ABS_D = f"{TRAINER_ROLLOUT}:low_probability_abs_d"
K3_PER_ENTROPY = f"{TRAINER_ROLLOUT}:k3_kl_per_entropy"
NOISE_FLOOR = f"{comparison_name(score_name(ENGINE_REPLAY, NOISE_FLOOR_VARIANT), ENGINE_REPLAY)}:k3_kl"

CHI2_PER_K3 = 5.0

STEP_RULE = "mismatch_step"
"""The rule of single steps, which the diagnosis names also when they are over."""

PROBE = "Save a checkpoint, then `foreshock probe RUN STEP` names the part that differs."
LOWER = "Lower the learning rate. Find the cause with a probe before you raise it again."

range_rule = partial(ThresholdRule, lag_zero_only=True, what_to_do=PROBE)
"""A rule on a healthy range: ranges hold at lag 0, and a value beyond one calls for a probe."""

_MODELS: Final[Mapping[ModelKind | None, str]] = {
    "dense": "a dense model",
    "moe": "a mixture of experts",
    None: "a dense model",  # the diagnosis says that the kind is not declared
}


def mismatch_rules(model_kind: ModelKind | None) -> tuple[ThresholdRule, ...]:
    """Return the rules for a kind of model; None (unknown) has the thresholds of a dense model."""
    k3, model = required_range("k3_kl", model_kind), _MODELS[model_kind]
    return (
        *_k3_rules(k3, model),
        *_rising_k3_rules(k3, model),
        _low_probability_rule(k3),
        *_per_entropy_rules(required_range("k3_kl_per_entropy", model_kind), model),
        *_chi2_rules(k3),
        _difference_rule(model_kind, model),
    )


def _levels(known: HealthyRange) -> tuple[float, float]:
    assert known.warning is not None
    assert known.critical is not None
    return known.warning, known.critical


def _k3_rules(k3: HealthyRange, model: str) -> tuple[ThresholdRule, ...]:
    warning, critical = _levels(k3)
    return (
        range_rule(
            name="mismatch_warning",
            key=K3,
            absolute=warning,
            severity="warning",
            pooled="mean",
            why=f"The mismatch (k3) is above {threshold_number(warning)} nats per token; {k3.healthy} is healthy "
            f"for {model}.",
            source=k3.source,
        ),
        range_rule(
            name="mismatch_critical",
            key=K3,
            absolute=critical,
            severity="critical",
            pooled="mean",
            minimum_duration=3,
            why=f"The mismatch (k3) is above {threshold_number(critical)} nats per token; {k3.healthy} is "
            f"healthy for {model}.",
            source=k3.source,
        ),
        range_rule(
            name=STEP_RULE,
            key=K3,
            absolute=critical,
            severity="info",
            minimum_duration=1,
            why=f"The mismatch (k3) is above {threshold_number(critical)} nats per token, which is critical for "
            f"{model}.",
            source=k3.source,
        ),
        ThresholdRule(
            name="mismatch_baseline_critical",
            key=f"{K3}@baseline",
            absolute=critical,
            severity="critical",
            minimum_duration=3,
            lag_zero_only=True,
            why=f"The baseline of the mismatch (k3) is above {threshold_number(critical)} nats per token, which is "
            f"critical for {model}. Rules that compare with the baseline cannot see this mismatch.",
            what_to_do=f'Most of the first steps are critical, so that "rise" alerts cannot fire. {PROBE}',
            source=k3.source,
        ),
    )


def _rising_k3_rules(k3: HealthyRange, model: str) -> tuple[ThresholdRule, ...]:
    warning, critical = _levels(k3)
    return (
        ThresholdRule(
            name="mismatch_rise",
            key=K3,
            # A tenth of the healthy range's end: below it a fivefold rise occurs in every healthy run.
            absolute=warning / 10,
            relative=5.0,
            severity="warning",
            pooled="mean",
            corroborates_surge=True,
            why="The mismatch (k3) has risen to at least five times this run's own baseline.",
            what_to_do=PROBE,
            source="our choice: five times the run's own baseline and three times its noise; single steps of the "
            "healthy recorded run reach 19 times its baseline, the mean of ten steps 3.2 times",
        ),
        ThresholdRule(
            name="mismatch_runaway",
            key=K3,
            absolute=critical,
            relative=5.0,
            severity="critical",
            pooled="mean",
            minimum_duration=3,
            cooldown_steps=50,
            corroborates_surge=True,
            why=f"The mismatch (k3) is above {threshold_number(critical)} nats per token, which is critical for "
            f"{model}, and has risen to at least five times this run's own baseline.",
            what_to_do=LOWER,
            source=f"{k3.source}, and five times the run's own baseline",
        ),
        range_rule(
            name="mismatch_above_noise_floor",
            key=K3,
            reference=NOISE_FLOOR,
            absolute=warning / 10,
            relative=10.0,
            severity="info",
            pooled="mean",
            why="The mismatch (k3) is more than ten times the engine's own noise floor: scoring the same tokens in "
            "other batches explains little of it.",
            source="our choice: half of the engine's noise floor is part of k3, so that a twentieth of it is explained",
        ),
    )


def _low_probability_rule(k3: HealthyRange) -> ThresholdRule:
    warning, _ = _levels(k3)
    return ThresholdRule(
        name="low_probability_rise",
        key=LOW_PROBABILITY_ABS_D,
        # k3 is d²/2 for small d: below this |d|, k3 of these tokens alone is within the healthy range of all tokens.
        absolute=math.sqrt(2.0 * warning),
        relative=2.5,
        severity="warning",
        pooled="mean",
        why="The mean |log π − log μ| of the tokens to which the engine gave a probability below "
        f"{LOW_PROBABILITY:g} has risen to at least 2.5 times this run's own baseline. A mismatch shows first in "
        f"such tokens. Steps with fewer than {LEAST_TOKENS['low_probability_abs_d']} of them are not judged.",
        what_to_do="Read the mismatch by probability on the step's page: numerical noise grows towards rare tokens, a "
        f"difference at likely tokens has another cause. {PROBE}",
        source="our choice: 2.5 times the run's own baseline, a sixfold k3, and three times its noise",
    )


def _per_entropy_rules(known: HealthyRange, model: str) -> tuple[ThresholdRule, ...]:
    warning, critical = _levels(known)
    return (
        range_rule(
            name="mismatch_per_entropy_warning",
            key=K3_PER_ENTROPY,
            absolute=warning,
            severity="warning",
            pooled="mean",
            why=f"k3 / entropy is above {threshold_number(warning)}; up {known.healthy} is healthy for {model}. It "
            "does not fall with the entropy as k3 does.",
            source=known.source,
        ),
        range_rule(
            name="mismatch_per_entropy_critical",
            key=K3_PER_ENTROPY,
            absolute=critical,
            severity="critical",
            pooled="mean",
            why=f"k3 / entropy is above {threshold_number(critical)}; up {known.healthy} is healthy for {model}.",
            source=known.source,
        ),
        ThresholdRule(
            name="mismatch_per_entropy_rise",
            key=K3_PER_ENTROPY,
            absolute=warning / 10,
            relative=5.0,
            severity="warning",
            pooled="mean",
            corroborates_surge=True,
            why="k3 / entropy has risen to at least five times this run's own baseline.",
            what_to_do=PROBE,
            source="our choice: as for k3; the healthy recorded run reaches 4.8 times its baseline in the mean of ten "
            "steps, at an entropy near 0",
        ),
    )


def _chi2_rules(k3: HealthyRange) -> tuple[ThresholdRule, ...]:
    warning, _ = _levels(k3)
    return tuple(
        range_rule(
            name=name,
            key=f"{TRAINER_ROLLOUT}:{measure}",
            absolute=CHI2_PER_K3 * warning,
            severity="warning",
            pooled="mean",
            why=f"{symbol} is above {CHI2_PER_K3 * warning:g} per token: {meaning}.",
            source="our choice: five times the range of k3; χ² is 2 · k3 for small d, 3.1 · k3 at d = ±1",
        )
        for name, measure, symbol, meaning in (
            (
                "chi2_high",
                "chi2_token",
                "χ²(π‖μ)",
                "the trainer gives some tokens much more probability than the engine did",
            ),
            (
                "reverse_chi2_high",
                "reverse_chi2_token",
                "χ²(μ‖π)",
                "the engine sampled tokens that are very unlikely for the trainer",
            ),
        )
    )


def _difference_rule(model_kind: ModelKind | None, model: str) -> ThresholdRule:
    known = required_range("mean_abs_d", model_kind)
    return range_rule(
        name="absolute_difference",
        key=f"{TRAINER_ROLLOUT}:mean_abs_d",
        absolute=known.warning,
        severity="warning",
        why=f"The mean of |log π − log μ| is above {known.warning} nats per token; {known.healthy} is healthy for "
        f"{model}.",
        source=known.source,
    )

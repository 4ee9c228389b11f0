"""Rules on the tails of the token weights, and on whether the logged μ is the distribution that sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.early_warning.mismatch_rules import LOWER, PROBE
from foreshock.early_warning.threshold_rule import ThresholdRule
from foreshock.model_kind import ModelKind
from foreshock.ranges import required_range

_LOGGED = (
    "Check logprobs_mode, temperature and top-p of the engine: the logged log-probs must be those of the "
    "distribution that sampled."
)


_ASYMMETRY: Final[Mapping[ModelKind, float]] = {"dense": 5e-3, "moe": 5e-2}


def sampling_rules(model_kind: ModelKind | None) -> tuple[ThresholdRule, ...]:
    """Return the rules for a kind of model; None (unknown) has the thresholds of a dense model."""
    return (*_tail_rules(model_kind), *_logged_rules())


def _tail_rules(model_kind: ModelKind | None) -> tuple[ThresholdRule, ...]:
    tail, ess = required_range("tail_2", model_kind), required_range("ess_token", model_kind)
    asymmetry = _ASYMMETRY["dense" if model_kind is None else model_kind]
    return (
        ThresholdRule(
            name="tail_heavy",
            key=f"{TRAINER_ROLLOUT}:tail_2",
            absolute=tail.critical,
            severity="critical",
            minimum_duration=3,
            lag_zero_only=True,
            why="At more than a tenth of the tokens π and μ differ by more than a factor of 2.",
            what_to_do=PROBE,
            source=tail.source,
        ),
        ThresholdRule(
            name="tail_asymmetry",
            key=f"{TRAINER_ROLLOUT}:tail_asymmetry_ln2",
            absolute=asymmetry,
            direction="away",
            severity="warning",
            lag_zero_only=True,
            why=f"The tails of d are one-sided: P_μ(π < μ / 2) and P_π(π > 2 μ) differ by more than {asymmetry:g}.",
            what_to_do="Above 0, μ samples tokens that π hardly would; below 0, π has mass where μ has little. "
            + PROBE,
            source="our choice: half of the warning of F(2), and a decade above for mixtures of experts; steps of "
            "the recorded dense runs reach 0.002",
        ),
        ThresholdRule(
            name="effective_sample_size_low",
            key=f"{TRAINER_ROLLOUT}:ess_token",
            absolute=ess.critical,
            direction="below",
            ideal=1.0,
            severity="critical",
            minimum_duration=3,
            lag_zero_only=True,
            why=f"The effective sample size of the unclamped token weights is below {ess.critical} of the tokens.",
            what_to_do=PROBE,
            source=ess.source,
        ),
        ThresholdRule(
            name="effective_sample_size_fall",
            key=f"{TRAINER_ROLLOUT}:ess_token",
            absolute=0.9,
            relative=0.85,
            direction="below",
            ideal=1.0,
            pooled="median",
            severity="warning",
            corroborates_surge=True,
            effect="halve",
            why="The effective sample size of the token weights is below 0.9 of the tokens and below 0.85 of its "
            "baseline, in the median of five steps.",
            what_to_do=LOWER,
            source="our choice: ESS is 1 / (1 + χ²), so 0.9 is a χ² of 0.11; the recorded runs stay above 0.997. 0.85 "
            "of the baseline was chosen on the tuning part of docs/collapses.md",
        ),
    )


def _logged_rules() -> tuple[ThresholdRule, ...]:
    return (
        ThresholdRule(
            name="mean_ratio_off",
            key=f"{TRAINER_ROLLOUT}:mean_ratio",
            absolute=0.02,
            direction="away",
            ideal=1.0,
            severity="warning",
            cause="sampling",
            lag_zero_only=True,
            why="The mean of π / μ is more than 0.02 away from 1, which it is if the logged μ sampled and covers π.",
            what_to_do=_LOGGED,
            source="our choice: top-p 0.9 gives 0.902; steps of the recorded runs stay within 0.002",
        ),
        ThresholdRule(
            name="surprisal_off",
            key=f"{TRAINER_ROLLOUT}:surprisal_z",
            absolute=1.0,
            direction="away",
            pooled="deviation",
            severity="info",
            cause="sampling",
            why="The surprisal of the sampled tokens differs from the entropy of the logged μ over many steps: another "
            "distribution sampled, or rare tokens of few prompt groups bias the comparison.",
            what_to_do=_LOGGED,
            source="a martingale difference, whose z is about standard normal for many prompt groups; pooled, since "
            "|z| of G groups is at most √G. Of 8 groups at low entropy it is skewed: the healthy recorded run has a "
            "mean z of -0.4 over 160 steps and fires, so it is no warning",
        ),
        ThresholdRule(
            name="scores_identical",
            key=f"{TRAINER_ROLLOUT}:max_abs_d",
            absolute=1e-12,
            direction="below",
            severity="info",
            cause="data",
            minimum_duration=3,
            why="Trainer and rollout log-probs are equal bit for bit. The trainer probably logs the engine's log-probs "
            "(bypass mode), so every trainer-side mismatch is 0.",
            what_to_do="Log recomputed log-probs, or probe a step: a replay measures the mismatch that these hide.",
            source="old_log_probs := rollout_log_probs in bypass and asynchronous training",
        ),
    )

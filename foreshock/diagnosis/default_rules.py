"""The default rules of every run, each with its texts and the source of its threshold.

To add a rule, add it here or to `mismatch_rules.py`: alerts, pages, the exporter and the API read everything from the
rule. Thresholds that are healthy ranges come from `foreshock.healthy_ranges`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis.least_tokens import LEAST_TOKENS
from foreshock.diagnosis.mismatch_rules import LOWER, mismatch_rules, range_rule
from foreshock.diagnosis.quantities import ENTROPY_KEY, GRADIENT_NORM_KEY
from foreshock.diagnosis.rule import ThresholdRule
from foreshock.diagnosis.weights import ENGINES_OFF, WEIGHTS_DIFFER, WHAT_TO_DO
from foreshock.healthy_ranges import required_range
from foreshock.model_kind import ModelKind


def default_rules(model_kind: ModelKind | None = None) -> tuple[ThresholdRule, ...]:
    """Return the rules for a kind of model; None (unknown) has the thresholds of a dense model."""
    rules = (
        *mismatch_rules(model_kind),
        *_tail_rules(model_kind),
        *_logged_rules(),
        *policy_rules(model_kind),
    )
    return tuple(replace(rule, least_tokens=LEAST_TOKENS.get(rule.measure_name, 0)) for rule in rules)


_LOGGED = (
    "Check logprobs_mode, temperature and top-p of the engine: the logged log-probs must be those of the "
    "distribution that sampled."
)


_ASYMMETRY: Final[Mapping[ModelKind, float]] = {"dense": 5e-3, "moe": 5e-2}


def _tail_rules(model_kind: ModelKind | None) -> tuple[ThresholdRule, ...]:
    tail, ess = required_range("tail_2", model_kind), required_range("ess_token", model_kind)
    asymmetry = _ASYMMETRY["dense" if model_kind is None else model_kind]
    return (
        range_rule(
            name="tail_heavy",
            key=f"{TRAINER_ROLLOUT}:tail_2",
            absolute=tail.critical,
            severity="critical",
            minimum_duration=3,
            why="At more than a tenth of the tokens the trainer's and the engine's probability differ by more than a "
            "factor of 2.",
            source=tail.source,
        ),
        range_rule(
            name="tail_asymmetry",
            key=f"{TRAINER_ROLLOUT}:tail_asymmetry_ln2",
            absolute=asymmetry,
            direction="away",
            severity="warning",
            why="Large differences are one-sided: the share of tokens to which the trainer gives less than half of the "
            f"engine's probability, and that to which it gives more than twice, differ by more than {asymmetry:g}.",
            source="our choice: half of the warning of F(2), and a decade above for mixtures of experts; steps of "
            "the recorded dense runs reach 0.002",
        ),
        range_rule(
            name="effective_sample_size_low",
            key=f"{TRAINER_ROLLOUT}:ess_token",
            absolute=ess.critical,
            direction="below",
            ideal=1.0,
            severity="critical",
            minimum_duration=3,
            why=f"The effective sample size of the token weights π / μ is below {ess.critical} of the tokens: a few "
            "tokens would carry most of an update with these weights.",
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
            why="The mean of π / μ is more than 0.02 away from 1. It is 1 if the engine sampled from the distribution "
            "that it logged and cut off no token.",
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
            least_groups=30,
            why="Over many steps the sampled tokens are likelier, or less likely, than the logged entropies predict: "
            "the engine sampled at a temperature or with a top-p that the logged "
            "log-probs leave out, or `entropy` is that of another distribution.",
            what_to_do=_LOGGED,
            source="a martingale difference, whose z is about standard normal for many prompt groups; pooled, since "
            "|z| of G groups is at most √G. Of 8 groups at low entropy it is skewed: the healthy recorded run has a "
            "mean z of -0.4 over 160 steps, so that fewer than 30 groups are not judged",
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


_REWARD = "Compare with the reward: if it rises the run learns, if it does not the policy collapses."


def policy_rules(model_kind: ModelKind | None) -> tuple[ThresholdRule, ...]:
    """Return the rules for a kind of model; None (unknown) has the thresholds of a dense model."""
    return (*_change_rules(), *_advantage_rules(), *_length_rules(model_kind), *_data_rules())


def _change_rules() -> tuple[ThresholdRule, ...]:
    return (
        ThresholdRule(
            name="gradient_rise",
            key=GRADIENT_NORM_KEY,
            relative=3.0,
            severity="warning",
            cause="gradient",
            minimum_duration=3,
            corroborates_surge=True,
            follows_learning=True,
            why="The gradient norm has risen to at least three times this run's own baseline.",
            what_to_do="Compare with the mismatch, the lengths and the reward of the same steps.",
            source="our choice: three times the run's own baseline and three times its noise",
        ),
        ThresholdRule(
            name="entropy_fall",
            key=ENTROPY_KEY,
            relative=0.2,
            direction="below",
            severity="info",
            cause="policy",
            minimum_duration=10,
            why="Entropy has fallen below a fifth of this run's own baseline.",
            what_to_do=_REWARD,
            source="our choice: a fifth of the run's own baseline",
        ),
        ThresholdRule(
            name="entropy_rise",
            key=ENTROPY_KEY,
            relative=2.5,
            severity="info",
            cause="policy",
            minimum_duration=10,
            why="Entropy has risen to at least 2.5 times this run's own baseline.",
            what_to_do=_REWARD,
            source="our choice: a recorded run whose reward fell held 2.7 times its baseline for ten steps, no other "
            "more than 2.3 times",
        ),
        ThresholdRule(
            name="perplexity_rise",
            key=f"{TRAINER_ROLLOUT}:training_ppl",
            relative=2.0,
            severity="warning",
            cause="policy",
            why="The trainer's perplexity of the sampled tokens has risen to at least twice this run's own baseline.",
            what_to_do=_REWARD,
            source="our choice: steps of the healthy recorded run reach 1.3 times its baseline, of the collapsed one 9",
        ),
    )


def _advantage_rules() -> tuple[ThresholdRule, ...]:
    return tuple(
        ThresholdRule(
            name=name,
            key=f"{TRAINER_ROLLOUT}:{measure}",
            absolute=2e-3,
            relative=5.0,
            direction="away",
            severity="info",
            cause="policy",
            why=f"{quantity} is at least five times as far from 0 as at this run's baseline: the mismatch differs "
            "between tokens that are rewarded and tokens that are punished.",
            what_to_do="Compare with k3: these signals led in a published run whose k3 stayed flat.",
            source="our choice: three times the largest step (7e-4) of the recorded runs",
        )
        for name, measure, quantity in (
            ("advantage_covariance", "advantage_d_cov", "The covariance of advantage and log π − log μ"),
            ("advantage_skew", "advantage_skew", "The mean of advantage · (π / μ − 1)"),
        )
    )


def _length_rules(model_kind: ModelKind | None) -> tuple[ThresholdRule, ...]:
    truncated = required_range("truncated_fraction", model_kind)
    return (
        ThresholdRule(
            name="length_fall",
            key=f"{STEP_ROW}:response_length_mean",
            relative=0.25,
            direction="below",
            severity="warning",
            cause="length",
            follows_learning=True,
            why="Responses are shorter than a quarter of this run's own baseline, and the reward has not risen.",
            what_to_do="Read some responses: a policy that learns to answer nothing collapses without a length surge.",
            source="our choice: a quarter of the run's own baseline",
        ),
        ThresholdRule(
            name="truncation_high",
            key=f"{STEP_ROW}:truncated_fraction",
            absolute=truncated.warning,
            severity="warning",
            cause="length",
            why="More than half of the responses are cut at the length cap, so their mean length cannot show a surge.",
            what_to_do="Raise the cap, or read length and reward of the finished responses only.",
            source=truncated.source,
        ),
    )


def _data_rules() -> tuple[ThresholdRule, ...]:
    return (
        ThresholdRule(
            name=WEIGHTS_DIFFER,
            key=f"scalars:{ENGINES_OFF}",
            absolute=0.5,
            severity="critical",
            cause="data",
            minimum_duration=1,
            cooldown_steps=0,
            why="After a weight sync an engine holds other weights than the trainer announced.",
            what_to_do=WHAT_TO_DO,
            source="exact: equal weights have equal digests",
        ),
        ThresholdRule(
            name="lag_high",
            key=f"{STEP_ROW}:lag_mean",
            absolute=8.0,
            severity="warning",
            cause="staleness",
            why="The sampled tokens come from weights that are more than eight versions old on average.",
            what_to_do="Synchronise the weights more often, or bound the staleness in the trainer; k3 of such steps is "
            "staleness, not numerics.",
            source="our choice: ranges of k3 hold at lag 0 only, and twice the lag of common asynchronous settings",
        ),
        ThresholdRule(
            name="log_probs_not_finite",
            key=f"{STEP_ROW}:nonfinite_log_probs",
            absolute=0.0,
            severity="warning",
            cause="data",
            minimum_duration=1,
            why="Some log-probs are NaN, infinite or placeholders such as −9999. They are counted and left out of "
            "every mean.",
            what_to_do="Find the sampler or mask that produces them: top-p gives -inf to a removed token.",
            source="a healthy batch has none",
        ),
    )

"""Rules on the policy itself: gradient, entropy, perplexity, advantages, lengths, staleness and broken data."""

from __future__ import annotations

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.early_warning.threshold_rule import ThresholdRule
from foreshock.model_kind import ModelKind
from foreshock.ranges import required_range

_REWARD = "Compare with the reward: if it rises the run learns, if it does not the policy collapses."


def policy_rules(model_kind: ModelKind | None) -> tuple[ThresholdRule, ...]:
    """Return the rules for a kind of model; None (unknown) has the thresholds of a dense model."""
    return (*_change_rules(), *_advantage_rules(), *_length_rules(model_kind), *_data_rules())


def _change_rules() -> tuple[ThresholdRule, ...]:
    return (
        ThresholdRule(
            name="gradient_rise",
            key="scalars:grad_norm",
            relative=3.0,
            severity="warning",
            cause="gradient",
            minimum_duration=3,
            corroborates_surge=True,
            follows_learning=True,
            why="The gradient norm has risen to at least three times this run's own baseline.",
            what_to_do="Compare with the mismatch and the length of the same steps: together they precede a collapse.",
            source="our choice: three times the run's own baseline and three times its noise",
        ),
        ThresholdRule(
            name="entropy_fall",
            key=f"{STEP_ROW}:entropy_mean",
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
            key=f"{STEP_ROW}:entropy_mean",
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
            why="The perplexity of π on the sampled tokens has risen to at least twice this run's own baseline.",
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
            why=f"{quantity} is at least five times as far from 0 as at this run's baseline: the mismatch depends on "
            "what is rewarded.",
            what_to_do="Compare with k3: these signals led in a published run whose k3 stayed flat.",
            source="our choice: three times the largest step (7e-4) of the recorded runs",
        )
        for name, measure, quantity in (
            ("advantage_covariance", "advantage_d_cov", "cov(A, d)"),
            ("advantage_skew", "advantage_skew", "The signed skew, the mean of A · (ρ − 1),"),
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
            why="Responses are shorter than a quarter of this run's own baseline.",
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
            why="Some log-probs are NaN or infinite. They are counted and left out of every mean.",
            what_to_do="Find the sampler or mask that produces them: top-p gives -inf to a removed token.",
            source="a healthy batch has none",
        ),
    )

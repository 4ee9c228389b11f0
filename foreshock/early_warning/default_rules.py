"""The rules that every run is watched with, each with its texts and the source of its threshold.

To add a rule, add it here: alerts, pages, the exporter and the API read all of it from the rule. Thresholds that are
healthy ranges come from `foreshock.ranges`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.early_warning.rules import ThresholdRule
from foreshock.model_kind import ModelKind
from foreshock.ranges import HealthyRange, required_range, threshold_number

__all__ = ["K3", "default_rules"]

K3 = f"{TRAINER_ROLLOUT}:k3_kl"

_PROBE = "Probe a step that has a checkpoint and read its attribution, which says what the data tells about the cause."
_LOWER = "Lower the learning rate. Find the cause with a probe before you raise it again."

_MODELS: Final[Mapping[ModelKind | None, str]] = {
    "dense": "a dense model",
    "moe": "a mixture of experts",
    None: "a dense model (the model kind of this run is unknown; declare it if it is a mixture of experts)",
}


def default_rules(model_kind: ModelKind | None = None) -> tuple[ThresholdRule, ...]:
    """Return the rules for a kind of model; None (unknown) has the thresholds of a dense model."""
    k3, model = required_range("k3_kl", model_kind), _MODELS[model_kind]
    return (
        *_mismatch_rules(k3, model),
        *_rising_mismatch_rules(k3, model),
        *_difference_rules(model_kind),
        *_tail_rules(model_kind),
        *_run_rules(model_kind),
    )


def _mismatch_rules(k3: HealthyRange, model: str) -> tuple[ThresholdRule, ...]:
    assert k3.warning is not None
    assert k3.critical is not None
    warning, critical = threshold_number(k3.warning), threshold_number(k3.critical)
    return (
        ThresholdRule(
            name="mismatch_warning",
            key=K3,
            absolute=k3.warning,
            severity="warning",
            lag_zero_only=True,
            why=f"k3 of {TRAINER_ROLLOUT} is above {warning} nats per token; {k3.healthy} is healthy for {model}.",
            what_to_do=_PROBE,
            source=k3.source,
        ),
        ThresholdRule(
            name="mismatch_critical",
            key=K3,
            absolute=k3.critical,
            severity="critical",
            minimum_duration=3,
            lag_zero_only=True,
            why=f"k3 of {TRAINER_ROLLOUT} is above {critical} nats per token; {k3.healthy} is healthy for {model}.",
            what_to_do=_PROBE,
            source=k3.source,
        ),
        ThresholdRule(
            name="mismatch_baseline_critical",
            key=f"{K3}@baseline",
            absolute=k3.critical,
            severity="critical",
            minimum_duration=1,
            lag_zero_only=True,
            why=f"The baseline of k3 is above {critical} nats per token, which is critical for {model}. Rules that "
            "compare with the baseline cannot see this mismatch.",
            what_to_do=f"Do not trust the baseline. {_PROBE}",
            source=k3.source,
        ),
    )


def _rising_mismatch_rules(k3: HealthyRange, model: str) -> tuple[ThresholdRule, ...]:
    assert k3.warning is not None
    assert k3.critical is not None
    return (
        ThresholdRule(
            name="mismatch_rise",
            key=K3,
            # A tenth of the healthy end: below it a fivefold rise is within every healthy run.
            absolute=k3.warning / 10,
            relative=5.0,
            severity="warning",
            corroborates_surge=True,
            why=f"k3 of {TRAINER_ROLLOUT} has risen to at least five times this run's own baseline.",
            what_to_do=_PROBE,
            source="five times the run's own baseline and three times its noise (a choice of this project)",
        ),
        ThresholdRule(
            name="mismatch_runaway",
            key=K3,
            absolute=k3.critical,
            relative=5.0,
            severity="critical",
            minimum_duration=3,
            cooldown_steps=50,
            corroborates_surge=True,
            moves_learning_rate=True,
            why=f"k3 of {TRAINER_ROLLOUT} is above {threshold_number(k3.critical)} nats per token, which is critical "
            f"for {model}, and has risen to at least five times this run's own baseline.",
            what_to_do=_LOWER,
            source=f"{k3.source}, and five times the run's own baseline",
        ),
    )


def _difference_rules(model_kind: ModelKind | None) -> tuple[ThresholdRule, ...]:
    difference, error = (
        required_range(name, model_kind) for name in ("rollout_probs_diff_mean", "token_mult_prob_error")
    )
    return (
        ThresholdRule(
            name="probability_difference",
            key=f"{TRAINER_ROLLOUT}:rollout_probs_diff_mean",
            absolute=difference.warning,
            severity="warning",
            lag_zero_only=True,
            why=f"The mean |π − μ| of probabilities is above {difference.warning}.",
            what_to_do=_PROBE,
            source=difference.source,
        ),
        ThresholdRule(
            name="multiplicative_error_warning",
            key=f"{TRAINER_ROLLOUT}:token_mult_prob_error",
            absolute=error.warning,
            severity="warning",
            lag_zero_only=True,
            why=f"The mean of exp|d| is above {error.warning}.",
            what_to_do=_PROBE,
            source=error.source,
        ),
        ThresholdRule(
            name="multiplicative_error_critical",
            key=f"{TRAINER_ROLLOUT}:token_mult_prob_error",
            absolute=error.critical,
            severity="critical",
            minimum_duration=3,
            lag_zero_only=True,
            why=f"The mean of exp|d| is above {error.critical}.",
            what_to_do=_PROBE,
            source=error.source,
        ),
    )


def _tail_rules(model_kind: ModelKind | None) -> tuple[ThresholdRule, ...]:
    tail, ess = required_range("tail_2", model_kind), required_range("ess_token", model_kind)
    return (
        ThresholdRule(
            name="tail_heavy",
            key=f"{TRAINER_ROLLOUT}:tail_2",
            absolute=tail.critical,
            severity="critical",
            minimum_duration=3,
            lag_zero_only=True,
            why="At more than a tenth of the tokens π and μ differ by more than a factor of 2.",
            what_to_do=_PROBE,
            source=tail.source,
        ),
        ThresholdRule(
            name="effective_sample_size_low",
            key=f"{TRAINER_ROLLOUT}:ess_token",
            absolute=ess.critical,
            direction="below",
            severity="critical",
            minimum_duration=3,
            lag_zero_only=True,
            why=f"The effective sample size of the unclamped token weights is below {ess.critical} of the tokens.",
            what_to_do=_PROBE,
            source=ess.source,
        ),
        ThresholdRule(
            name="scores_identical",
            key=f"{TRAINER_ROLLOUT}:max_abs_d",
            absolute=1e-12,
            direction="below",
            severity="info",
            minimum_duration=3,
            lag_zero_only=False,
            why="Trainer and rollout log-probs are equal bit for bit. The trainer probably logs the engine's log-probs "
            "(bypass mode), so every trainer-side mismatch is 0.",
            what_to_do="Log recomputed log-probs, or probe a step: a replay measures the mismatch that these hide.",
            source="old_log_probs := rollout_log_probs in bypass and asynchronous training",
        ),
    )


def _run_rules(model_kind: ModelKind | None) -> tuple[ThresholdRule, ...]:
    truncated = required_range("truncated_fraction", model_kind)
    return (
        ThresholdRule(
            name="gradient_rise",
            key="scalars:grad_norm",
            relative=3.0,
            severity="warning",
            minimum_duration=3,
            corroborates_surge=True,
            why="The gradient norm has risen to at least three times this run's own baseline.",
            what_to_do="Compare with the mismatch and the length of the same steps: together they precede a collapse.",
            source="three times the run's own baseline and three times its noise (a choice of this project)",
        ),
        ThresholdRule(
            name="entropy_fall",
            key=f"{STEP_ROW}:entropy_mean",
            relative=0.2,
            direction="below",
            severity="info",
            minimum_duration=10,
            why="Entropy has fallen below a fifth of this run's own baseline.",
            what_to_do="Compare with the reward: if it rises the run learns, if it does not the policy collapses.",
            source="a fifth of the run's own baseline (a choice of this project)",
        ),
        ThresholdRule(
            name="length_fall",
            key=f"{STEP_ROW}:response_length_mean",
            relative=0.25,
            direction="below",
            severity="warning",
            why="Responses are shorter than a quarter of this run's own baseline.",
            what_to_do="Read some responses: a policy that learns to answer nothing collapses without a length surge.",
            source="a quarter of the run's own baseline (a choice of this project)",
        ),
        ThresholdRule(
            name="truncation_high",
            key=f"{STEP_ROW}:truncated_fraction",
            absolute=truncated.warning,
            severity="warning",
            why="More than half of the responses are cut at the length cap, so their mean length cannot show a surge.",
            what_to_do="Raise the cap, or read length and reward of the finished responses only.",
            source=truncated.source,
        ),
        ThresholdRule(
            name="log_probs_not_finite",
            key=f"{STEP_ROW}:nonfinite_log_probs",
            absolute=0.0,
            severity="warning",
            minimum_duration=1,
            why="Some log-probs are NaN or infinite. They are counted and left out of every mean.",
            what_to_do="Find the sampler or mask that produces them: top-p gives -inf to a removed token.",
            source="a healthy batch has none",
        ),
    )

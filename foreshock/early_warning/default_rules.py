"""The rules every run is watched with, each with the source of its number."""

from __future__ import annotations

from dataclasses import replace

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.early_warning.rules import ThresholdRule

K3 = f"{TRAINER_ROLLOUT}:k3_kl"

MIXTURE_OF_EXPERTS_FACTOR = 10.0
"""Published healthy ranges of k3 for mixtures of experts lie one decade above those of dense models."""

_PROBE = "Probe a checkpointed step and read its attribution: it names the link that the mismatch comes from."
_LOWER = "Lower the learning rate, and find the cause by a probe before raising it again."

MISMATCH_RULES = (
    ThresholdRule(
        name="mismatch_warning",
        key=K3,
        absolute=1e-3,
        severity="warning",
        lag_zero_only=True,
        why="k3 of trainer/rollout is above the healthy range of 1e-5 to 1e-3 nats a token.",
        what_to_do=_PROBE,
        source="published range, dense bf16 at lag 0: healthy to 1e-3",
    ),
    ThresholdRule(
        name="mismatch_critical",
        key=K3,
        absolute=1e-2,
        severity="critical",
        minimum_duration=3,
        lag_zero_only=True,
        why="k3 of trainer/rollout is above 1e-2 nats a token: trainer and engine disagree badly.",
        what_to_do=_PROBE,
        source="published range, dense bf16 at lag 0: critical above 1e-2",
    ),
    ThresholdRule(
        name="mismatch_rise",
        key=K3,
        # Below 1e-4 a fivefold rise is still well within every healthy run.
        absolute=1e-4,
        relative=5.0,
        severity="warning",
        corroborates_surge=True,
        why="k3 of trainer/rollout has risen to several times this run's own baseline.",
        what_to_do=_PROBE,
        source="five times the run's own baseline and three times its noise (a choice of this project)",
    ),
    ThresholdRule(
        name="mismatch_runaway",
        key=K3,
        absolute=1e-2,
        relative=5.0,
        severity="critical",
        minimum_duration=3,
        cooldown_steps=50,
        corroborates_surge=True,
        moves_learning_rate=True,
        why="k3 of trainer/rollout is in the critical range and has risen to several times this run's own baseline.",
        what_to_do=_LOWER,
        source="published range (critical above 1e-2) and five times the run's own baseline",
    ),
    ThresholdRule(
        name="mismatch_baseline_critical",
        key=f"{K3}@baseline",
        absolute=1e-2,
        severity="critical",
        minimum_duration=1,
        lag_zero_only=True,
        why="This run's baseline of k3 is itself in the critical range, so rules relative to it cannot fire.",
        what_to_do=f"Do not trust the baseline. {_PROBE}",
        source="published range: a baseline that is already critical is itself an alert",
    ),
    ThresholdRule(
        name="probability_difference",
        key=f"{TRAINER_ROLLOUT}:rollout_probs_diff_mean",
        absolute=0.01,
        severity="warning",
        lag_zero_only=True,
        why="The mean absolute difference of trainer and engine probabilities is above 0.01.",
        what_to_do=_PROBE,
        source="published range: healthy below 0.005, warning above 0.01",
    ),
    ThresholdRule(
        name="multiplicative_error_warning",
        key=f"{TRAINER_ROLLOUT}:token_mult_prob_error",
        absolute=1.05,
        severity="warning",
        lag_zero_only=True,
        why="The mean of exp|d| is above 1.05.",
        what_to_do=_PROBE,
        source="NeMo-RL: 1.0 is ideal, above 1.05 suspicious",
    ),
    ThresholdRule(
        name="multiplicative_error_critical",
        key=f"{TRAINER_ROLLOUT}:token_mult_prob_error",
        absolute=1.1,
        severity="critical",
        minimum_duration=3,
        lag_zero_only=True,
        why="The mean of exp|d| is above 1.1.",
        what_to_do=_PROBE,
        source="published range: critical above 1.1",
    ),
    ThresholdRule(
        name="tail_heavy",
        key=f"{TRAINER_ROLLOUT}:tail_2",
        absolute=0.1,
        severity="critical",
        minimum_duration=3,
        lag_zero_only=True,
        why="More than a tenth of the tokens have a probability ratio beyond 2.",
        what_to_do=_PROBE,
        source="R3: F(2) above 0.1 is dangerous",
    ),
    ThresholdRule(
        name="effective_sample_size_low",
        key=f"{TRAINER_ROLLOUT}:ess_token",
        absolute=0.3,
        direction="below",
        severity="critical",
        minimum_duration=3,
        lag_zero_only=True,
        why="The unclamped effective sample size is below 0.3 of the tokens.",
        what_to_do=_PROBE,
        source="the usual alarm of 0.3, on unclamped weights (clamped at 2 it cannot fall below 0.64)",
    ),
    ThresholdRule(
        name="scores_identical",
        key=f"{TRAINER_ROLLOUT}:max_abs_d",
        absolute=1e-12,
        direction="below",
        severity="info",
        minimum_duration=3,
        lag_zero_only=False,
        why="Trainer and rollout log-probs are equal to the last bit: the trainer probably logs the engine's own "
        "(bypass mode), and every trainer-side mismatch reads 0.",
        what_to_do="Log recomputed log-probs, or probe: a scorer of its own sees the mismatch that these cannot.",
        source="old_log_probs := rollout_log_probs in bypass and asynchronous training",
    ),
)

RUN_RULES = (
    ThresholdRule(
        name="gradient_rise",
        key="scalars:grad_norm",
        relative=3.0,
        severity="warning",
        minimum_duration=3,
        corroborates_surge=True,
        why="The gradient norm has risen to several times this run's own baseline.",
        what_to_do="Look at the mismatch and the length of the same steps: together they come before a collapse.",
        source="three times the run's own baseline and three times its noise (a choice of this project)",
    ),
    ThresholdRule(
        name="entropy_fall",
        key="rollout:entropy_mean",
        relative=0.2,
        direction="below",
        severity="info",
        minimum_duration=10,
        why="Entropy has fallen below a fifth of this run's own baseline.",
        what_to_do="Compare with the reward: falling entropy with rising reward is learning, without it a collapse.",
        source="a fifth of the run's own baseline (a choice of this project)",
    ),
    ThresholdRule(
        name="length_fall",
        key="rollout:response_length_mean",
        relative=0.25,
        direction="below",
        severity="warning",
        why="Responses are shorter than a quarter of this run's own baseline.",
        what_to_do="Read some responses: a run that has learnt to say nothing collapses without any surge.",
        source="a quarter of the run's own baseline (a choice of this project)",
    ),
    ThresholdRule(
        name="truncation_high",
        key="rollout:truncated_fraction",
        absolute=0.5,
        severity="warning",
        why="More than half of the responses are cut off at the length cap: lengths can no longer show a surge.",
        what_to_do="Raise the cap, or read lengths and rewards of the finished responses only.",
        source="half of the responses (a choice of this project; a benign run stood at 0.1 to 0.35)",
    ),
    ThresholdRule(
        name="log_probs_not_finite",
        key="rollout:nonfinite_log_probs",
        absolute=0.0,
        severity="warning",
        minimum_duration=1,
        why="Some log-probs are NaN or infinite. They are counted and kept out of every mean.",
        what_to_do="Find the sampler or mask that makes them: -inf is what top-p leaves of a removed token.",
        source="none is the healthy number",
    ),
)

DEFAULT_RULES = MISMATCH_RULES + RUN_RULES


def default_rules(mixture_of_experts: bool = False) -> tuple[ThresholdRule, ...]:
    """The rules for a dense model, or those whose absolute k3 ranges are a mixture of experts'."""
    if not mixture_of_experts:
        return DEFAULT_RULES
    return tuple(
        replace(rule, absolute=rule.absolute * MIXTURE_OF_EXPERTS_FACTOR)
        if rule.key.startswith(K3) and rule.absolute is not None
        else rule
        for rule in DEFAULT_RULES
    )

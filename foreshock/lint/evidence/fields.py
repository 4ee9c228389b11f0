"""The names of the lint's counts, sums and extremes, in the order in which they are stored.

Counts and sums merge by adding, extremes by taking the larger. A stored blob holds them by position: append a name only
together with a new version in `lint_evidence.py`.
"""

from __future__ import annotations

__all__ = ["COLUMNS", "COUNTS", "EXTREMES", "SUMS"]

# The two columns of log-probs: rollout_log_probs (log μ) and trainer_log_probs (log π).
COLUMNS = ("rollout", "trainer")

_OF_COLUMNS = (
    "logged",  # generated tokens with the column
    "nan",
    "minus_inf",
    "plus_inf",
    "positive",  # finite and above 0 by more than rounding
    "negative",  # finite and below 0 by more than rounding
    "above_one",
    "rounding_seen",  # tokens of the sample that was tested for rounding
    "as_bfloat16",  # of these: exactly representable in bfloat16
    "as_float16",
    "large_seen",  # of `rounding_seen`: |log-prob| of 0.5 or more: few such values fit by chance
    "large_as_bfloat16",
    "large_as_float16",
    "non_finite_first",  # not finite, at the first or the last generated token of a response
    "non_finite_last",
)

COUNTS = (
    "rollouts",
    "tokens",  # generated
    "tool_tokens",
    *(f"{column}_{name}" for column in COLUMNS for name in _OF_COLUMNS),
    "paired",  # generated tokens with two finite log-probs
    "equal",  # of these: bit for bit the same number
    "uncertain",  # of `paired`: log μ below UNCERTAIN
    "copiable_rollouts",  # rollouts with eight uncertain tokens or more
    "copied_rollouts",  # of these: log π equals log μ at every uncertain token
    "certain_behaviour",  # log μ = 0, and log π clearly below
    "no_mu",  # log μ = 0 in every bit, and log π clearly below
    "no_mu_first",  # of `no_mu`: at the first token of a response, at the last, in a run of zeros up to the end
    "no_mu_last",
    "no_mu_trailing",
    "above_zero",  # d clearly above 0
    "below_zero",  # d clearly below 0
    "large",  # |d| of LARGE_D or more
    "shift_tokens",
    "shift_rollouts",
    "shift_prefer_earlier",
    "shift_prefer_later",
    "shift_clear_earlier",  # rollouts in which the neighbour fits at least four times as well
    "shift_clear_later",
    "scale_tokens",  # with two finite log-probs clearly below 0
    "surprisal_tokens",
    "broad_tokens",  # of these: with an entropy above 0.5
    "missing_first",  # no log π beside a real log μ, at the first or the last token of a response
    "missing_last",
    "dropped_first",  # masked with a log μ, at the first or the last token of a response
    "dropped_last",
    "masked_rollout",
    "masked_trainer",
    "masked_entropy",
    "masked_advantage",
    # Rollouts by their declared sampling.
    "declared_tempered",
    "declared_truncated",
    "declared_shaped",
    "sampling_unknown",
    "mode_raw",
    "mode_processed",
    "mode_unknown",
    "raw_and_shaped",
    "processed_and_truncated",
    "shaped_mode_unknown",
    "unknown_repeat_chance",  # greedy, or shaped and logged raw: log μ does not give the chance of a repeat
    "declared_bypass",
    "declared_policy",
)

SUMS = (
    "shift_earlier",  # Σ|log π_t − log μ_{t−1}|, each at most 5
    "shift_none",
    "shift_later",
    "no_mu_log_pi",  # Σ log π over `no_mu`
    # Σ log μ · log π, Σ (log μ)² and Σ (log π)² over `scale_tokens`, likely ones (log μ above −1) and others.
    *(f"scale_{part}_{product}" for part in ("likely", "unlikely") for product in ("cross", "mu", "pi")),
    "paired_k3",  # Σ(ρ − 1 − d) over tokens with two finite log-probs
    "paired_surprisal",  # Σ −log μ over the same tokens
    "surprisal",  # Σ −log μ
    "entropy",  # Σ H
    "target_surprisal",  # Σ ρ·(−log π), over tokens with two finite log-probs and an entropy
    "target_entropy",  # Σ H over the same tokens
    "sharp_bound",  # Σ of the bound of E[(−log μ)²] over tokens with an entropy of at most 0.5
    "broad_bound",  # the same at entropies above 0.5
    "broad_squares",  # Σ (−log μ − H)² at entropies above 0.5
    "rollout_bfloat16_variance",  # Σ of the squared spacing of bfloat16 values, over `rounding_seen`
    "rollout_float16_variance",
    "trainer_bfloat16_variance",
    "trainer_float16_variance",
)

# Merged by taking the larger value; a minimum is stored negated.
EXTREMES = (
    "largest_surprisal",
    "rollout_max",
    "rollout_minus_min",
    "trainer_max",
    "trainer_minus_min",
    "max_temperature",
    "minus_min_temperature",
    "minus_min_top_p",
    "minus_min_top_k",
    "max_min_p",
)

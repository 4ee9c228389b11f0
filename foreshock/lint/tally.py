"""The numbers of the lint that merge by adding, or by taking the larger: their names, and a pad to collect them on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from foreshock.lint.report import Example

__all__ = ["COLUMNS", "COUNTS", "EXAMPLES_KEPT", "EXTREMES", "SUMS", "Tally"]

# The two columns of log-probs, as evidence names them.
COLUMNS = ("rollout", "trainer")

_OF_COLUMNS = (
    "logged",  # generated tokens with the column
    "nan",
    "minus_inf",
    "plus_inf",
    "positive",  # finite and above 0 beyond rounding
    "negative",  # finite and below 0 beyond rounding
    "above_one",
    "rounding_seen",  # sampled tokens whose low bits were looked at
    "as_bfloat16",  # of these: exactly representable in bfloat16
    "as_float16",
    "large_seen",  # of these: beyond 0.5, where hardly any value fits by chance
    "large_as_bfloat16",
    "large_as_float16",
    "lost_first",  # not finite, at the first or the last generated token of a response
    "lost_last",
)

COUNTS = (
    "rollouts",
    "tokens",  # generated
    "tool_tokens",
    *(f"{column}_{name}" for column in COLUMNS for name in _OF_COLUMNS),
    "paired",  # generated tokens with two finite log-probs
    "equal",  # of these: bit for bit the same number
    "uncertain",  # of `paired`: log μ below UNCERTAIN
    "copiable_rollouts",  # with eight uncertain tokens or more
    "copied_rollouts",  # of these: all of them equal
    "certain_behaviour",  # log μ = 0, and log π clearly below
    "no_mu",  # log μ = 0 in every bit, and log π clearly below
    "no_mu_first",  # of these: at the first token of a response, at its last, in a row of zeros up to its end
    "no_mu_last",
    "no_mu_trailing",
    "above_zero",  # d clearly above 0
    "below_zero",  # d clearly below 0
    "shift_tokens",
    "shift_rollouts",
    "shift_prefer_earlier",
    "shift_prefer_later",
    "shift_clear_earlier",  # rollouts of which the neighbour's fit leaves no doubt
    "shift_clear_later",
    "scale_tokens",  # with two finite log-probs clearly below 0
    "surprisal_tokens",
    "broad_tokens",  # of these: with an entropy above 0.5
    "dropped_first",  # without a log π where log μ is real, at the first or the last token of a response
    "dropped_last",
    "masked_rollout",
    "masked_trainer",
    "masked_entropy",
    "masked_advantage",
    # Rollouts by what is declared of their sampling.
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
    "uncomparable_sampling",  # greedy, or shaped and logged raw: no probability of coincidence is known
    "declared_bypass",
    "declared_policy",
)

SUMS = (
    "shift_earlier",  # Σ|log π_t − log μ_{t−1}|, each at most SHIFT_CAP
    "shift_none",
    "shift_later",
    "no_mu_log_pi",  # Σ log π over `no_mu`
    # Σ log μ · log π, Σ (log μ)² and Σ (log π)² over `scale_tokens`, likely ones (log μ above −1) and others.
    *(f"scale_{part}_{product}" for part in ("likely", "unlikely") for product in ("cross", "mu", "pi")),
    "surprisal",  # Σ −log μ
    "entropy",  # Σ H
    "target_surprisal",  # Σ ρ·(−log π), over tokens with two finite log-probs and an entropy
    "target_entropy",  # Σ H there
    "sharp_bound",  # Σ of the bound of E[(−log μ)²] where the entropy is at most 0.5
    "broad_bound",  # and where it is above
    "broad_squares",  # Σ (−log μ − H)² there
    "rollout_bfloat16_variance",  # Σ of the square of a bfloat16's last place, over the tokens looked at
    "rollout_float16_variance",
    "trainer_bfloat16_variance",
    "trainer_float16_variance",
)

# Merged by the larger; a least value is kept negated.
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

EXAMPLES_KEPT = 3


@dataclass(slots=True)
class Tally:
    """COUNTS, SUMS, EXTREMES and examples by name, while they are taken from one batch."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    extremes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EXTREMES, -math.inf))
    examples: dict[str, list[Example]] = field(default_factory=dict)

    def count(self, **numbers: int) -> None:
        """Add to counts."""
        for name, number in numbers.items():
            self.counts[name] += int(number)

    def add(self, **numbers: float) -> None:
        """Add to sums."""
        for name, number in numbers.items():
            self.sums[name] += float(number)

    def largest(self, values: Mapping[str, float]) -> None:
        """Raise extremes to these values; NaN raises nothing."""
        for name, value in values.items():
            if value > self.extremes[name]:
                self.extremes[name] = float(value)

    def wants_example(self, check: str) -> bool:
        """Whether more examples of a check are to be kept."""
        return len(self.examples.get(check, ())) < EXAMPLES_KEPT

    def example(self, check: str, example: Example) -> None:
        """Keep an example, if there is room."""
        if self.wants_example(check):
            self.examples.setdefault(check, []).append(example)

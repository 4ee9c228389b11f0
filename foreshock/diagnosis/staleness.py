"""What the newest steps tell of numerics and staleness apart, from k3 at each lag."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.lags import AT_LAG_ZERO, LAGS, NEARLY_ALL, StepLags, lags_in_words
from foreshock.diagnosis.least_tokens import LEAST_TOKENS
from foreshock.diagnosis.wording import number, percent

LEAST_AT_LAG_ZERO = LEAST_TOKENS["k3_kl"]


@dataclass(frozen=True, slots=True)
class LagLevels:
    """k3 (nats) and the number of tokens at each lag that has tokens, over some steps, lags ascending."""

    tokens: dict[str, float]
    k3: dict[str, float]

    @classmethod
    def of(cls, steps: Sequence[StepLags]) -> LagLevels:
        """Return the means over the tokens of these steps."""
        tokens = {lag: sum(each.tokens.get(lag, 0.0) for each in steps) for lag in LAGS}
        tokens = {lag: count for lag, count in tokens.items() if count > 0.0}
        k3 = {lag: sum(each.k3[lag] * each.tokens[lag] for each in steps if lag in each.tokens) for lag in tokens}
        return cls(tokens, {lag: total / tokens[lag] for lag, total in k3.items()})

    @property
    def is_mixed(self) -> bool:
        """Whether some tokens are known to be at another lag than 0."""
        return bool(self.tokens) and list(self.tokens) != [AT_LAG_ZERO]

    @property
    def hides_numerics(self) -> bool:
        """Whether tokens are at other lags and too few at lag 0 to judge numerics."""
        return self.is_mixed and self.tokens.get(AT_LAG_ZERO, 0.0) < LEAST_AT_LAG_ZERO

    @property
    def are_nearly_all_fresh(self) -> bool:
        """Whether ranges of measures that are known of all tokens only hold: nearly all tokens are at lag 0."""
        return self.tokens.get(AT_LAG_ZERO, 0.0) >= NEARLY_ALL * sum(self.tokens.values())

    def in_words(self, mean: float, when: str) -> str:
        """Return k3 at lag 0 beside the mean over all tokens, and why they differ, as clauses."""
        stale = [lag for lag in self.tokens if lag != AT_LAG_ZERO]
        share = percent(sum(self.tokens[lag] for lag in stale) / sum(self.tokens.values()))
        return (
            f"at lag 0 k3 of {TRAINER_ROLLOUT} is {number(self.k3[AT_LAG_ZERO])} {when}; the mean of all tokens is "
            f"{number(mean)}, with {share} of them at {lags_in_words(stale)}"
        )

    def untold(self, mean: float) -> str:
        """Return that numerics cannot be told from staleness, with k3 at each lag, as clauses."""
        at_zero = int(self.tokens.get(AT_LAG_ZERO, 0))
        few = f"only {at_zero} tokens are" if at_zero else "no token is"
        levels = ", ".join(
            f"{number(k3)} at {lags_in_words([lag])}"
            for lag, k3 in self.k3.items()
            if math.isfinite(k3) and lag != AT_LAG_ZERO
        )
        return (
            f"k3 of {TRAINER_ROLLOUT} is {number(mean)} and {few} at lag 0, so that numerics cannot be told from "
            f"staleness: it is {levels}"
        )

"""The lags of a step's tokens, so that rules judge numerics and staleness apart.

At lag 0 trainer and engine hold the same weights: what differs is numerics. Tokens of older weights differ more, in a
healthy run too, and by how much depends on the lag. So k3 is judged at lag 0, and every other lag against its own
baseline of the run. Other quantities are known only for whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis.least_tokens import LEAST_TOKENS
from foreshock.diagnosis.mismatch_rules import K3, K3_PER_ENTROPY
from foreshock.diagnosis.rule import Baseline, ThresholdRule
from foreshock.diagnosis.wording import number, percent
from foreshock.json_values import finite_or_none
from foreshock.measures.registry import K3_BY_LAG, TOKENS_BY_LAG
from foreshock.measures.statistics.conditions import LAG_BUCKETS

LAG_KEY: Final = f"{STEP_ROW}:lag_mean"
LAGS: Final = tuple(LAG_BUCKETS)
AT_LAG_ZERO: Final = LAGS[0]

K3_KEYS: Final = {lag: f"{TRAINER_ROLLOUT}:{each.column}" for lag, each in zip(LAGS, K3_BY_LAG, strict=True)}
TOKENS_KEYS: Final = {lag: f"{TRAINER_ROLLOUT}:{each.column}" for lag, each in zip(LAGS, TOKENS_BY_LAG, strict=True)}
LAG_KEYS: Final = (LAG_KEY, *K3_KEYS.values(), *TOKENS_KEYS.values())

NEARLY_ALL: Final = 0.99
"""A step with this share of its tokens at lag 0 counts as lag 0: the other tokens hardly change its means."""

MIXED: Final = "mixed"
"""The lag of a step whose mean lag rounds to 0, but whose share of tokens at lag 0 is below NEARLY_ALL."""


KNOWN_BY_LAG: Final = frozenset({K3, K3_PER_ENTROPY})
"""Quantities with a value for each lag of a step; others are known only for whole steps."""

NEWEST: Final = "newest"
"""Stands for the lag in the name of a baseline that is the newest value of a reference."""


@dataclass(frozen=True, slots=True)
class StepLags:
    """The lags of a step: the tokens and k3 (nats) at each lag that has tokens, and one name for all of them.

    Without tokens by lag (no versions logged, scalars only) only the mean lag is known; if that is unknown too, the
    step counts as lag 0.
    """

    name: str
    tokens: Mapping[str, float]
    k3: Mapping[str, float]

    @classmethod
    def of(cls, values: Mapping[str, float]) -> StepLags:
        """Return the lags of a step from its values by `comparison:measure`."""
        mean = finite_or_none(values.get(LAG_KEY)) or 0.0
        tokens = {lag: values.get(key, 0.0) for lag, key in TOKENS_KEYS.items()}
        tokens = {lag: count for lag, count in tokens.items() if count > 0.0}
        name = str(round(mean))
        if tokens and tokens.get(AT_LAG_ZERO, 0.0) >= NEARLY_ALL * sum(tokens.values()):
            name = AT_LAG_ZERO
        elif tokens and name == AT_LAG_ZERO:
            name = MIXED
        return cls(name, tokens, {lag: values.get(K3_KEYS[lag], math.nan) for lag in tokens})

    @property
    def is_mixed(self) -> bool:
        """Whether tokens are known to be at some lag other than 0."""
        return bool(self.tokens) and list(self.tokens) != [AT_LAG_ZERO]

    @property
    def mean(self) -> float:
        """The mean lag of the tokens, in versions, of a bucket its middle; without tokens that of the name."""
        if not self.tokens:
            return 0.5 if self.name == MIXED else float(self.name)
        return sum(tokens * _middle(lag) for lag, tokens in self.tokens.items()) / sum(self.tokens.values())

    @property
    def numerics(self) -> float | None:
        """k3 of the tokens at lag 0, in nats per token; None if they are too few to judge."""
        enough = self.tokens.get(AT_LAG_ZERO, 0.0) >= LEAST_TOKENS["k3_kl"]
        return finite_or_none(self.k3[AT_LAG_ZERO]) if enough else None

    def share(self, lags: Sequence[str]) -> float:
        """Return the share of the step's tokens at these lags; NaN if it is unknown."""
        return sum(self.tokens[lag] for lag in lags) / sum(self.tokens.values()) if self.tokens else math.nan


def _middle(lag: str) -> float:
    first, _, last = lag.removesuffix("+").partition("-")
    return (float(first) + float(last or first)) / 2


def lags_in_words(lags: Sequence[str]) -> str:
    """Return some of LAGS, ascending, as words: "lag 0", "lags 1 to 8", "lags 1 and more"."""
    first, last = lags[0].partition("-")[0].removesuffix("+"), lags[-1].rpartition("-")[2]
    if last.endswith("+"):
        return f"lags {first} and more"
    return f"lag {first}" if first == last else f"lags {first} to {last}"


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
        return self.is_mixed and self.tokens.get(AT_LAG_ZERO, 0.0) < LEAST_TOKENS["k3_kl"]

    def in_words(self, mean: float, when: str) -> str:
        """Return k3 at lag 0 beside the mean over all tokens, and why they differ, as clauses."""
        stale = [lag for lag in self.tokens if lag != AT_LAG_ZERO]
        share = percent(sum(self.tokens[lag] for lag in stale) / sum(self.tokens.values()))
        return (
            f"at lag 0 the mismatch (k3) is {number(self.k3[AT_LAG_ZERO])} {when}; the mean of all tokens is "
            f"{number(mean)}, with {share} of them at {lags_in_words(stale)}"
        )

    def untold(self, mean: float) -> str:
        """Return clauses: that numerics cannot be told from staleness, and k3 at each lag."""
        at_zero = int(self.tokens.get(AT_LAG_ZERO, 0))
        few = f"only {at_zero} tokens are" if at_zero else "no token is"
        levels = ", ".join(
            f"{number(k3)} at {lags_in_words([lag])}"
            for lag, k3 in self.k3.items()
            if math.isfinite(k3) and lag != AT_LAG_ZERO
        )
        return (
            f"the mismatch (k3) is {number(mean)} and {few} at lag 0, so that numerics cannot be told from "
            f"staleness: it is {levels}"
        )


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of a step that a rule judges together: their lag, the rule's quantity, and their number if known."""

    lag: str
    value: float
    tokens: float = math.nan


@dataclass(frozen=True, slots=True)
class Judged:
    """A value that is compared with a threshold; `lags` are those of its tokens, if they are only a part of the step's.

    `lag` is the name of the value's lag, `elsewhere` the value at lag 0 if other lags are judged.
    """

    value: float
    measured: float
    threshold: float
    level: float
    noise: float
    lag: str
    tokens: float = math.nan
    lags: tuple[str, ...] = ()
    elsewhere: float = math.nan


def parts_of(rule: ThresholdRule, values: Mapping[str, float], lags: StepLags) -> list[Part]:
    """Return the parts of a step that the rule judges: k3 by lag, other quantities as a whole."""
    value = finite_or_none(values.get(rule.quantity))
    if value is None:
        return []
    whole_k3 = values.get(K3, 0.0)
    if rule.quantity in KNOWN_BY_LAG and rule.direction == "above" and lags.is_mixed and whole_k3 > 0.0:
        # k3 / entropy: the entropy is that of the whole step.
        scale = value / whole_k3
        wanted = [AT_LAG_ZERO] if rule.lag_zero_only else list(lags.tokens)
        return [
            Part(lag, lags.k3[lag] * scale, lags.tokens[lag])
            for lag in wanted
            if lags.tokens.get(lag, 0.0) >= max(rule.least_tokens, 1) and math.isfinite(lags.k3[lag])
        ]
    if (rule.lag_zero_only and lags.name != AT_LAG_ZERO) or not rule.has_enough(values):
        return []
    return [Part(lags.name, value)]


def name_of_baseline(rule: ThresholdRule, lag: str) -> str:
    """Return the name of the rule's baseline at a lag."""
    # A reference is measured at few steps, and its newest value holds at any lag.
    return f"{rule.baseline_name}@{lag if rule.reference is None else NEWEST}"


def judge(rule: ThresholdRule, parts: Sequence[Part], baselines: Mapping[str, Baseline]) -> Judged | None:
    """Return the value that is judged: of the tokens at lag 0, or of all others if it is further beyond its
    threshold."""
    judged = [
        each
        for part in parts
        if (each := _judge_part(rule, part, baselines.get(name_of_baseline(rule, part.lag)))) is not None
    ]
    newest = [each for each in judged if each.lag == AT_LAG_ZERO]
    stale = [each for each in judged if each.lag != AT_LAG_ZERO]
    if not stale:
        return newest[0] if newest else None
    of_stale = stale[0] if len(stale) == 1 else _together(stale)
    if not newest:
        return of_stale
    if of_stale.measured * newest[0].threshold > newest[0].measured * of_stale.threshold:
        return replace(of_stale, elsewhere=newest[0].value)
    return newest[0]


def _judge_part(rule: ThresholdRule, part: Part, baseline: Baseline | None) -> Judged | None:
    measured, threshold = rule.measure(part.value), rule.threshold(baseline)
    if rule.key.endswith("@baseline"):
        if baseline is None or not baseline.ready:
            return None
        # Both must be beyond: the baseline never changes, so the alert ends when the values are back.
        measured = min(baseline.level, measured)
    if threshold is None:
        return None
    level, noise = (baseline.level, baseline.noise) if baseline is not None and baseline.logs else (math.nan, math.nan)
    lags = () if math.isnan(part.tokens) else (part.lag,)
    return Judged(part.value, measured, threshold, level, noise, part.lag, part.tokens, lags)


def _together(stale: Sequence[Judged]) -> Judged:
    """Return several lags as one: means over their tokens, both of the values and of the thresholds."""
    tokens = sum(each.tokens for each in stale)
    value, measured, threshold, level = (
        sum(getattr(each, name) * each.tokens for each in stale) / tokens
        for name in ("value", "measured", "threshold", "level")
    )
    lags = tuple(each.lag for each in stale)
    return Judged(value, measured, threshold, level, max(each.noise for each in stale), MIXED, tokens, lags)

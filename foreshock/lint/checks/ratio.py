"""ρ = π / μ: a mean that is not 1 (truncation, other reasons), and values beyond PPO's clip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreshock.lint.checks.declared import Declared
from foreshock.lint.checks.pairs import OF_BEHAVIOUR, Pairs, if_copied, if_invalid
from foreshock.lint.checks.responses import Rollouts
from foreshock.lint.checks.rounding import RolloutRounding
from foreshock.lint.counting import Counting, Counts, TokenPairs, largest
from foreshock.lint.judging import (
    FALSE_ALARM,
    LEAST_GROUPS,
    Check,
    Clean,
    Finding,
    Judging,
    NotChecked,
    Outcome,
    format_number,
    format_percent,
)
from foreshock.measures.estimators.intervals import student_t_quantile

# Truncation keeps more than a fifth of the mass: d is not below log 0.2.
_FAR_BELOW = -1.6
# |d| above this is clearly not 0.
CLEARLY = 0.01
_CERTAIN = -1e-6
# Published mismatches move mean ρ by less than 0.1 %; the worst mixture of experts by about 1 %.
_LEAST_RATIO_ERROR = 0.02
_LEAST_CERTAIN = 20
_CERTAIN_SHARE = 0.01
_ONE_SIDED = 0.2
# Rounded logits make likely tokens certain, and d of the others has both signs: a ratio of 0.14 or more was measured.
_ONE_SIDED_IF_ROUNDED = 0.05
# If truncation is declared, or tokens are certain under μ only, this much missing mass is enough: it biases k3 as much
# as a mismatch does.
_LEAST_CUT = 0.002
_CUT_LEVEL = 0.999
_TOP_P_SLACK = 0.05
_FAR_BELOW_SHARE = 0.02
# The log-prob of the likeliest token is never below that of the sampled one, and far above it at many tokens.
_BEYOND_NOISE, _NEARLY_NEVER_ABOVE, _FAR_SHARE_OF_LIKELIEST = 0.2, 0.02, 0.2
# PPO clips a few tokens in a thousand after its updates; before them, at equal weights, it should clip none.
_LEAST_CLIPPED = 0.01


@dataclass
class SignsOfD(Counts):
    """Tokens with two log-probs by the sign of d = log π − log μ."""

    above: int = 0  # clearly above 0
    below: int = 0  # clearly below 0
    above_noise: int = 0  # above what numerics give
    far_below: int = 0  # below what usual truncation can give
    certain: int = 0  # log μ = 0, and log π clearly below

    @property
    def has_certain(self) -> bool:
        """True if so many tokens are certain under μ only that no larger vocabulary of π makes them."""
        return self.certain >= max(_LEAST_CERTAIN, _CERTAIN_SHARE * (self.below + self.above))

    def add_pairs(self, pairs: TokenPairs, counting: Counting) -> None:
        below = pairs.d < np.float32(-CLEARLY)
        certain = below & (pairs.mu >= np.float32(_CERTAIN))
        self.add(above=pairs.d > np.float32(CLEARLY), below=below, certain=certain)
        self.add(above_noise=pairs.d > np.float32(_BEYOND_NOISE), far_below=pairs.d < np.float32(_FAR_BELOW))
        if counting.has_room("processed_log_probs"):
            for index in np.flatnonzero(certain)[:3].tolist():
                text = f"log μ {pairs.mu[index]:.3g}, log π {pairs.pi[index]:.3g}"
                counting.add_token("processed_log_probs", pairs.places[index], text)


@dataclass
class Clipped(Counts):
    """Tokens with two log-probs and a declared clip range."""

    tokens: int = 0
    clipped: int = 0  # of these: with a ratio outside the range
    low: float = largest()
    high: float = largest()

    def add_pairs(self, pairs: TokenPairs, counting: Counting) -> None:
        low, high = counting.batch.attributes.clip_low, counting.batch.attributes.clip_high
        if low is None and high is None:
            return
        low, high = (float(high or 0.0) if low is None else low), (float(low or 0.0) if high is None else high)
        outside = pairs.d > np.float32(math.log1p(high))
        if low < 1.0:
            outside |= pairs.d < np.float32(math.log1p(-low))
        self.add(tokens=outside.size, clipped=outside, low=low, high=high)


@dataclass(frozen=True, slots=True)
class _Ratio:
    """Mean ρ − 1, clustered by prompt group; `tested` if there are enough groups."""

    mean: float
    t: float
    groups: int

    @classmethod
    def of(cls, judging: Judging) -> _Ratio:
        by_group = judging[Pairs].by_group
        return cls(*by_group.mean_and_t("ratio_minus_one"), by_group.with_tokens)

    @property
    def tested(self) -> bool:
        return self.groups >= LEAST_GROUPS and math.isfinite(self.mean) and not math.isnan(self.t)

    @property
    def significant(self) -> bool:
        return self.tested and abs(self.t) >= student_t_quantile(1 - FALSE_ALARM / 2, self.groups - 1)

    @property
    def off(self) -> bool:
        return self.significant and abs(self.mean) >= _LEAST_RATIO_ERROR

    @property
    def text(self) -> str:
        """Mean ρ and its interval by Student's t."""
        text = f"Mean ρ is {format_number(1.0 + self.mean)}"
        if self.groups < 2 or not math.isfinite(self.t) or self.t == 0.0:
            return text
        reach = student_t_quantile(0.975, self.groups - 1) * abs(self.mean / self.t)
        low, high = format_number(1.0 + self.mean - reach), format_number(1.0 + self.mean + reach)
        return f"{text} (Student's t: {low} to {high} over {self.groups:,} prompt groups)"

    def numbers(self, signs: SignsOfD) -> dict[str, float]:
        """Return the numbers of a finding by name."""
        numbers = {"mean_ratio": 1.0 + self.mean, "t": self.t, "groups": self.groups}
        numbers["certain_under_mu_only"] = signs.certain
        return numbers | {"d_above_0.01": signs.above, "d_below_minus_0.01": signs.below}


def _check_processed(judging: Judging) -> Outcome:
    ratio, signs = _Ratio.of(judging), judging[SignsOfD]
    one_sided = signs.below >= _LEAST_CERTAIN and signs.above <= _ONE_SIDED * signs.below
    cut = judging[Declared].processed_and_truncated and ratio.significant and ratio.mean <= -_LEAST_CUT
    truncated = (ratio.off and ratio.mean < 0 and one_sided) or cut or _certain_by_truncation(judging, ratio)
    if not truncated or not _may_be_truncated(judging, ratio.mean):
        return Clean() if ratio.tested else _too_few(ratio)
    seen = (
        f"{ratio.text}; d is below −0.01 at {signs.below:,} tokens and above 0.01 at {signs.above:,}; "
        f"{signs.certain:,} tokens ({format_percent(signs.certain, judging[Pairs].tokens)}) are certain under μ and "
        "not under π."
    )
    is_known = judging[Declared].truncated > 0 or signs.has_certain
    return Finding("critical", seen, ratio.numbers(signs), title="" if is_known else _TRUNCATED_OR_PADDED)


def _check_outside(judging: Judging) -> Outcome:
    """Check if π is below μ at most tokens and μ was not truncated: E_μ[ρ] is the mass of π on what μ samples."""
    ratio, signs = _Ratio.of(judging), judging[SignsOfD]
    if not ratio.tested:
        return _too_few(ratio)
    is_normaliser = signs.above <= _ONE_SIDED * signs.below and signs.far_below <= _FAR_BELOW_SHARE * signs.below
    if judging.found("processed_log_probs") or not (ratio.off and ratio.mean < 0 and is_normaliser):
        return Clean()
    outside = format_percent(-ratio.mean, 1.0)
    seen = (
        f"{ratio.text}; d is below −0.01 at {signs.below:,} tokens and above 0.01 at {signs.above:,}. As declared, "
        "nothing was cut off: it looks like padding rows in the trainer's vocabulary, or ids that the engine bans."
    )
    title = f"π is below μ at most tokens: {outside} of it is on ids that μ does not sample"
    return Finding("warning", seen, ratio.numbers(signs), title=title)


def _check_likelier(judging: Judging) -> Outcome:
    pairs, signs, ratio = judging[Pairs].tokens, judging[SignsOfD], _Ratio.of(judging)
    if not ratio.tested:
        return _too_few(ratio)
    is_far = signs.far_below >= max(_LEAST_CERTAIN, _FAR_SHARE_OF_LIKELIEST * signs.below)
    if not (ratio.off and ratio.mean < 0 and is_far) or signs.above_noise > _NEARLY_NEVER_ABOVE * signs.below:
        return Clean()
    seen = (
        f"log μ is above log π by more than {CLEARLY:g} at {signs.below:,} of {pairs:,} tokens and by more than "
        f"{-_FAR_BELOW:g} at {signs.far_below:,}, but below it by more than {_BEYOND_NOISE:g} at "
        f"{signs.above_noise:,} only. {ratio.text}. It looks like the "
        "log-prob of the likeliest token of each position, or like a floor under log μ."
    )
    return Finding("critical", seen, ratio.numbers(signs) | {"far_below": signs.far_below})


def _check_mean(judging: Judging) -> Outcome:
    ratio = _Ratio.of(judging)
    if judging.found("processed_log_probs"):
        return NotChecked("explained by processed log-probs")
    if judging.found("banned_early"):
        return NotChecked("explained by a ban at the first tokens")
    if judging.found("mass_outside"):
        return NotChecked("explained by ids that μ does not sample")
    if not ratio.tested:
        return _too_few(ratio)
    if not ratio.off:
        return Clean()
    seen = f"{ratio.text}, Student's t {format_number(ratio.t)}."
    return Finding("warning", seen, ratio.numbers(judging[SignsOfD]))


def if_otherwise_invalid(judging: Judging) -> str:
    """Return why log μ is invalid for another reason than that it is another token's; else an empty string."""
    return if_copied(judging) or next(
        (why for name, why in OF_BEHAVIOUR.items() if name != LIKELIER.name and judging.found(name)), ""
    )


def _too_few(ratio: _Ratio) -> NotChecked:
    return NotChecked(f"the error of mean ρ needs {LEAST_GROUPS} prompt groups, and there are {ratio.groups}")


def _certain_by_truncation(judging: Judging, ratio: _Ratio) -> bool:
    """Return True if truncation explains the tokens that are certain under μ only, however small its effect.

    Log-probs of rounded logits, or rounded to few decimals, make tokens certain too. But rounding moves d both ways and
    leaves mean ρ near 1, within 0.01 for bfloat16. Truncation moves all d below 0, though a mismatch may hide that.
    """
    signs = judging[SignsOfD]
    if signs.certain < max(_LEAST_CERTAIN, _CERTAIN_SHARE * judging[Pairs].tokens):
        return False
    if judging[Declared].plain == judging[Rollouts].rollouts:
        return False
    rounded = bool(judging[RolloutRounding].short_type)
    if signs.above <= (_ONE_SIDED_IF_ROUNDED if rounded else _ONE_SIDED) * signs.below:
        return True
    cut = ratio.tested and ratio.mean <= -_LEAST_CUT
    return cut and not rounded and ratio.t <= -student_t_quantile(_CUT_LEVEL, ratio.groups - 1)


def _may_be_truncated(judging: Judging, mean: float) -> bool:
    """Return False if what was declared contradicts a truncated μ, or if d is of a size that truncation cannot make."""
    declared, signs, rollouts = judging[Declared], judging[SignsOfD], judging[Rollouts].rollouts
    if declared.mode_raw == rollouts or (declared.plain == rollouts and not signs.has_certain):
        return False
    top_p = -declared.minus_min_top_p
    # Top-p keeps at least p.
    only_top_p = (
        declared.truncated == rollouts and not declared.max_min_p > 0 and not math.isfinite(declared.lowest_top_k)
    )
    if only_top_p and 0 < top_p < 1 and 1.0 + mean < top_p - _TOP_P_SLACK:
        return False
    return signs.far_below <= _FAR_BELOW_SHARE * max(signs.below, 1)


def _check_clipped(judging: Judging) -> Outcome:
    tokens, clipped = judging[Clipped].tokens, judging[Clipped].clipped
    if not tokens:
        return NotChecked("needs both log-probs, and clip_low or clip_high among the batch attributes")
    if clipped < _LEAST_CLIPPED * tokens:
        return Clean()
    low, high = 1.0 - judging[Clipped].low, 1.0 + judging[Clipped].high
    seen = (
        f"{clipped:,} of {tokens:,} tokens ({format_percent(clipped, tokens)}) have a ρ outside the clip range "
        f"{format_number(low)} to {format_number(high)} before any update."
    )
    return Finding("info", seen, {"clipped": clipped, "tokens": tokens, "share": clipped / tokens})


PROCESSED = Check(
    "processed_log_probs",
    "μ was truncated, or ids were excluded, and π was not (processed log-probs)",
    "E ρ is the mass that truncation kept and not 1: k3 is KL − (1 − E ρ), and ESS, χ² and every weight leave out "
    "the tokens that were cut off.",
    "Sample without truncation and without excluded ids (bad words, a grammar), or apply them to the trainer's logits.",
    _check_processed,
    unless=if_invalid,
)
_TRUNCATED_OR_PADDED = "π is on ids that μ does not sample: μ was truncated, or π's vocabulary is padded"
OUTSIDE = Check(
    "mass_outside",
    "π is below μ at most tokens: a part of it is on ids that μ does not sample",
    "E ρ is the mass of π on what μ samples, and not 1: every weight is too small by as much.",
    "Compare the sizes of the two vocabularies: slice the trainer's logits to that of the engine before the softmax. "
    "Then compare the ids that the engine bans (bad words, a grammar).",
    _check_outside,
    unless=if_invalid,
    yields_to=("banned_early", "mismatch_after_id", "mismatch_by_place"),
)
LIKELIER = Check(
    "likelier_token_logged",
    "log μ is not that of the sampled token (that of the likeliest one, or cut at a floor)",
    "ρ of a token that was not the likeliest is too small: mean ρ is below 1 and k3 is large.",
    "Log the entry of the sampled id, not the first one of the engine's top log-probs, and no floor or clamp.",
    _check_likelier,
    unless=if_otherwise_invalid,
    yields_to=("banned_early",),
)
MEAN_RATIO = Check(
    "mean_ratio",
    "the mean of ρ = π / μ is not 1",
    "E_μ[ρ] = 1 if the logged μ sampled the tokens and covers π: k3, χ² and every weight are biased by the difference.",
    "Compare what the two sides apply: temperature (the trainer divides its logits, the engine logs raw ones), "
    "truncation, weights version, dropout left on in the trainer. A mean below 1 may also be a heavy tail that the "
    "sample missed: see pareto_k.",
    _check_mean,
    unless=if_invalid,
    yields_to=("mismatch_after_id", "mismatch_by_place"),
    proven=False,
    explains=False,
)
CLIPPED = Check(
    "clipped_before_update",
    "the mismatch alone puts tokens outside the clip range",
    "If the trainer's ratio is taken against log μ, PPO drops the gradient of these tokens at equal weights.",
    "Take PPO's ratio against recomputed log-probs, and correct the mismatch by an importance weight of its own.",
    _check_clipped,
    explains=False,
)

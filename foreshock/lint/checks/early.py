"""Ids that the engine alone allows, or bans, at the first tokens of responses: ρ is below 1 there only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.checks.missing import forced_ids
from foreshock.lint.checks.ratio import if_otherwise_invalid
from foreshock.lint.counting import Counting, Counts, Table, TokenPairs
from foreshock.lint.judging import Check, Clean, Finding, Judging, Outcome, format_number

# log π above log μ by more than this is no numerics; a ban moves it below, at every token.
_ABOVE, _MOST_ABOVE = 0.1, 0.01
_LEAST_MISSING, _LEAST_T, _LEAST_T_OF_BUCKET = 0.005, 8.0, 3.0
# The other tokens miss at most this fraction of what the first ones miss.
_MOST_OF_REST = 0.25
_LEAST_TOKENS = 100
# A ban of few ids misses no more: beyond, the engine allows only few.
_RESTRICTED = 0.5
_MIN_TOKENS = "It looks like a ban of the ends of sequence by a minimum length (min_tokens)."
_OF_GRAMMAR = (
    "Compare guided decoding, prefixes and logit processors of the engine: apply the same mask to the trainer's "
    "logits, or set the response mask to 0 at tokens that the engine forces."
)


class RatiosByPosition(Table):
    """Tokens with two log-probs by position: 0, 1, 2 to 3, 4 to 7 and so on. `ratio` is Σ (ρ − 1)."""

    COLUMNS = ("tokens", "ratio", "squares", "above")


@dataclass
class EarlyRatios(Counts):
    """Sums of ρ − 1 by the position in the response."""

    sums: RatiosByPosition = field(default_factory=RatiosByPosition)

    def add_pairs(self, pairs: TokenPairs, counting: Counting) -> None:
        longest = int(np.diff(pairs.offsets).max())
        begins = pairs.offsets[:-1, None] + np.r_[0, 1 << np.arange(longest.bit_length())]
        inside = begins < pairs.offsets[1:, None]
        starts, buckets = begins[inside], np.nonzero(inside)[1]
        columns = pairs.ratio_minus_one, np.square(pairs.ratio_minus_one), pairs.d > _ABOVE
        sums = (np.add.reduceat(each, starts, dtype=np.float64) for each in columns)
        self.sums += RatiosByPosition.of(buckets, np.diff(np.r_[starts, pairs.d.size]), *sums)


def _check_first(judging: Judging) -> Outcome:
    sums, forced = judging[EarlyRatios].sums, forced_ids(judging)
    ends = (place for place, row in enumerate(sums.values) if _mean_and_t(row)[1] > -_LEAST_T_OF_BUCKET)
    end = next(ends, len(sums.values))
    first, rest = sums.values[:end].sum(axis=0), sums.values[end:].sum(axis=0)
    if min(first[0], rest[0]) < _LEAST_TOKENS or first[3] > _MOST_ABOVE * first[0]:
        return _forced(forced)
    (mean, t), (mean_of_rest, _) = _mean_and_t(first), _mean_and_t(rest)
    if mean > -_LEAST_MISSING or t > -_LEAST_T or abs(mean_of_rest) > _MOST_OF_REST * -mean:
        return _forced(forced)
    until = 1 << (int(sums.keys[end]) - 1)
    few = bool(forced) or mean < -_RESTRICTED
    seen = (
        f"In the first {until} tokens of the responses mean ρ is {format_number(1.0 + mean)} (Student's t "
        f"{format_number(t)}), and log π is nearly never above log μ; afterwards mean ρ is "
        f"{format_number(1.0 + mean_of_rest)}. The engine gave some ids no probability there, and the trainer does. "
        f"{_in_words(forced) if few else _MIN_TOKENS}"
    )
    numbers = {"mean_ratio": 1.0 + mean, "t": t, "until": until}
    if not few:
        return Finding("warning", seen, numbers)
    title = f"the engine alone restricts the ids at the first {until} tokens of responses"
    return Finding("warning", seen, numbers, title=title, remedy=_OF_GRAMMAR)


def _forced(forced: Mapping[int, int]) -> Outcome:
    """Return a finding if the engine forces tokens, and the others are as they should be or cannot be judged."""
    if not forced:
        return Clean()
    places = ", ".join(str(place) for place in forced)
    title = f"the engine forces token {places} of responses"
    return Finding("warning", _in_words(forced), {"forced": len(forced)}, title=title, remedy=_OF_GRAMMAR)


def _in_words(forced: Mapping[int, int]) -> str:
    zeros = (f"At token {place} log μ is 0 exactly, always with id {token_id}." for place, token_id in forced.items())
    return f"{' '.join([*zeros, 'It'])} looks like a grammar (guided decoding), a prefix or a logit processor."


def _mean_and_t(row: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean of ρ − 1 over the tokens of a row of sums, and its Student's t."""
    tokens, total, squares = row[:3]
    mean = total / tokens
    error = math.sqrt(max(squares / tokens - mean**2, 1e-18) / tokens)
    return float(mean), float(mean / error)


BANNED_EARLY = Check(
    "banned_early",
    "the engine alone bans some ids at the beginning of responses",
    "ρ of the first tokens is too small by the probability of the banned ids: their k3 is no mismatch of the weights.",
    "Ban the same ids in the trainer's logits at these positions, or let the engine sample without a minimum length.",
    _check_first,
    unless=if_otherwise_invalid,
    proven=False,
)

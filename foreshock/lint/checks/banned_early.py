"""A mean ρ below 1 at the beginning of the responses only: ids that were banned there, as by a minimum length."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.checks.pairs import NO_PAIRS, Pairs, if_invalid
from foreshock.lint.counting import Counting, Counts, Piece, Table
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number

# log π above log μ by more than this is no numerics; a ban moves it below, at every token.
_ABOVE, _MOST_ABOVE = 0.1, 0.01
_LEAST_MISSING, _LEAST_T, _LEAST_T_OF_BUCKET = 0.005, 8.0, 3.0
# The other tokens miss at most this fraction of what the first ones miss.
_MOST_OF_REST = 0.25
_LEAST_TOKENS = 100


class RatiosByPosition(Table):
    """Tokens with two log-probs by position: 0, 1, 2 to 3, 4 to 7 and so on. `ratio` is Σ (ρ − 1)."""

    COLUMNS = ("tokens", "ratio", "squares", "above")


@dataclass
class EarlyRatios(Counts):
    """Sums of ρ − 1 by the position in the response."""

    sums: RatiosByPosition = field(default_factory=RatiosByPosition)

    def add_piece(self, piece: Piece, counting: Counting) -> None:
        """Sum over the tokens of a piece."""
        pairs, d, ratio = piece.pairs, piece.pairs.d, piece.pairs.ratio_minus_one
        if d is None or ratio is None or not d.size:
            return
        longest = int(np.diff(pairs.offsets).max())
        begins = pairs.offsets[:-1, None] + np.r_[0, 1 << np.arange(longest.bit_length())]
        inside = begins < pairs.offsets[1:, None]
        starts, buckets = begins[inside], np.nonzero(inside)[1]
        sums = (np.add.reduceat(each, starts, dtype=np.float64) for each in (ratio, np.square(ratio), d > _ABOVE))
        self.sums += RatiosByPosition.of(buckets, np.diff(np.r_[starts, d.size]), *sums)


def _check(judging: Judging) -> Outcome:
    """Check that mean ρ is 1 at the beginning of the responses if it is 1 afterwards."""
    if not judging[Pairs].tokens:
        return NotChecked(NO_PAIRS)
    sums = judging[EarlyRatios].sums
    ends = (place for place, row in enumerate(sums.values) if _mean_and_t(row)[1] > -_LEAST_T_OF_BUCKET)
    end = next(ends, len(sums.values))
    first, rest = sums.values[:end].sum(axis=0), sums.values[end:].sum(axis=0)
    if min(first[0], rest[0]) < _LEAST_TOKENS or first[3] > _MOST_ABOVE * first[0]:
        return Clean()
    (mean, t), (mean_of_rest, _) = _mean_and_t(first), _mean_and_t(rest)
    if mean > -_LEAST_MISSING or t > -_LEAST_T or abs(mean_of_rest) > _MOST_OF_REST * -mean:
        return Clean()
    until = 1 << (int(sums.keys[end]) - 1)
    seen = (
        f"In the first {until} tokens of the responses mean ρ is {format_number(1.0 + mean)} (Student's t "
        f"{format_number(t)}), and log π is nearly never above log μ; afterwards mean ρ is "
        f"{format_number(1.0 + mean_of_rest)}. The engine gave some ids no probability there, and the trainer does. It "
        "looks like a ban of the ends of sequence by a minimum length (min_tokens)."
    )
    return Finding("warning", seen, {"mean_ratio": 1.0 + mean, "t": t, "until": until})


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
    _check,
    unless=if_invalid,
    proven=False,
)

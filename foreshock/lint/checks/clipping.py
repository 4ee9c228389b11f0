"""Tokens outside the clip range before any update, because of the mismatch alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreshock.lint.counting import Counting, Counts, Piece, largest
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number, format_percent

# PPO clips a few tokens in a thousand after its updates; before them, at equal weights, it should clip none.
_LEAST_CLIPPED = 0.01


@dataclass
class Clipped(Counts):
    """Tokens with two log-probs and a declared clip range."""

    tokens: int = 0
    clipped: int = 0  # of these: with a ratio outside the range
    low: float = largest()
    high: float = largest()

    def add_piece(self, piece: Piece, counting: Counting) -> None:
        """Count the tokens of a piece with ρ outside the declared clip range."""
        low, high = counting.batch.attributes.clip_low, counting.batch.attributes.clip_high
        d = piece.pairs.d
        if d is None or (low is None and high is None):
            return
        low, high = (float(high or 0.0) if low is None else low), (float(low or 0.0) if high is None else high)
        outside = d > np.float32(math.log1p(high))
        if low < 1.0:
            outside |= d < np.float32(math.log1p(-low))
        self.tokens += d.size
        self.clipped += int(np.count_nonzero(outside))
        self.low, self.high = max(self.low, low), max(self.high, high)


def _check(judging: Judging) -> Outcome:
    """Check for tokens that are outside the clip range before any update, because of the mismatch alone."""
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


CLIPPED = Check(
    "clipped_before_update",
    "the mismatch alone puts tokens outside the clip range",
    "If the trainer's ratio is taken against log μ, PPO drops the gradient of these tokens at equal weights.",
    "Take PPO's ratio against recomputed log-probs, and correct the mismatch by an importance weight of its own.",
    _check,
    explains=False,
)

"""A part of the tokens that is far older than the others and has nearly all of the mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import NEWEST_STEPS, History
from foreshock.diagnosis.lags import LAGS, LagLevels, lags_in_words
from foreshock.diagnosis.least_tokens import LEAST_TOKENS
from foreshock.diagnosis.wording import number, percent

STALE_PART: Final = "stale_part"

_MOST_TOKENS: Final = 0.3
_LEAST_OF_K3: Final = 0.8
_LEAST_TIMES: Final = 20.0
"""Least factor between the k3 of the part and that of the others."""
_FEW: Final = 0.02
"""At most this share of the tokens is at a lag between the two, which makes them two kinds and not one spread."""


def stale_part(history: History) -> tuple[DiagnosisCause, ...]:
    """Return the old part as a cause, if k3 of all tokens is above its range and that of the others is healthy."""
    levels, end = history.newest_lags, history.healthy_end
    whole, total = _sums(levels, LAGS)
    if not whole or not history.k3_now > end:
        return ()
    for cut in range(1, len(LAGS) - 1):
        (old, of_old), (young, of_young) = _sums(levels, LAGS[cut + 1 :]), _sums(levels, LAGS[:cut])
        if not old or young < LEAST_TOKENS["k3_kl"] or levels.tokens.get(LAGS[cut], 0.0) > _FEW * whole:
            continue
        share, mean, others = old / whole, of_old / old, of_young / young
        is_alike = share > _MOST_TOKENS or of_old < _LEAST_OF_K3 * total or mean < _LEAST_TIMES * others
        if is_alike or others > end:
            continue
        old_lags, young_lags = ([lag for lag in each if lag in levels.tokens] for each in (LAGS[cut + 1 :], LAGS[:cut]))
        has = [each.share([lag for lag in old_lags if lag in each.tokens]) for each in history.lags]
        since = next(step for step, each in zip(history.k3.steps, has, strict=True) if each >= share / 3.0)
        title = (
            f"{percent(share)} of the tokens, at {lags_in_words(old_lags)}, have {percent(of_old / total)} of all k3"
        )
        return (
            DiagnosisCause(
                name=STALE_PART,
                sentence=f"{title}, in the newest {min(NEWEST_STEPS, len(has))} steps: {number(mean)} there, and "
                f"{number(others)} at {lags_in_words(young_lags)}. It is staleness of these rollouts, not numerics.",
                source="detector",
                title=title,
                what_to_do="Bound the staleness: leave out tokens that are so old, or sample them again; find where "
                "they waited (a queue, a retry, a replica that is never updated).",
                evidence={"first_step": since, "share": share, "k3": mean, "k3_of_others": others},
            ),
        )
    return ()


def _sums(levels: LagLevels, lags: Sequence[str]) -> tuple[float, float]:
    """Return the number of the tokens at some lags, and their k3 added up, in nats."""
    known = [lag for lag in lags if lag in levels.tokens]
    return sum(levels.tokens[lag] for lag in known), sum(levels.tokens[lag] * levels.k3[lag] for lag in known)

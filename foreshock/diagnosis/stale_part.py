"""A part of the tokens that is far older than the others and has nearly all of the mismatch."""

from __future__ import annotations

from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import NEWEST_STEPS, History
from foreshock.diagnosis.lags import LAGS, lags_in_words
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
    levels = history.newest_lags
    whole, end = sum(levels.tokens.values()), history.healthy_end
    if not whole or not history.k3_now > end:
        return ()
    for cut in range(1, len(LAGS) - 1):
        old, between, young = LAGS[cut + 1 :], LAGS[cut], LAGS[:cut]
        tokens, k3 = ([values.get(lag, 0.0) for lag in old] for values in (levels.tokens, levels.k3))
        of_old = sum(count * value for count, value in zip(tokens, k3, strict=True) if count)
        rest = {lag: count for lag, count in levels.tokens.items() if lag in young and count}
        total = sum(levels.k3[lag] * count for lag, count in levels.tokens.items())
        if not sum(tokens) or not rest or levels.tokens.get(between, 0.0) > _FEW * whole:
            continue
        mean, others = (
            of_old / sum(tokens),
            sum(levels.k3[lag] * count for lag, count in rest.items()) / sum(rest.values()),
        )
        share = sum(tokens) / whole
        few = share > _MOST_TOKENS or of_old < _LEAST_OF_K3 * total or mean < _LEAST_TIMES * others
        if few or others > end or sum(rest.values()) < LEAST_TOKENS["k3_kl"]:
            continue
        has = [each.share([lag for lag in old if lag in each.tokens]) for each in history.lags]
        since = next(step for step, each in zip(history.k3.steps, has, strict=True) if each >= share / 3.0)
        where = lags_in_words([lag for lag, count in zip(old, tokens, strict=True) if count])
        title = f"{percent(share)} of the tokens, at {where}, have {percent(of_old / total)} of all k3"
        return (
            DiagnosisCause(
                name=STALE_PART,
                sentence=f"{title}, in the newest {min(NEWEST_STEPS, len(has))} steps: {number(mean)} there, and "
                f"{number(others)} at {lags_in_words(list(rest))}. It is staleness of these rollouts, not numerics.",
                source="detector",
                title=title,
                what_to_do="Bound the staleness: leave out tokens that are so old, or sample them again; find where "
                "they waited (a queue, a retry, a replica that is never updated).",
                evidence={"first_step": since, "share": share, "k3": mean, "k3_of_others": others},
            ),
        )
    return ()

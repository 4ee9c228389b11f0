"""A lag that grows: the engines, or the queue before the trainer, fall behind."""

from __future__ import annotations

from statistics import median
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import NEWEST_STEPS, History
from foreshock.diagnosis.wording import number

LAG_GROWS: Final = "lag_grows"

_LEAST_TIMES: Final = 3.0
"""Least factor of the growth, from a lag of at least 1."""

_K3_TIMES: Final = 2.0
"""Least factor by which k3 of all tokens has grown if the mismatch is said to grow with the lag."""


def growing_lag(history: History) -> tuple[DiagnosisCause, ...]:
    """Return the lag as a cause if that of the newest ten steps is three times that of the first ten known ones."""
    steps = [*history.first_k3.steps, *history.k3.steps]
    lags = [each.mean for each in (*history.first_lags, *history.lags)]
    k3 = [*history.first_k3.values, *history.k3.values]
    if len(steps) < 3 * NEWEST_STEPS or len(lags) != len(steps):
        return ()
    before, now = median(lags[:NEWEST_STEPS]), median(lags[-NEWEST_STEPS:])
    if now < _LEAST_TIMES * max(before, 1.0):
        return ()
    # The last step at which the lag was as before: it has been larger in every step since.
    usual = max(lags[:NEWEST_STEPS])
    since = max(place for place, lag in enumerate(lags) if lag <= usual) + 1
    if len(lags) - since < NEWEST_STEPS:
        return ()
    was, grown = median(k3[:NEWEST_STEPS]), median(k3[-NEWEST_STEPS:])
    follows = grown >= _K3_TIMES * was
    # The steps between the run's first ones and the newest are not known.
    is_exact = steps[since] <= steps[since - 1] + NEWEST_STEPS
    when = f"since {'' if is_exact else 'before '}step {steps[since]}"
    grew = f"has grown from about {before:.0f} to {now:.0f} versions {when}"
    with_it = f", and k3 of all tokens with it, from {number(was)} to {number(grown)}" if follows else ""
    return (
        DiagnosisCause(
            name=LAG_GROWS,
            sentence=f"the lag {grew}{with_it}. The engines, or the queue before the trainer, fall behind.",
            source="detector",
            title=f"the lag, which {grew}" if follows else f"the lag {grew}",
            # That both grew does not exclude another cause of the mismatch.
            certainty="possible" if follows else "shown",
            explains=follows,
            what_to_do=f"Find what slowed the engines or filled the queue {'at' if is_exact else 'before'} step "
            f"{steps[since]}, or bound the staleness: wait for newer rollouts, or leave the oldest out.",
            evidence={"before": before, "now": now, "k3_before": was, "k3_now": grown},
        ),
    )

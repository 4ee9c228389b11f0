"""The values of a step that healthy ranges are compared with, over the same tokens as the rules with these ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.lags import AT_LAG_ZERO, KNOWN_BY_LAG, LAG_KEYS, StepLags, parts_of

# The kind of model changes thresholds, not which tokens a rule judges.
_RULES: Final = {
    rule.measure_name: rule
    for rule in default_rules()
    if rule.lag_zero_only and rule.pooled != "median" and rule.quantity.startswith(f"{TRAINER_ROLLOUT}:")
}

_KEYS: Final = frozenset(LAG_KEYS) | {key for rule in _RULES.values() for key in rule.keys}

LAG_ZERO_COLUMNS: Final = tuple(
    sorted(column for comparison, _, column in (key.partition(":") for key in _KEYS) if comparison == TRAINER_ROLLOUT)
)
"""The measures of trainer/rollout that `at_lag_zero` reads; it reads `LAG_KEY` too."""


def at_lag_zero(measure: str, values: Mapping[str, float | None]) -> float | None:
    """Return a measure of trainer/rollout as its range judges a step; None if the range does not hold for the step.

    `measure` is a column such as "k3_kl", `values` are a step's by `comparison:measure`. If lags are mixed, k3 and
    k3 / entropy are those of the tokens at lag 0, and other measures have no value unless nearly all tokens are at
    lag 0. Steps with too few tokens have none.

    Raises:
        KeyError: No rule compares the measure with a range at lag 0.
    """
    known = {key: value for key, value in values.items() if value is not None}
    parts = parts_of(_RULES[measure], known, StepLags.of(known))
    return parts[0].value if parts else None


def holds_for_all_tokens(measure: str, lags: StepLags) -> bool:
    """Return whether the range of a measure of trainer/rollout holds for its mean over all tokens of a step.

    k3 and k3 / entropy are compared at lag 0 if any token is at another lag; other measures that a rule compares at
    lag 0 only are compared if nearly all tokens are at lag 0.
    """
    rule = _RULES.get(measure)
    if rule is None:
        return True
    return not lags.is_mixed if rule.quantity in KNOWN_BY_LAG else lags.name == AT_LAG_ZERO

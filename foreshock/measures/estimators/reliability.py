"""Reliability of the 95 % interval of mean k3; the threshold comes from `benchmarks/uneven_groups.py`.

The interval (`bootstrap.nonnegative_intervals`) covers 94 % on average for 8 to 128 groups, even or uneven, unless k3
itself has no variance: then tokens so rare that most batches lack them carry much of its mean. That shows in the tail
of d. k3 ≈ d²/2 has a finite variance if the shape k of the tail of |d| is below ¼; estimates k̂ scatter by about 0.05.

The effective number of groups is reported and is *no* criterion. With uneven prompts, a batch with a low number holds
one of the large groups, and its interval covers nearly always; a batch that looks even lacks them. Rejecting batches
below any number therefore lowers the coverage of the remaining ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from foreshock.measures.estimators.bootstrap import LEAST_CLUSTERS
from foreshock.measures.statistics.tails import LARGEST_TAIL_SHAPE

__all__ = ["effective_of_all", "interval_is_reliable", "interval_warning"]

Values = Mapping[str, float | None]


def interval_is_reliable(prompt_groups: float, pareto_k: float, pareto_k_inverse: float) -> bool:
    """Return whether the interval of mean k3 covers as it should: enough groups for one, and both k̂ small enough.

    A k̂ that is NaN, such as that of equal or of very few values, is no objection.
    """
    heavy = pareto_k > LARGEST_TAIL_SHAPE or pareto_k_inverse > LARGEST_TAIL_SHAPE
    return prompt_groups >= LEAST_CLUSTERS and not heavy


def interval_warning(values: Values) -> str | None:
    """Return the reason why the interval of k3 is unreliable as a sentence; None if it is reliable or was not measured.

    `values` are measures by column: `prompt_groups`, `pareto_k` and `pareto_k_inverse`.
    """
    groups = _value(values, "prompt_groups")
    shapes = (_value(values, "pareto_k"), _value(values, "pareto_k_inverse"))
    if math.isnan(groups) or interval_is_reliable(groups, *shapes):
        return None
    if groups < LEAST_CLUSTERS:
        return (
            f"{groups:.0f} prompt group{'' if groups == 1 else 's'}: an interval of k3 needs {LEAST_CLUSTERS}. "
            "Use more prompts per step."
        )
    shape = max(value for value in shapes if not math.isnan(value))
    return (
        f"The tail of d has the shape k̂ = {shape:.2f}: the 95 % interval of k3 is unreliable above "
        f"{LARGEST_TAIL_SHAPE:g}, because tokens too rare for this batch may carry much of k3. Read the lower end as a "
        "lower bound."
    )


def effective_of_all(values: Values) -> str:
    """Return the effective number of prompt groups and their number, such as "5.2 of 8"; "–" if not measured."""
    effective, groups = _value(values, "effective_groups"), _value(values, "prompt_groups")
    return "–" if math.isnan(effective) or math.isnan(groups) else f"{effective:.1f} of {groups:.0f}"


def _value(values: Values, name: str) -> float:
    value = values.get(name)
    return math.nan if value is None else float(value)

"""Reliability of intervals, and what they are called; the thresholds come from `benchmarks/uneven_groups.py`.

An interval is called a 95 % interval only where it covers at least 90 % in that benchmark. Any other is called a
resampling range: it shows how the figure varies with the prompts that were drawn, and covers the true value less often.

The interval of mean k3 (`bootstrap.nonnegative_intervals`) covers 94 % on average for 8 to 128 groups, even or uneven,
unless k3 itself has no variance: then tokens so rare that most batches lack them carry much of its mean. That shows in
the tail of d. k3 ≈ d²/2 has a finite variance if the shape k of the tail of |d| is below ¼; estimates k̂ scatter by
about 0.05.

The effective number of groups is reported and is *no* criterion. With uneven prompts, a batch with a low number holds
one of the large groups, and its interval covers nearly always; a batch that looks even lacks them. Rejecting batches
below any number therefore lowers the coverage of the remaining ones.

Shares of links, and differences of either sign, have no such upper end from the spread of the groups. Their bootstrap-t
covers 80 to 96 % with 8 prompt groups, 88 to 96 % with 32, and 90 to 96 % with 64 if no tail is heavy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from foreshock.interval_names import RANGE
from foreshock.measures.estimators.bootstrap import LEAST_CLUSTERS
from foreshock.measures.estimators.pareto import tail_shapes
from foreshock.measures.statistics.tails import LARGEST_TAIL_SHAPE

__all__ = [
    "LEAST_GROUPS_OF_SIGNED",
    "effective_of_all",
    "interval_is_reliable",
    "interval_warning",
    "signed_interval_is_reliable",
]

Float64 = NDArray[np.float64]
Values = Mapping[str, float | None]

LEAST_GROUPS_OF_SIGNED = 64
"""Prompt groups from which the bootstrap-t of a share or of a difference is called a 95 % interval."""


def signed_interval_is_reliable(prompt_groups: int, differences: Iterable[Float64]) -> bool:
    """Return whether the bootstrap-t of a share or a difference may be called a 95 % interval.

    `differences` are the arrays of d, [T] each in nats, whose products or squares are summed.
    """
    if prompt_groups < LEAST_GROUPS_OF_SIGNED:
        return False
    return all(interval_is_reliable(prompt_groups, *tail_shapes(d)) for d in differences)


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
        f"The tail of d has the shape k̂ = {shape:.2f}: above {LARGEST_TAIL_SHAPE:g} k3 has no 95 % interval, because "
        f"tokens too rare for this batch may carry much of it. The {RANGE} covers the true value less often."
    )


def effective_of_all(values: Values) -> str:
    """Return the effective number of prompt groups and their number, such as "5.2 of 8"; "–" if not measured."""
    effective, groups = _value(values, "effective_groups"), _value(values, "prompt_groups")
    return "–" if math.isnan(effective) or math.isnan(groups) else f"{effective:.1f} of {groups:.0f}"


def _value(values: Values, name: str) -> float:
    value = values.get(name)
    return math.nan if value is None else float(value)

"""What limits the range of k3: too few prompt groups for one, or tokens so rare that most batches lack them.

k3 ≈ d²/2 has a finite variance if the shape k of the tail of |d| is below ¼; estimates k̂ scatter by about 0.05. The
effective number of groups is reported and is no criterion: with uneven prompts, a batch with a low number holds one of
the large groups, and a batch that looks even lacks them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from foreshock.interval_names import RANGE
from foreshock.measures.estimators.bootstrap import LEAST_CLUSTERS
from foreshock.measures.statistics.tails import LARGEST_TAIL_SHAPE

Values = Mapping[str, float | None]


def interval_warning(values: Values) -> str | None:
    """Return what makes the range of k3 too short or impossible as a sentence; None if nothing is known to.

    `values` are measures by column: `prompt_groups`, `pareto_k` and `pareto_k_inverse`.
    """
    groups = _value(values, "prompt_groups")
    known = [shape for name in ("pareto_k", "pareto_k_inverse") if not math.isnan(shape := _value(values, name))]
    shape = max(known, default=math.nan)
    if groups < LEAST_CLUSTERS:
        return (
            f"{groups:.0f} prompt group{'' if groups == 1 else 's'}: a range of k3 needs {LEAST_CLUSTERS}. "
            "Use more prompts per step."
        )
    if math.isnan(groups) or not shape > LARGEST_TAIL_SHAPE:
        return None
    return (
        f"The tail of d has the shape k̂ = {shape:.2f}, above {LARGEST_TAIL_SHAPE:g}: tokens too rare for this batch "
        f"may carry much of k3, and its mean may lie far above the {RANGE}."
    )


def effective_of_all(values: Values) -> str:
    """Return the effective number of prompt groups and their number, such as "5.2 of 8"; "–" if not measured."""
    effective, groups = _value(values, "effective_groups"), _value(values, "prompt_groups")
    return "–" if math.isnan(effective) or math.isnan(groups) else f"{effective:.1f} of {groups:.0f}"


def _value(values: Values, name: str) -> float:
    value = values.get(name)
    return math.nan if value is None else float(value)

"""Conclusions on exact divergences over the whole vocabulary. They state a size and name no cause.

An exact pair compares two replays with the same weights: it is one link of the chain, and says nothing of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreshock.comparisons import split_comparison
from foreshock.conclusions.conclusion import Conclusion
from foreshock.conclusions.evidence import AttributionEvidence, ExactEvidence
from foreshock.conclusions.wording import interval_text, number, plural
from foreshock.measures.estimators.bootstrap import LEAST_CLUSTERS
from foreshock.scorers import ExactPair

__all__ = ["conclude"]


def conclude(evidence: AttributionEvidence, so_far: Sequence[Conclusion]) -> list[Conclusion]:
    """Return the size of each exact divergence, and whether it is above the noise floor of its two scorers."""
    return [_conclusion(exact, _half_of_floors(evidence, exact)) for exact in evidence.exact]


def _conclusion(exact: ExactEvidence, floor: float) -> Conclusion:
    pair = ExactPair(*split_comparison(exact.link))
    if exact.tokens == 0:
        words = "no state has finite distributions of both scorers"
    elif exact.tv == 0:
        words = f"the two distributions are equal at each of {plural(exact.tokens, 'visited state')}"
    else:
        words = f"{_size(exact)}{_against_floor(exact, floor)}"
    left_out = ""
    if exact.non_finite and exact.tokens:
        left_out = f" {plural(exact.non_finite, 'state')} with a value that is not finite left out."
    scope = (
        f"This compares {pair.target} (π) with {pair.behaviour} (μ) with the same weights: engine against trainer "
        "numerics, not the whole of trainer/rollout."
    )
    if exact.other_settings:
        scope += f" Its settings are not those of the link's scores: {', '.join(exact.other_settings)} differ."
    return Conclusion("exact", f"{pair.name}: {words}.{left_out} {scope}", exact.link)


def _size(exact: ExactEvidence) -> str:
    return (
        f"KL(μ‖π) over the whole vocabulary is {number(exact.kl)} nats per token "
        f"({_interval(exact, exact.kl_low, exact.kl_high)}), without the sampling noise of k3 at the "
        f"same tokens, {number(exact.k3_kl)} ({_interval(exact, exact.k3_low, exact.k3_high)}); total "
        f"variation {number(exact.tv)}, Δmax {number(exact.delta_max)}, the likeliest token differs at "
        f"{number(100 * exact.top1_flip)} % of {plural(exact.tokens, 'visited state')}"
    )


def _against_floor(exact: ExactEvidence, floor: float) -> str:
    """Return whether the divergence is above the noise of its two scorers, if the floors and the interval tell."""
    if exact.kl_low > floor:
        return f"; it is above the noise floor of the two scorers, {number(floor)}"
    if exact.kl_high <= floor:
        return f"; it is not above the noise floor of the two scorers, {number(floor)}"
    return ""


def _half_of_floors(evidence: AttributionEvidence, exact: ExactEvidence) -> float:
    """Return half the sum of the noise floors of both scorers; NaN if one is unknown."""
    return 0.5 * sum(evidence.floors.get(name, math.nan) for name in split_comparison(exact.link))


def _interval(exact: ExactEvidence, low: float, high: float) -> str:
    few = exact.prompt_groups < LEAST_CLUSTERS and (math.isnan(low) or math.isnan(high))
    needed = f": {plural(exact.prompt_groups, 'prompt')}, {LEAST_CLUSTERS} are needed" if few else ""
    return interval_text(low, high, exact.reliable) + needed

"""Conclusions on the links of the chain: which of them most of the mismatch comes from, if the intervals tell.

A link is most of the mismatch if the lower end of its share's interval is above one half. If its share is above one
half and the interval's lower end is not, the conclusion says how many more prompts would probably do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreshock.conclusions.conclusion import Conclusion, marked_links
from foreshock.conclusions.evidence import AttributionEvidence, LinkEvidence
from foreshock.conclusions.precision import links_of_wrong_precision
from foreshock.conclusions.wording import interval_of_share, number, percent, plural

__all__ = ["conclude", "prompts_needed"]

MAJORITY = 0.5
MUCH_CANCELLATION = 1.2
"""Σ E[d_link²]/E[d²] above which links are said to cancel; independent links have 1."""

# An estimate of more prompts than this says only that the data is far from enough.
_MOST_PROMPTS = 1_000_000


def conclude(evidence: AttributionEvidence, so_far: Sequence[Conclusion]) -> list[Conclusion]:
    """Return the cause of most of the mismatch, or why none can be named."""
    if evidence.whole.rms_d == 0:
        ends = f"{evidence.chain[0]} and {evidence.chain[-1]}"
        return [Conclusion("no-difference", f"{ends} do not differ at any token.", evidence.whole.name)]
    known = sorted((link for link in evidence.links if math.isfinite(link.share)), key=lambda link: -link.share)
    if not known:
        return []
    of_the_request = links_of_wrong_precision(evidence)
    explained = {each.link for each in so_far if each.kind == "wrong-weights"}
    unnamed = marked_links(so_far) | of_the_request | explained
    found = [] if known[0].name in unnamed else [_on_the_largest(evidence, known)]
    if evidence.cancellation > MUCH_CANCELLATION and not of_the_request:
        found.append(_cancellation(evidence))
    return found


def prompts_needed(link: LinkEvidence, prompt_groups: int) -> int | None:
    """Return how many prompts would put the lower end of the link's share above one half.

    An estimate: the share stays, and the distance to the lower end falls with the square root of the number of prompts.
    None if the share is not above one half or its interval is unknown.
    """
    reach, beyond = link.share - link.share_low, link.share - MAJORITY
    if not (beyond > 0 and reach > 0) or prompt_groups < 1:
        return None
    return math.ceil(prompt_groups * (reach / beyond) ** 2)


def _on_the_largest(evidence: AttributionEvidence, known: Sequence[LinkEvidence]) -> Conclusion:
    largest = known[0]
    interval = interval_of_share(largest.share_low, largest.share_high, evidence.reliable)
    if largest.share_low > MAJORITY:
        return Conclusion(
            "cause",
            f"Most of the mismatch, {percent(largest.share)} ({interval}), is in {largest.name}, {largest.cause}.",
            largest.name,
            names_cause=True,
        )
    if largest.share_high <= MAJORITY:
        shares = ", ".join(
            f"{percent(link.share)} ({interval_of_share(link.share_low, link.share_high, evidence.reliable)}) "
            f"{link.short_cause}"
            for link in known
        )
        return Conclusion("no-majority", f"No single link is most of the mismatch: {shares}.")
    return Conclusion("cannot-tell", _cannot_tell(evidence, known), largest.name)


def _cannot_tell(evidence: AttributionEvidence, known: Sequence[LinkEvidence]) -> str:
    largest = known[0]
    others = f" from {known[1].short_cause}" if len(known) > 1 else ""
    asked = f"{plural(evidence.rollouts, 'rollout')} of {plural(evidence.prompt_groups, 'prompt')}"
    words = f"Cannot tell {largest.short_cause}{others} with {asked}"
    shares = (
        f"the largest share is {percent(largest.share)}, "
        f"{interval_of_share(largest.share_low, largest.share_high, evidence.reliable)}"
    )
    return f"{words}: {shares}; {_more(evidence, largest)}."


def _more(evidence: AttributionEvidence, largest: LinkEvidence) -> str:
    needed = prompts_needed(largest, evidence.prompt_groups)
    if needed is None:
        return "more prompts are needed" if math.isnan(largest.share_low) else "more prompts would narrow the intervals"
    more = max(needed - evidence.prompt_groups, 1)
    if more > _MOST_PROMPTS:
        return "the shares are too equal to be told apart by more prompts"
    return f"about {plural(more, 'more prompt')} would do (an estimate, if the share stays as it is)"


def _cancellation(evidence: AttributionEvidence) -> Conclusion:
    times = number(evidence.cancellation)
    return Conclusion(
        "cancellation", f"Links cancel each other in part: the sum of their E[d²] is {times} times that of the whole."
    )

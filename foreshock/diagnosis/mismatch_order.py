"""Which came first, a rise of k3 or a fall of the reward, and k3 before, at and after the fall."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from foreshock.diagnosis.wording import number

MISMATCH_VALUES = 3
"""Values whose median of k3 is compared: single steps of a healthy run reach ten times their neighbours."""

LEAST_REFERENCE = 10
"""Values of k3 before the onset that its own baseline needs."""

MISMATCH_LATER = ("reward", "no rise", "healthy")
"""What is found first if the mismatch is no reason of a fall."""

CLEAR_ORDER = 3
"""Least steps between two onsets whose order is known: each onset is exact to one or two steps."""


def mismatch_at_fall(
    steps: Sequence[int], mismatch: Sequence[float | None], onset: int, healthy_end: float = 0.0
) -> dict[str, float | int | str]:
    """Return k3 before, at and after the onset of a fall, the run's own baseline and range, and which came first.

    The baseline is the median of the first half of the values before the onset (at least ten), the range that of their
    medians of three. k3 rises at the first median of three that is above twice the baseline and above the range, if all
    later ones are too. A rise up to ``healthy_end``, the largest healthy k3, makes no reward fall. ``first`` is
    "mismatch", "reward", "together", "healthy" (k3 rose before and was healthy when the reward fell), "no rise", "zero"
    (k3 is exactly 0 in all steps, as with copied log-probs), "not logged" or "unknown".
    """
    known = [(place, each) for place, each in enumerate(mismatch) if each is not None]
    before = [value for place, value in known if place < onset]
    after = [value for place, value in known if place >= onset]
    if not known:
        return {"first": "not logged"}
    if len(before) < LEAST_REFERENCE or not after:
        return {"first": "unknown"}
    if not any(value for _, value in known):
        return {"first": "zero"}
    reference = before[: max(LEAST_REFERENCE, len(before) // 2)]
    levels = _levels(reference)
    baseline, low, high = median(reference), min(levels), max(levels)
    found: dict[str, float | int | str] = {
        "k3_baseline": baseline,
        "k3_baseline_low": low,
        "k3_baseline_high": high,
        "k3_before": median(before[-LEAST_REFERENCE:]),
        "k3_at": median([value for place, value in known if abs(place - onset) <= 1] or after[:1]),
        "k3_after": median(after[-LEAST_REFERENCE:]),
        "k3_newest_step": steps[known[-1][0]],
    }
    above = max(2.0 * baseline, high)
    values = [value for _, value in known]
    risen = _levels(values)[len(levels) :]
    lasting = len(risen)
    while lasting and risen[lasting - 1] > above:
        lasting -= 1
    if lasting == len(risen):
        return found | {"first": "no rise"}
    # The first of the three values that is above: the median follows k3 by one value.
    place = known[lasting + len(levels)][0]
    place = next(at for at, value in known if at >= place and value > above)
    if place < onset + CLEAR_ORDER and max(_levels([*before, *after[:MISMATCH_VALUES]])[len(levels) :]) <= healthy_end:
        return found | {"first": "healthy"}
    found["k3_onset_step"] = steps[place]
    if place <= onset - CLEAR_ORDER:
        return found | {"first": "mismatch"}
    return found | {"first": "reward" if place >= onset + CLEAR_ORDER else "together"}


def _levels(values: Sequence[float]) -> list[float]:
    return [median(values[place : place + MISMATCH_VALUES]) for place in range(len(values) - MISMATCH_VALUES + 1)]


def order_in_words(evidence: Mapping[str, Any]) -> str:
    """Return which came first as a clause, from what `mismatch_at_fall` found; "" without it."""
    first = evidence.get("first")
    if first == "mismatch":
        return f"the mismatch rose first, from step {evidence['k3_onset_step']}"
    if first == "reward":
        return f"the mismatch rose after it, from step {evidence['k3_onset_step']}"
    if first == "together":
        return "the mismatch rose at the same steps, so that it cannot be told which came first"
    if first == "healthy":
        return f"the mismatch was healthy then (k3 {number(float(evidence['k3_at']))})"
    if first == "no rise":
        until = f"by step {evidence['k3_newest_step']}" if "k3_newest_step" in evidence else "then"
        return f"the mismatch had not risen {until}"
    if first == "zero":
        return "k3 is exactly 0 in all steps, so that it tells nothing of the mismatch"
    if first == "not logged":
        return "the mismatch was not logged"
    return "too few steps measured the mismatch to tell if it rose first" if first else ""


def mismatch_in_words(evidence: Mapping[str, Any]) -> str:
    """Return k3 before, at and after a fall beside the run's own baseline, as a sentence; "" if it is not known."""
    if "k3_baseline" not in evidence:
        return ""
    names = ("k3_before", "k3_at", "k3_after", "k3_baseline", "k3_baseline_low", "k3_baseline_high")
    before, at, after, baseline, low, high = (number(float(evidence[name])) for name in names)
    return (
        f"k3 was {before} before the fall, {at} at its start and {after} after it; the run's own baseline is "
        f"{baseline} (range {low} to {high})."
    )

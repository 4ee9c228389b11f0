"""Alternatives to a lower rate: the effect of the usual corrections on the newest step, and the favoured remedy.

The evidence is the loop's state and one step's rollouts; nothing is applied.

- cause: the static mismatch is beyond the set point and is most of the mismatch, and updates are within their limit.
  Neither a lower rate nor a correction removes it.
- rate: an update would be far beyond its set point at the full rate, or masking would leave too small a sample. No
  correction makes an update smaller.
- correction: in all other cases. Masking keeps most of the sample, and the full rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from foreshock.api.watch import EffectRecord, Favoured, RemedyRecord
from foreshock.corrections import Evaluator
from foreshock.diagnosis.statistics import proportion_interval
from foreshock.diagnosis.wording import number, percent, plural
from foreshock.learning_rate.loop import LoopSettings, LoopState, finding
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.rollout_summaries import RolloutSummaries

OFFERED: Final = ("sequence_mis", "sequence_tis", "token_tis", "icepop")
"""The evaluated corrections, at their first usual thresholds. The first is recommended: it did best in
docs/closed-loop.md."""

LEAST_ROLLOUTS: Final = 32
"""Least number of rollouts with a measured token. With fewer, the share that a mask keeps is known to ±17 % at best."""

LEAST_EFFECTIVE: Final = 0.5
"""Least effective sample, as a fraction: a mask that leaves less costs more than half of the batch."""

LARGEST_UPDATE: Final = 1.5
"""Largest update at the full rate, as a multiple of its set point. Of the tuning runs without a corrected loss, those
that masking helps had 0.5 to 1.1 from the 15th update on, the others 2.0 to 15."""

LEAST_UPDATES: Final = 15
"""Least number of updates for judging whether they are too large, if the trainer logs any."""


@dataclass(frozen=True, slots=True)
class Remedies:
    """The corrections that were evaluated, what the evidence favours (None: nothing, or it cannot tell), and why."""

    also: tuple[RemedyRecord, ...] = ()
    favours: Favoured | None = None
    why: str = ""


def is_wanted(loop: LoopState, settings: LoopSettings) -> bool:
    """Return whether anything is beyond its set point, or the scale is still lowered because of it."""
    lowered = (loop.error > 0.0 or loop.log_scale < 0.0) and not loop.only_cools(settings)
    return lowered or finding(loop, settings) is not None


def evaluate_remedies(statistics: ComparisonStatistics, summaries: RolloutSummaries) -> tuple[RemedyRecord, ...]:
    """Return the effect of each offered correction; empty with fewer whole rollouts than `LEAST_ROLLOUTS`."""
    sequences = int(summaries.whole().sum())
    if sequences < LEAST_ROLLOUTS:
        return ()
    evaluator = Evaluator(statistics, summaries)
    remedies = []
    for name in OFFERED:
        found = evaluator.evaluate(name)
        low, high = proportion_interval(round(found.kept_sequences * sequences), sequences)
        effect = EffectRecord(
            kept_sequences=found.kept_sequences,
            kept_low=low,
            kept_high=high,
            kept_tokens=found.kept_tokens,
            ess=found.weights.effective_fraction,
            distortion=found.distortion,
            uncorrected_distortion=found.uncorrected_distortion,
        )
        remedies.append(RemedyRecord(correction=name, threshold=str(found.used), expected=effect))
    return tuple(remedies)


def favoured(loop: LoopState, settings: LoopSettings, also: Sequence[RemedyRecord]) -> Remedies:
    """Return what the evidence favours, and why, in one sentence."""
    if not is_wanted(loop, settings):
        return Remedies()
    static, driven = loop.static or 0.0, loop.average or 0.0
    is_static = finding(loop, settings) is not None and static >= driven
    at_any_rate = f"{percent(static / (static + driven))} of the mismatch is there at any rate" if is_static else ""
    large = _large_update(loop, settings)
    if is_static and large is None:
        masking = f" {_dropped(also[0])}." if also else ""
        return Remedies(
            tuple(also), "cause",
            f"Lowering the learning rate will not help: {at_any_rate}. Find its cause by a probe.{masking}",
        )  # fmt: skip
    besides = f" {at_any_rate}: find its cause by a probe." if is_static else ""
    if 0 < loop.updates < LEAST_UPDATES:
        return Remedies(
            tuple(also), None,
            f"Rate or {'cause' if is_static else 'correction'}: it cannot tell before {LEAST_UPDATES} updates are "
            f"logged, and {loop.updates} are.{besides}",
        )  # fmt: skip
    if large is not None:
        return Remedies(tuple(also), "rate", f"Lower the rate: {large}, and no correction makes it smaller.{besides}")
    if not also:
        return Remedies(
            why=f"No correction can be compared with the rate: that needs {plural(LEAST_ROLLOUTS, 'rollout')} of the "
            "newest step with both log-probs."
        )
    best = also[0]
    if best.expected.ess >= LEAST_EFFECTIVE:
        return Remedies(
            tuple(also), "correction",
            f"Correct the loss rather than lower the rate: {_dropped(best, 'sequence MIS')}, and leave an effective "
            f"sample of {percent(best.expected.ess)} at the full rate.",
        )  # fmt: skip
    return Remedies(
        tuple(also), "rate",
        f"Lower the rate: sequence MIS at {best.threshold} would leave an effective sample of only "
        f"{percent(best.expected.ess)}.",
    )  # fmt: skip


def _large_update(loop: LoopState, settings: LoopSettings) -> str | None:
    """Return a clause if the update at the full rate, or the newest one if that is unknown, is beyond its limit; else
    None.

    It is unknown while the trainer has not logged its rate, or fewer updates than the first ones, which are larger.
    """
    update, point = loop.full_update, settings.update_set_point
    which = "at the full one an update moves the policy by"
    if update is None:
        update, point = loop.update, loop.update_point(settings)
        which = "the newest update moved the policy by"
    if update is None or update <= LARGEST_UPDATE * point:
        return None
    return f"{which} {number(update)} nats per token, {update / point:.2g} × its set point"


def _dropped(remedy: RemedyRecord, name: str = "Sequence MIS") -> str:
    low, high = percent(1.0 - remedy.expected.kept_high), percent(1.0 - remedy.expected.kept_low)
    return (
        f"{name} at {remedy.threshold} would drop {percent(1.0 - remedy.expected.kept_sequences)} ({low} to {high}) "
        "of the sequences"
    )

"""Conclusions on a run's health: its mismatch pooled over a window of steps, judged with its interval.

"healthy" requires that the whole interval of every judged measure lies in the healthy range, that the intervals are
reliable, and that the lint found nothing. A value in the range whose interval reaches beyond it is "healthy so far".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.wording import interval_text, number, plural
from foreshock.measures.estimators.reliability import interval_warning
from foreshock.model_kind import ModelKind
from foreshock.ranges import Verdict, range_of, verdict_of, worst

HealthVerdict = Literal["unknown", "healthy", "healthy so far", "warning", "critical"]
_ORDER: tuple[HealthVerdict, ...] = ("unknown", "healthy", "healthy so far", "warning", "critical")

WINDOW_STEPS = 10
"""The newest measured steps that the first figure is pooled over: one step has too few prompts to judge a run by."""

JUDGED_MEASURES = ("k3_kl", "rollout_probs_diff_mean", "token_mult_prob_error", "tail_2")
"""The worst of the verdicts on these measures is the verdict on a run, and on a step."""


@dataclass(frozen=True, slots=True)
class PooledMeasure:
    """A measure pooled over the window; the ends of its interval are NaN if it has none.

    It is a 95 % interval if `reliable`.
    """

    measure: str
    mean: float
    low: float = math.nan
    high: float = math.nan
    reliable: bool = False


@dataclass(frozen=True, slots=True)
class HealthEvidence:
    """The newest measured steps of a run.

    `clusters` are the prompts × steps that the interval of k3 is over. `unreliable` says why that interval is no 95 %
    interval, None if it is one. `faults` are titles of findings of the lint in these steps.
    """

    first_step: int
    last_step: int
    steps: int
    tokens: int
    clusters: int
    measures: tuple[PooledMeasure, ...]
    model_kind: ModelKind | None = None
    unreliable: str | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JudgedMeasure:
    """A pooled measure with its verdict."""

    pooled: PooledMeasure
    verdict: HealthVerdict


@dataclass(frozen=True, slots=True)
class Health:
    """The verdict on a run, with the sentences that say why; the first one is the headline."""

    verdict: HealthVerdict
    measures: tuple[JudgedMeasure, ...]
    sentences: tuple[str, ...]


def conclude_health(evidence: HealthEvidence) -> Health:
    """Return the verdict on the window and its sentences."""
    judged = tuple(JudgedMeasure(each, _judge(evidence, each)) for each in evidence.measures)
    verdict = worst_health([each.verdict for each in judged])
    if evidence.faults and verdict != "critical":
        verdict = "warning"
    sentences = [_headline(evidence, judged, verdict)]
    in_headline = verdict if judged[0].verdict != verdict else None
    sentences += [
        f"{_beyond(evidence, each)}."
        for each in judged[1:]
        if each.verdict in ("warning", "critical") and each.verdict != in_headline
    ]
    if evidence.faults:
        sentences.append(f"The lint found in these steps: {'; '.join(evidence.faults)}.")
    if evidence.unreliable is not None:
        sentences.append(evidence.unreliable)
    return Health(verdict, judged, tuple(sentences))


def step_verdict(values: Mapping[str, float], model_kind: ModelKind | None) -> HealthVerdict:
    """Return the worst of the verdicts on a step's judged measures; `values` are measures by column, NaN if unknown.

    If all are in their ranges and the interval of k3 (`k3_kl_bootstrap_high`) reaches beyond, is no 95 % interval, or
    it has none: "healthy so far".
    """
    verdicts = [verdict_of(name, values.get(name, math.nan), model_kind) for name in JUDGED_MEASURES]
    found = worst(verdicts)
    if found != "healthy":
        return found
    sure = verdict_of("k3_kl", values.get("k3_kl_bootstrap_high", math.nan), model_kind) == "healthy"
    return "healthy" if sure and interval_warning(values) is None else "healthy so far"


def worst_health(verdicts: Sequence[HealthVerdict]) -> HealthVerdict:
    """Return the most severe verdict; "unknown" if there is none."""
    return max(verdicts, key=_ORDER.index, default="unknown")


def _judge(evidence: HealthEvidence, pooled: PooledMeasure) -> HealthVerdict:
    known = range_of(pooled.measure, evidence.model_kind)
    if known is None or math.isnan(pooled.mean):
        return "unknown"
    of_mean: Verdict = known.verdict(pooled.mean)
    if of_mean != "healthy":
        return of_mean
    is_k3 = pooled.measure == JUDGED_MEASURES[0]
    sure = _is_healthy(evidence, pooled) and (pooled.reliable or not is_k3)
    return "healthy" if sure else "healthy so far"


def _headline(evidence: HealthEvidence, judged: Sequence[JudgedMeasure], verdict: HealthVerdict) -> str:
    steps = (
        f"steps {evidence.first_step} to {evidence.last_step}" if evidence.steps > 1 else f"step {evidence.last_step}"
    )
    k3 = judged[0]
    window = f"k3 of {TRAINER_ROLLOUT}, pooled over {steps}, is {number(k3.pooled.mean)}"
    if math.isnan(k3.pooled.high):
        window += " (no interval: too few prompts)"
    else:
        window += (
            f" ({interval_text(k3.pooled.low, k3.pooled.high, k3.pooled.reliable)} over "
            f"{plural(evidence.clusters, 'prompt')})"
        )
    why = _why(evidence, judged, verdict)
    return f"{verdict[0].upper()}{verdict[1:]}{why}: {window}{_could_be(evidence, judged, verdict)}."


def _why(evidence: HealthEvidence, judged: Sequence[JudgedMeasure], verdict: HealthVerdict) -> str:
    """Return in brackets what is beyond its range, if that is not k3."""
    if verdict not in ("warning", "critical") or judged[0].verdict == verdict:
        return ""
    beyond = [_beyond(evidence, each) for each in judged if each.verdict == verdict]
    return f" ({'; '.join(beyond) or 'findings of the lint'})"


def _could_be(evidence: HealthEvidence, judged: Sequence[JudgedMeasure], verdict: HealthVerdict) -> str:
    """Return how large the measures could be whose intervals reach beyond their ranges."""
    if verdict != "healthy so far":
        return ""
    unsure = [each.pooled for each in judged if each.verdict == "healthy so far"]
    beyond = [each for each in unsure if math.isfinite(each.high) and not _is_healthy(evidence, each)]
    found = [number(each.high) + ("" if each.measure == JUDGED_MEASURES[0] else f" ({_label(each.measure)})")
             for each in beyond]  # fmt: skip
    missing = [_label(each.measure) for each in unsure if math.isnan(each.high) and each.measure != JUDGED_MEASURES[0]]
    words = f", could be up to {', '.join(found)}" if found else ""
    return words + (f"; no interval of {' and '.join(missing)} yet" if missing else "")


def _is_healthy(evidence: HealthEvidence, pooled: PooledMeasure) -> bool:
    known = range_of(pooled.measure, evidence.model_kind)
    return known is not None and known.verdict(pooled.high) == "healthy"


def _beyond(evidence: HealthEvidence, judged: JudgedMeasure) -> str:
    known = range_of(judged.pooled.measure, evidence.model_kind)
    assert known is not None
    threshold = known.threshold_text(known.critical if judged.verdict == "critical" else known.warning)
    return f"{known.label} is {number(judged.pooled.mean, 4)}, {judged.verdict} {threshold}"


def _label(measure: str) -> str:
    known = range_of(measure, None)
    return known.label if known is not None else measure

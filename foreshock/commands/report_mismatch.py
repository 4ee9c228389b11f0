"""Sections of the report about the size of the mismatch: over steps, and by token probability."""

from __future__ import annotations

import math

from foreshock.commands.diagnosis import Diagnosis, evenly_spaced, recent_median
from foreshock.commands.records import Curve
from foreshock.commands.text import (
    STYLES,
    Paint,
    bar,
    count,
    note,
    number,
    paint_verdicts,
    section_title,
    sparkline,
    table,
    wrap,
)
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.health import step_verdict
from foreshock.interval_names import INTERVAL, RANGE
from foreshock.measures.estimators.reliability import effective_of_all, interval_warning
from foreshock.measures.statistics.conditions import LOW_PROBABILITY
from foreshock.model_kind import UNDECLARED_NOTE, ModelKind
from foreshock.ranges import required_range

__all__ = ["buckets_section", "mismatch_section"]

_CURVE_WIDTH = 34
_TABLE_ROWS = 12
_COPIED = (
    "The difference is exactly 0 at all tokens: the trainer's log-probs look like a copy of the engine's (bypass), so "
    "this comparison cannot show a mismatch. Probe a step to measure it."
)


def mismatch_section(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    """Return the lines on the mismatch of trainer/rollout: verdicts, steps, tails."""
    curve, verdict = diagnosis.mismatch, diagnosis.verdict
    title = f"Mismatch, {TRAINER_ROLLOUT}: per token, μ the engine's, π the trainer's"
    if not curve.known("k3_kl"):
        why = "  No step has both rollout_log_probs and trainer_log_probs: log both to see the mismatch."
        return [section_title(title, paint), why]
    lines = [section_title(title, paint, verdict, STYLES.get(verdict))]
    for sentence in diagnosis.health.sentences:
        lines += wrap(sentence, "    ", "  ")
    rows = []
    for item in diagnosis.health.measures:
        known, values = required_range(item.measure, diagnosis.model_kind), curve.of(item.measure)
        line = sparkline(values, _CURVE_WIDTH, logarithmic=item.measure == "k3_kl")
        now = f"{item.mean:.5f}" if item.measure == "token_mult_prob_error" else number(item.mean)
        rows.append([known.label, line.ljust(_CURVE_WIDTH), now, item.verdict, known.text])
    header = ["", f"steps {curve.steps[0]} to {curve.steps[-1]}", "now", "", "healthy"]
    lines += paint_verdicts(table(header, rows, left=(0, 1, 3, 4)), paint, column_of=3, rows=rows)
    if diagnosis.model_kind is None:
        lines += note(UNDECLARED_NOTE, paint)
    peak, at = max((value, step) for value, step in zip(curve.of("k3_kl"), curve.steps, strict=True) if value == value)
    window = f"steps {diagnosis.health.first_step} to {diagnosis.health.last_step}"
    lines += note(f"now: pooled over {window}; k3_kl in log scale, at most {number(peak)} (step {at})", paint)
    lines += ["", *_steps_table(diagnosis, paint), *_shape(curve, diagnosis.model_kind)]
    if _all_zero(curve):
        lines += wrap(_COPIED, "    ", "  ! ")
    return lines


def _steps_table(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    """Return a table of evenly spaced steps and of the one with the largest k3."""
    curve = diagnosis.mismatch
    k3 = curve.of("k3_kl")
    chosen = set(evenly_spaced(range(len(curve.steps)), _TABLE_ROWS - 1))
    chosen.add(max(range(len(k3)), key=lambda index: k3[index] if math.isfinite(k3[index]) else -math.inf))
    if diagnosis.step in curve.steps:
        chosen.add(curve.steps.index(diagnosis.step))
    header = ["step", "k3_kl", "interval of k3", "mean |Δp|", "E[exp |d|]", "F(2)", "max |d|", "tokens", ""]
    rows, warnings = [], []
    for index in sorted(chosen):
        at = {name: curve.of(name)[index] for name in curve.values}
        missing = math.nan
        low, high = at.get("k3_kl_bootstrap_low", missing), at.get("k3_kl_bootstrap_high", missing)
        interval = f"{number(low, 2)} … {number(high, 2)}" if math.isfinite(low) and math.isfinite(high) else "–"
        if warning := interval_warning(at):
            interval += "~"
            warnings.append(f"step {curve.steps[index]}: {warning}")
        rows.append([
            str(curve.steps[index]),
            number(k3[index]),
            interval,
            number(at.get("rollout_probs_diff_mean", missing), 2),
            number(at.get("token_mult_prob_error", missing), 5),
            number(at.get("tail_2", missing), 2),
            number(at.get("max_abs_d", missing), 3),
            count(int(tokens)) if math.isfinite(tokens := at.get("tokens", missing)) else "–",
            step_verdict(at, diagnosis.model_kind),
        ])  # fmt: skip
    lines = paint_verdicts(table(header, rows, left=(8,)), paint, column_of=8, rows=rows)
    newest = {name: values[-1] for name, values in curve.values.items()}
    words = f"intervals: {INTERVAL}s, bootstrap-t over prompt groups; ~: a {RANGE}, which covers less often"
    if (groups := effective_of_all(newest)) != "–":
        words += f"; effective prompt groups of step {curve.steps[-1]}: {groups}"
    lines += note(words, paint)
    for warning in warnings[-1:]:
        lines += wrap(warning, "    ", "  ! ")
    return lines


def _shape(curve: Curve, model_kind: ModelKind | None) -> list[str]:
    """Return a table of tail and advantage measures: medians of the newest steps."""
    reach = recent_median(curve.of("max_d"))
    measures = (
        ("low_probability_abs_d", f"mean |d| at μ < {LOW_PROBABILITY:g}", "nats; where a mismatch shows first"),
        ("tail_asymmetry_ln2", "tail asymmetry at ln 2", "> 0: π ≪ μ is more frequent; < 0: π ≫ μ is"),
        ("pareto_k", "k̂ of π/μ", _pareto_meaning(recent_median(curve.of("pareto_k")), reach, model_kind)),
        ("ess_seq_predicted", "ESS of sequences, exp(−2·KL·T)", "fraction of the sample, with sequence weights"),
        ("advantage_d_cov", "cov(advantage, d)", "> 0: π > μ on tokens with a high advantage"),
        ("advantage_skew", "mean of A·(π/μ − 1)", "0: the mismatch is independent of the reward"),
    )
    rows = [
        [label, number(recent_median(curve.of(name)), 2), meaning]
        for name, label, meaning in measures
        if curve.known(name)
    ]
    return ["", *table(["tails and reward, now", "", ""], rows, left=(0, 2))] if rows else []


def _pareto_meaning(shape: float, reach: float, model_kind: ModelKind | None) -> str:
    if reach < 1.0:
        return "no ratio exceeds e: k̂ matters to intervals only"
    limit = required_range("pareto_k", model_kind).critical
    assert limit is not None
    if shape > limit:
        return f"above {limit}: means of ratios and ESS cannot be trusted"
    return f"at most {limit}: means of ratios can be trusted"


def _all_zero(curve: Curve) -> bool:
    fractions = [value for value in curve.of("zero_fraction") if math.isfinite(value)]
    return bool(fractions) and min(fractions) == 1.0


def buckets_section(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    """Return the table of the mismatch by probability under μ at the diagnosed step."""
    title = section_title(f"Which tokens: {TRAINER_ROLLOUT} by probability, step {diagnosis.step}", paint)
    if diagnosis.buckets_missing:
        return [title, *wrap(diagnosis.buckets_missing, "  ", "  ")]
    if not diagnosis.buckets:
        return []
    tokens = sum(bucket.tokens for bucket in diagnosis.buckets)
    contributions = [
        bucket.k3_kl * bucket.tokens if math.isfinite(bucket.k3_kl) else 0.0 for bucket in diagnosis.buckets
    ]
    whole = sum(contributions) or math.nan
    header = ["probability under μ", "tokens", "of all", "mean |d|", "mean d", "k3_kl", "max |d|", "mean |Δp|",
              "of k3", ""]  # fmt: skip
    rows = []
    for bucket, contribution in zip(diagnosis.buckets, contributions, strict=True):
        part = contribution / whole
        rows.append([
            f"{_edge(bucket.low)} … {_edge(bucket.high)}",
            count(bucket.tokens),
            f"{100 * bucket.tokens / tokens:.1f} %",
            number(bucket.mean_abs_d, 2),
            number(bucket.mean_d, 2),
            number(bucket.k3_kl, 2),
            number(bucket.max_abs_d, 2),
            number(bucket.mean_abs_probability_difference, 2),
            f"{100 * part:.0f} %" if math.isfinite(part) else "–",
            bar(part, 8).rstrip(),
        ])  # fmt: skip
    return [title, *table(header, rows, left=(0, 9))]


def _edge(value: float) -> str:
    """Format a bucket edge; edges are half decades: 1e-4, 3.2e-4, 0.001, …"""
    if value >= 1e-3 or value == 0:
        return f"{value:.2g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"

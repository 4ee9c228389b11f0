"""The report as plain text, at most 100 columns wide: one section per question, its answer first."""

from __future__ import annotations

import math

from foreshock.commands.diagnosis import Diagnosis, recent_median
from foreshock.commands.report_attribution import attribution_section
from foreshock.commands.report_mismatch import buckets_section, mismatch_section
from foreshock.commands.text import STYLES, Paint, count, moment, number, section_title, sparkline, table, wrap
from foreshock.learning_rate.advice import effect_in_words
from foreshock.model_kind import MODEL_KIND_NAMES

__all__ = ["render"]

_CURVE_WIDTH = 48


def render(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    """Return the lines of the report."""
    sections = [
        _heading(diagnosis, paint),
        mismatch_section(diagnosis, paint),
        attribution_section(diagnosis, paint),
        buckets_section(diagnosis, paint),
        _lengths(diagnosis, paint),
        _alerts(diagnosis, paint),
        _advice(diagnosis, paint),
    ]
    lines = [line for section in sections if section for line in ["", *section]]
    return [*lines, "", f"Pages: {diagnosis.url}"]


def _heading(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    run = diagnosis.run
    lines = [section_title(f"Foreshock · {run.title}", paint, run.state, "critical" if run.state == "failed" else None)]
    description = {"model": run.model, "trainer": run.trainer, "engine": run.engine, "on": run.hardware}
    parts = [f"{label} {value}" for label, value in description.items() if value]
    if diagnosis.model_kind is not None:
        parts.insert(1 if run.model else 0, MODEL_KIND_NAMES[diagnosis.model_kind])
    if run.initial_learning_rate is not None:
        parts.append(f"learning rate {run.initial_learning_rate:g}")
    lines += wrap(" · ".join(parts), "  ", "  ") if parts else []
    steps = diagnosis.rollouts.steps or diagnosis.mismatch.steps
    if not steps:
        return [*lines, "  no step is complete yet"]
    rollouts = sum(value for value in diagnosis.rollouts.of("num_rollouts") if math.isfinite(value))
    tokens = sum(value for value in diagnosis.rollouts.of("num_tokens") if math.isfinite(value))
    lines.append(
        f"  {count(len(steps))} steps ({steps[0]} to {steps[-1]}), {count(int(rollouts))} rollouts, "
        f"{count(int(tokens))} tokens; newest data {moment(run.updated_at_us)}"
    )
    lines += _incomplete(diagnosis)
    lines += _coverage(diagnosis)
    return lines


def _incomplete(diagnosis: Diagnosis) -> list[str]:
    """Return the lines on steps that closed without some of their shards."""
    missing = diagnosis.rollouts.incomplete or diagnosis.mismatch.incomplete
    if not missing:
        return []
    newest = max(missing)
    text = "step {}: {} of {} shards".format(newest, *missing[newest])
    if len(missing) > 1:
        text += f", and {len(missing) - 1} earlier incomplete steps"
    return wrap(f"closed incomplete, numbers are of the rollouts that arrived: {text}", "    ", "  ! ")


def _coverage(diagnosis: Diagnosis) -> list[str]:
    """Return the line on what the measures rest on, if shards were sent as statistics."""
    found = diagnosis.rollouts.coverage or diagnosis.mismatch.coverage
    if not found:
        return []
    newest = max(found)
    return wrap(f"step {newest}: {found[newest]}", "    ", "  ")


def _lengths(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    curve = diagnosis.rollouts
    shown = (
        ("response_length_mean", "mean length"),
        ("response_length_p99", "99th percentile"),
        ("response_length_max", "longest"),
        ("truncated_fraction", "truncated"),
        ("reward_mean", "reward"),
        ("entropy_mean", "entropy"),
        ("lag_mean", "lag"),
    )
    rows = []
    for measure, label in shown:
        if not curve.known(measure):
            continue
        values = curve.of(measure)
        finite = [value for value in values if math.isfinite(value)]
        line = sparkline(values, _CURVE_WIDTH).ljust(_CURVE_WIDTH)
        rows.append(
            [label, line, number(finite[0]), number(recent_median(values)), number(min(finite)), number(max(finite))]
        )
    if not rows:
        return []
    header = ["", f"steps {curve.steps[0]} to {curve.steps[-1]}", "first", "now", "least", "most"]
    return [
        section_title("Lengths (tokens the model generated), rewards, entropy", paint),
        *table(header, rows, left=(0, 1)),
    ]


def _alerts(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    shown = [alert for alert in diagnosis.alerts if alert.state != "retracted"]
    is_open = [alert for alert in shown if alert.state in ("open", "acknowledged")]
    aside = f"{len(is_open)} open" if is_open else "none open"
    worst = "critical" if any(alert.severity == "critical" for alert in is_open) else "warning" if is_open else "good"
    lines = [section_title("Alerts", paint, aside, "good" if worst == "good" else STYLES[worst])]
    for alert in shown:
        head = f"{alert.severity:<8}"
        about = f"step {alert.step}, {alert.rule}, {alert.state}"
        if math.isfinite(alert.value) and math.isfinite(alert.threshold):
            about += f" (value {number(alert.value)}, threshold {number(alert.threshold)})"
        lines.append(f"  {paint(head, STYLES.get(alert.severity))} {about}")
        lines += wrap(alert.why, " " * 8) if alert.why else []
        lines += wrap(alert.what_to_do, " " * 10, " " * 8 + "→ ") if alert.what_to_do else []
    return lines if shown else [*lines, "  no alert has fired"]


def _advice(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    reading = diagnosis.advice
    if reading is None:
        return []
    advice = reading.advice
    effect = effect_in_words(advice.mode, advice.revision, reading.applied)
    lines = [
        section_title("Learning-rate advice", paint, advice.phase),
        f"  scale {reading.advised_scale:g}; mode {advice.mode} ({effect}); revision {advice.revision}",
    ]
    lines += wrap(advice.reason, "  ", "  ") if advice.reason else []
    if advice.schedule is not None:
        lines.append(
            f"  surge at step {advice.schedule.surge_step}: × {advice.schedule.factor:g} every "
            f"{advice.schedule.decay_period} steps, not below {advice.schedule.floor:g}"
        )
    ahead = _boundaries(diagnosis)
    if ahead:
        lines.append("  falls at " + ", ".join(f"{step} (to {scale:g})" for step, scale in ahead))
    elif reading.next_decay_step is not None:
        lines.append(f"  next fall at step {reading.next_decay_step}")
    if advice.stale:
        lines.append("  stale: newer steps are still being measured")
    if advice.want_weights_at_step is not None:
        lines.append(f"  requested: a checkpoint of step {advice.want_weights_at_step}, for a probe")
    return lines


def _boundaries(diagnosis: Diagnosis) -> list[tuple[int, float]]:
    """Return the next steps at which the advised scale falls, with the new scale."""
    reading = diagnosis.advice
    if reading is None or reading.next_decay_step is None:
        return []
    advice, step, found = reading.advice, reading.next_decay_step, []
    scale = advice.advised_scale(step - 1)
    for candidate in range(step, step + 5_000):
        now = advice.advised_scale(candidate)
        if now < scale:
            found.append((candidate, now))
            scale = now
            if len(found) == 4:
                break
    return found

"""The report as text: the mismatch by step, and the other parts."""

import math
from collections.abc import Sequence

from foreshock.api.diagnosis import Diagnosis
from foreshock.api.watch import STANDING, AdviceRecord
from foreshock.commands.queries import Curve
from foreshock.commands.report_attribution import attribution_section
from foreshock.commands.report_data import (
    RECENT_STEPS,
    SHOWN_MEASURES,
    ReportData,
    evenly_spaced,
    recent_mean,
    recent_median,
)
from foreshock.commands.text import (
    STYLES,
    Paint,
    bar,
    count,
    moment,
    note,
    number,
    section_title,
    sparkline,
    table,
    wrap,
)
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.lags import AT_LAG_ZERO
from foreshock.diagnosis.wording import plural
from foreshock.interval_names import RANGE, ends_in_words
from foreshock.learning_rate.advice import Advice, effect_in_words
from foreshock.measures.estimators.bootstrap import effective_of_all, interval_warning
from foreshock.measures.statistics.conditions import LOW_PROBABILITY
from foreshock.model_kind import MODEL_KIND_NAMES, UNDECLARED_NOTE, ModelKind
from foreshock.ranges import required_range

_CURVE_WIDTH = 34
_TABLE_ROWS = 12
_RANGES_AT_LAG_ZERO = (
    "Ranges hold at lag 0. k3 is known of these tokens alone; the other measures are means over all tokens and have a "
    "range only if nearly all tokens are at lag 0."
)
_COPIED = (
    "The difference is exactly 0 at all tokens: the trainer's log-probs look like a copy of the engine's (bypass), so "
    "this comparison cannot show a mismatch. Probe a step to measure it."
)


def mismatch_section(report: ReportData, paint: Paint) -> list[str]:
    """Return the lines on the mismatch of trainer/rollout: measures, steps, tails."""
    curve = report.mismatch
    title = f"Mismatch, {TRAINER_ROLLOUT}: per token, μ the engine's, π the trainer's"
    if not curve.known("k3_kl"):
        why = "  No step has both rollout_log_probs and trainer_log_probs: log both to see the mismatch."
        return [section_title(title, paint), why]
    rows = [row for measure in SHOWN_MEASURES for row in _rows_with_range(report, measure)]
    header = ["", f"steps {curve.steps[0]} to {curve.steps[-1]}", "now", "healthy"]
    lines = [section_title(title, paint), *table(header, rows, left=(0, 1, 3))]
    if report.model_kind is None:
        lines += note(UNDECLARED_NOTE, paint)
    if report.newest_lags.is_mixed:
        lines += note(_RANGES_AT_LAG_ZERO, paint)
    peak, at = max((value, step) for value, step in zip(curve.of("k3_kl"), curve.steps, strict=True) if value == value)
    window = f"the newest {RECENT_STEPS} measured steps"
    lines += note(f"now: mean of {window}; k3_kl in log scale, at most {number(peak)} (step {at})", paint)
    lines += ["", *_steps_table(report, paint), *_shape(curve, report.model_kind)]
    if _all_zero(curve):
        lines += wrap(_COPIED, "    ", "  ! ")
    return lines


def _rows_with_range(report: ReportData, measure: str) -> list[list[str]]:
    """Return the row of a measure of trainer/rollout: its curve, its value now and its range.

    If lags are mixed, the range of k3 is beside k3 at lag 0, as the diagnosis judges it, and k3 of all tokens has none;
    another measure has its range only if nearly all of the newest tokens are at lag 0.
    """
    curve, known, lags = report.mismatch, required_range(measure, report.model_kind), report.newest_lags

    def row(label: str, values: Sequence[float], now: float, healthy: str) -> list[str]:
        line = sparkline(values, _CURVE_WIDTH, logarithmic=measure == "k3_kl").ljust(_CURVE_WIDTH)
        return [label, line, f"{now:.5f}" if measure == "token_mult_prob_error" else number(now), healthy]

    values = curve.of(measure)
    mean = recent_mean(values, curve.of("tokens"))
    if not lags.is_mixed:
        return [row(known.label, values, mean, known.text)]
    if measure != "k3_kl":
        return [row(known.label, values, mean, known.text if lags.are_nearly_all_fresh else "")]
    fresh = math.nan if lags.hides_numerics else lags.k3[AT_LAG_ZERO]
    return [
        row(f"{known.label}, lag 0", report.at_lag_zero(measure), fresh, known.text),
        row(f"{known.label}, all lags", values, mean, ""),
    ]


def diagnosis_section(found: Diagnosis, paint: Paint, most: int | None = None) -> list[str]:
    """Return the lines of the diagnosis: its headline, in one line as everywhere, and `most` sentences of each part."""
    lines = [paint(found.headline, STYLES.get(found.verdict))]
    for title, sentences in found.parts().items():
        lines += ["", f"  {title}"]
        for sentence in sentences[:most]:
            lines += wrap(sentence, "      ", "    · ")
        if most is not None and len(sentences) > most:
            lines += note(f"  and {len(sentences) - most} more", paint)
    return lines


def _steps_table(report: ReportData, paint: Paint) -> list[str]:
    """Return a table of evenly spaced steps and of the one with the largest k3."""
    curve = report.mismatch
    k3 = curve.of("k3_kl")
    chosen = set(evenly_spaced(range(len(curve.steps)), _TABLE_ROWS - 1))
    chosen.add(max(range(len(k3)), key=lambda index: k3[index] if math.isfinite(k3[index]) else -math.inf))
    if report.step in curve.steps:
        chosen.add(curve.steps.index(report.step))
    header = ["step", "k3_kl", "range of k3", "mean |Δp|", "E[exp |d|]", "F(2)", "max |d|", "tokens"]
    rows, warnings = [], []
    for index in sorted(chosen):
        at = {name: curve.of(name)[index] for name in curve.values}
        missing = math.nan
        low, high = at.get("k3_kl_bootstrap_low", missing), at.get("k3_kl_bootstrap_high", missing)
        known = math.isfinite(low) and math.isfinite(high)
        interval = ends_in_words(k3[index], low, high, lambda value: number(value, 2), " … ") if known else "–"
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
        ])  # fmt: skip
    lines = table(header, rows, left=())
    newest = {name: values[-1] for name, values in curve.values.items()}
    words = f"{RANGE}: bootstrap-t over prompt groups; ~: known to be too short"
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
    return min(fractions, default=0.0) == 1.0


def buckets_section(report: ReportData, paint: Paint) -> list[str]:
    """Return the table of the mismatch by probability under μ at the diagnosed step."""
    title = section_title(f"Which tokens: {TRAINER_ROLLOUT} by probability, step {report.step}", paint)
    if report.buckets_missing:
        return [title, *wrap(report.buckets_missing, "  ", "  ")]
    if not report.buckets:
        return []
    tokens = sum(bucket.tokens for bucket in report.buckets)
    contributions = [bucket.k3_kl * bucket.tokens if math.isfinite(bucket.k3_kl) else 0.0 for bucket in report.buckets]
    whole = sum(contributions) or math.nan
    header = ["probability under μ", "tokens", "of all", "mean |d|", "mean d", "k3_kl", "max |d|", "mean |Δp|",
              "of k3", ""]  # fmt: skip
    rows = []
    for bucket, contribution in zip(report.buckets, contributions, strict=True):
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


_SPARKLINE_WIDTH = 48
SCREEN_LINES = 40
"""Lines of a usual terminal."""


def render_screen(report: ReportData, paint: Paint) -> list[str]:
    """Return the lines of one screen: the diagnosis, the curves that it is about, and the advice in force.

    Each part of the diagnosis has three sentences, or fewer (at least one) if they do not fit into SCREEN_LINES.
    """
    head, end = _heading(report, paint), _curves_and_advice(report)
    for most in (3, 2, 1):
        lines = [*head, "", *diagnosis_section(report.diagnosis, paint, most), *end]
        if len(lines) <= SCREEN_LINES:
            break
    return lines


def _curves_and_advice(report: ReportData) -> list[str]:
    rows = _rows_with_range(report, "k3_kl") if report.mismatch.known("k3_kl") else []
    for measure, label in (("reward_mean", "reward"), ("response_length_mean", "mean length")):
        values = report.rollouts.of(measure)
        if report.rollouts.known(measure):
            line = sparkline(values, _CURVE_WIDTH).ljust(_CURVE_WIDTH)
            rows.append([report.rollouts.label(measure, label), line, number(recent_median(values)), ""])
    lines = ["", *table(["", "all steps", "now", "healthy"], rows, left=(0, 1, 3))] if rows else []
    if report.advice is not None:
        lines += ["", *wrap(f"learning rate: {_scale_in_words(report.advice)}", "    ", "  ")]
    return [*lines, "", "Tables of steps, tokens, probes and alerts: --full", f"Pages: {report.url}"]


def _scale_in_words(reading: AdviceRecord) -> str:
    advice = reading.advice
    effect = effect_in_words(advice.mode, advice.revision, reading.applied)
    return f"scale {reading.advised_scale:g}; mode {advice.mode} ({effect}); revision {advice.revision}"


def render(report: ReportData, paint: Paint) -> list[str]:
    """Return the lines of the report."""
    sections = [
        _heading(report, paint),
        diagnosis_section(report.diagnosis, paint),
        mismatch_section(report, paint),
        attribution_section(report, paint),
        buckets_section(report, paint),
        _lengths(report, paint),
        _alerts(report, paint),
        _advice(report, paint),
    ]
    lines = [line for section in sections if section for line in ["", *section]]
    return [*lines, "", f"Pages: {report.url}"]


def _heading(report: ReportData, paint: Paint) -> list[str]:
    run = report.run
    lines = [section_title(f"Foreshock · {run.title}", paint, run.state, "critical" if run.state == "failed" else None)]
    description = {"model": run.model, "trainer": run.trainer, "engine": run.engine, "on": run.hardware}
    parts = [f"{label} {value}" for label, value in description.items() if value]
    if report.model_kind is not None:
        parts.insert(1 if run.model else 0, MODEL_KIND_NAMES[report.model_kind])
    if run.initial_learning_rate is not None:
        parts.append(f"learning rate {run.initial_learning_rate:g}")
    lines += wrap(" · ".join(parts), "  ", "  ") if parts else []
    steps = report.rollouts.steps or report.mismatch.steps
    if not steps:
        return [*lines, "  no step is complete yet"]
    of_steps = f"{plural(len(steps), 'step')} ({steps[0]}" + (")" if len(steps) == 1 else f" to {steps[-1]})")
    rollouts, tokens = (
        int(sum(value for value in report.rollouts.of(each) if math.isfinite(value)))
        for each in ("num_rollouts", "num_tokens")
    )
    received = f", {plural(rollouts, 'rollout')}, {plural(tokens, 'token')}"
    if report.rollouts.steps and not report.rollouts.has_rollouts:
        received = " of scalars, no rollouts yet"
    lines.append(f"  {of_steps}{received}; newest data {moment(run.updated_at_us)}")
    missing = report.rollouts.incomplete or report.mismatch.incomplete
    if missing:
        newest = max(missing)
        text = "step {}: {} of {} shards".format(newest, *missing[newest])
        if len(missing) > 1:
            text += f", and {len(missing) - 1} earlier incomplete steps"
        lines += wrap(f"closed incomplete, numbers are of the rollouts that arrived: {text}", "    ", "  ! ")
    coverage = report.rollouts.coverage or report.mismatch.coverage
    if coverage:
        newest = max(coverage)
        lines += wrap(f"step {newest}: {coverage[newest]}", "    ", "  ")
    if report.ignored:
        lines += wrap(f"step {steps[-1]}: {report.ignored}", "    ", "  ")
    return lines


def _lengths(report: ReportData, paint: Paint) -> list[str]:
    curve = report.rollouts
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
        line = sparkline(values, _SPARKLINE_WIDTH).ljust(_SPARKLINE_WIDTH)
        shown_values = (finite[0], recent_median(values), min(finite), max(finite))
        rows.append([curve.label(measure, label), line, *map(number, shown_values)])
    if not rows:
        return []
    header = ["", f"steps {curve.steps[0]} to {curve.steps[-1]}", "first", "now", "least", "most"]
    title = section_title("Lengths (tokens the model generated), rewards, entropy", paint)
    return [title, *table(header, rows, left=(0, 1))]


def _alerts(report: ReportData, paint: Paint) -> list[str]:
    shown = report.standing_alerts
    is_open = [alert for alert in shown if alert.state in STANDING]
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


def _advice(report: ReportData, paint: Paint) -> list[str]:
    reading = report.advice
    if reading is None:
        return []
    advice = reading.advice
    lines = [section_title("Learning-rate advice", paint, advice.phase), f"  {_scale_in_words(reading)}"]
    lines += wrap(advice.reason, "  ", "  ") if advice.reason else []
    if advice.schedule is not None:
        lines.append(
            f"  surge at step {advice.schedule.surge_step}: × {advice.schedule.factor:g} every "
            f"{advice.schedule.decay_period} steps, not below {advice.schedule.floor:g}"
        )
    if reading.next_decay_step is not None:
        ahead = [f"{step} (to {scale:g})" for step, scale in _falls(advice, reading.next_decay_step)]
        lines.append(f"  falls at {', '.join(ahead)}" if ahead else f"  next fall at step {reading.next_decay_step}")
    if advice.stale:
        lines.append("  stale: newer steps are still being measured")
    if advice.want_weights_at_step is not None:
        lines.append(f"  requested: a checkpoint of step {advice.want_weights_at_step}, for a probe")
    return lines


def _falls(advice: Advice, first: int) -> list[tuple[int, float]]:
    """Return the next four steps, from the first on, at which the advised scale falls, with the new scale."""
    found = []
    scale = advice.advised_scale(first - 1)
    for step in range(first, first + 5_000):
        now = advice.advised_scale(step)
        if now < scale:
            found.append((step, now))
            scale = now
            if len(found) == 4:
                break
    return found

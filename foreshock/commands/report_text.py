"""The report as plain text, at most 100 columns wide: a section per question, the answer first in each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreshock.commands.diagnosis import RECENT_STEPS, Diagnosis, recent, spread
from foreshock.commands.records import AttributionRecord, Curve, LinkRecord
from foreshock.commands.text import STYLES, WIDTH, Paint, Style, bar, count, moment, number, sparkline, table, wrap
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.measures.estimators.reliability import effective_of_all, interval_warning
from foreshock.model_kind import MODEL_KIND_NAMES, UNDECLARED_NOTE
from foreshock.ranges import Verdict, required_range, verdict_of

__all__ = ["render"]

_CURVE_WIDTH = 48
# Narrower: a verdict and its range stand beside these curves.
_MISMATCH_WIDTH = 34
_TABLE_ROWS = 12
_COPIED = (
    "The difference is exactly 0 everywhere: the trainer's log-probs look like a copy of the engine's (bypass), so "
    "that this comparison can show no mismatch. Probe a step to see it."
)


def render(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    """The lines of the report."""
    sections = [
        _heading(diagnosis, paint),
        _mismatch(diagnosis, paint),
        _origin(diagnosis, paint),
        _buckets(diagnosis, paint),
        _lengths(diagnosis, paint),
        _alerts(diagnosis, paint),
        _advice(diagnosis, paint),
    ]
    lines = [line for section in sections if section for line in ["", *section]]
    return [*lines, "", f"Pages: {diagnosis.url}"]


def _title(text: str, paint: Paint, aside: str = "", style: Style | None = None) -> str:
    """A section's title with a rule, and a word at its right end."""
    rule = "─" * max(3, WIDTH - len(text) - len(aside) - (2 if aside else 1))
    return f"{paint(text, 'bold')} {paint(rule, 'dim')}" + (f" {paint(aside, style)}" if aside else "")


def _heading(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    run = diagnosis.run
    lines = [_title(f"Foreshock · {run.title}", paint, run.state, "critical" if run.state == "failed" else None)]
    described = {"model": run.model, "trainer": run.trainer, "engine": run.engine, "on": run.hardware}
    parts = [f"{label} {value}" for label, value in described.items() if value]
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
    return lines


def _mismatch(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    curve, verdict = diagnosis.mismatch, diagnosis.verdict
    title = f"Mismatch, {TRAINER_ROLLOUT}: per token, μ the engine's, π the trainer's"
    if not curve.known("k3_kl"):
        why = "  No step has both rollout_log_probs and trainer_log_probs: log both to see the mismatch."
        return [_title(title, paint), why]
    lines = [_title(title, paint, verdict, STYLES[verdict])]
    rows = []
    for item in diagnosis.verdicts:
        known, values = required_range(item.measure, diagnosis.model_kind), curve.of(item.measure)
        line = sparkline(values, _MISMATCH_WIDTH, logarithmic=item.measure == "k3_kl")
        now = f"{item.recent:.5f}" if item.measure == "token_mult_prob_error" else number(item.recent)
        rows.append([known.label, line.ljust(_MISMATCH_WIDTH), now, item.verdict, known.text])
    header = ["", f"steps {curve.steps[0]} to {curve.steps[-1]}", "now", "", "healthy"]
    lines += _paint_words(table(header, rows, left=(0, 1, 3, 4)), paint, column_of=3, rows=rows)
    if diagnosis.model_kind is None:
        lines += _note(UNDECLARED_NOTE, paint)
    newest = min(RECENT_STEPS, len(curve.steps))
    peak, at = max((value, step) for value, step in zip(curve.of("k3_kl"), curve.steps, strict=True) if value == value)
    lines += _note(
        f"now: median of the newest {newest} steps; k3_kl in log scale, at most {number(peak)} (step {at})", paint
    )
    lines += ["", *_mismatch_table(diagnosis, paint), *_shape(curve)]
    if _all_zero(curve):
        lines += wrap(_COPIED, "    ", "  ! ")
    return lines


def _mismatch_table(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    """Some steps in numbers: evenly spread, the worst among them."""
    curve = diagnosis.mismatch
    k3 = curve.of("k3_kl")
    chosen = set(spread(range(len(curve.steps)), _TABLE_ROWS - 1))
    chosen.add(max(range(len(k3)), key=lambda index: k3[index] if math.isfinite(k3[index]) else -math.inf))
    if diagnosis.step in curve.steps:
        chosen.add(curve.steps.index(diagnosis.step))
    header = ["step", "k3_kl", "95 % interval", "mean |Δp|", "E[exp |d|]", "F(2)", "ESS", "max |d|", "tokens", ""]
    rows, warnings = [], []
    for index in sorted(chosen):
        at = {name: curve.of(name)[index] for name in curve.values}
        missing = math.nan
        low, high = at.get("k3_kl_bootstrap_low", missing), at.get("k3_kl_bootstrap_high", missing)
        interval = f"{number(low, 2)} … {number(high, 2)}" if math.isfinite(low) and math.isfinite(high) else "–"
        if warning := interval_warning(at):
            interval += "!"
            warnings.append(f"step {curve.steps[index]}: {warning}")
        rows.append([
            str(curve.steps[index]),
            number(k3[index]),
            interval,
            number(at.get("rollout_probs_diff_mean", missing), 2),
            number(at.get("token_mult_prob_error", missing), 5),
            number(at.get("tail_2", missing), 2),
            number(at.get("ess_token", missing), 4),
            number(at.get("max_abs_d", missing), 3),
            count(int(tokens)) if math.isfinite(tokens := at.get("tokens", missing)) else "–",
            verdict_of("k3_kl", k3[index], diagnosis.model_kind),
        ])  # fmt: skip
    lines = _paint_words(table(header, rows, left=(9,)), paint, column_of=9, rows=rows)
    newest = {name: values[-1] for name, values in curve.values.items()}
    words = "intervals: bootstrap-t over prompt groups"
    if (groups := effective_of_all(newest)) != "–":
        words += f"; effective prompt groups of step {curve.steps[-1]}: {groups}"
    lines += _note(words, paint)
    for warning in warnings[-1:]:
        lines += wrap(warning, "    ", "  ! ")
    return lines


def _shape(curve: Curve) -> list[str]:
    """What the tails and the advantages say, as far as they were measured: medians of the newest steps."""
    reach = recent(curve.of("max_d"))
    known = (
        ("tail_asymmetry_ln2", "tail asymmetry at ln 2", "above 0: π lost what μ samples; below: π gained it"),
        ("pareto_k", "k̂ of π/μ", _pareto_words(recent(curve.of("pareto_k")), reach)),
        ("ess_seq_predicted", "ESS of sequences, exp(−2·KL·T)", "of the sample, were sequences weighted as a whole"),
        ("advantage_d_cov", "cov(advantage, d)", "above 0: π moved towards what was rewarded"),
        ("advantage_skew", "mean of A·(π/μ − 1)", "0: the mismatch does not know the reward"),
    )
    rows = [[label, number(recent(curve.of(name)), 2), words] for name, label, words in known if curve.known(name)]
    return ["", *table(["shape of it, now", "", ""], rows, left=(0, 2))] if rows else []


def _pareto_words(shape: float, reach: float) -> str:
    if reach < 1.0:
        return "no ratio reaches e: whatever it is, it harms no mean"
    limit = required_range("pareto_k").critical
    assert limit is not None
    if shape > limit:
        return f"above {limit}: means of ratios and ESS cannot be trusted"
    return f"means of ratios can be trusted up to {limit}"


def _all_zero(curve: Curve) -> bool:
    fractions = [value for value in curve.of("zero_fraction") if math.isfinite(value)]
    return bool(fractions) and min(fractions) == 1.0


def _origin(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    lines = [_title("Where it comes from", paint)]
    for attribution in diagnosis.attributions:
        lines += [*([""] if len(lines) > 1 else []), *_chain(attribution, paint)]
    if not diagnosis.attributions:
        lines += wrap(
            "No probed step. Announce checkpoints (`log_checkpoint`), start `foreshock worker`, then: "
            f"foreshock probe {diagnosis.run.id} STEP", "  ", "  ")  # fmt: skip
    left_out = len(diagnosis.probed_steps) - len(diagnosis.attributions)
    if left_out > 0:
        lines += _note(f"{left_out} more probed steps; see one with --step N", paint)
    for step, state, reason in diagnosis.unfinished_probes[:5]:
        lines += wrap(f"probe of step {step}: {state}{': ' + reason if reason else ''}", "    ", "  ! ")
    return lines


def _chain(attribution: AttributionRecord, paint: Paint) -> list[str]:
    lines = [
        f"  step {attribution.step}: {' → '.join(attribution.chain)}   "
        + paint(f"({count(attribution.rollouts)} rollouts, {count(attribution.tokens)} tokens)", "dim")
    ]
    rows = [_link_row(link) for link in attribution.links]
    whole = attribution.whole
    rows.append([whole.name + " (all)", *_moments(whole), _share(1.0 if math.isfinite(whole.share) else math.nan),
                 "", ""])  # fmt: skip
    header = ["link (π/μ)", "k3_kl", "mean d", "rms d", "max |d|", "share", "95 %", ""]
    lines += table(header, rows, left=(0, 7), indent="    ")
    main = max(attribution.links, key=lambda link: link.share if math.isfinite(link.share) else -math.inf)
    if math.isfinite(main.share) and main.share > 0:
        lines += wrap(f"most of it, {_percent(main.share)}, is {main.cause}", "      ", "    → ")
    elif whole.rms_d == 0:
        lines += wrap("there is no difference at all between the ends of the chain", "      ", "    → ")
    if any(_share(link.share).startswith("-") for link in attribution.links):
        lines += wrap("a negative share cancels a part of the others", "      ", "    → ")
    if attribution.floors:
        lines += _floors(attribution)
    if attribution.reference_links:
        lines += _reference(attribution)
    checks = f"cancellation Σ E[d_link²]/E[d²] = {number(attribution.cancellation)}; "
    checks += f"|Σ d_link − d| ≤ {number(attribution.telescoping_error, 2)} on every token"
    if attribution.stale:
        lines += wrap("scores or rollouts have arrived since; a new attribution is being computed", "      ", "    → ")
    return [*lines, *_note(checks, paint)]


def _floors(attribution: AttributionRecord) -> list[str]:
    """What part of a link is nothing but the batches that its two ends were computed in."""
    floors = ", ".join(
        f"{floor.scorer} k3 {number(floor.k3_kl)}, max |d| {number(floor.max_abs_d, 2)}" for floor in attribution.floors
    )
    words = f"noise floor, the same scorer in other batches: {floors}; half of that k3 is in each of its links"
    return wrap(words, "      ", "    → ")


def _reference(attribution: AttributionRecord) -> list[str]:
    """Which of engine and trainer is nearer to float32."""
    distances = ", ".join(f"{link.name.partition('/')[2]} {number(link.k3_kl)}" for link in attribution.reference_links)
    words = f"k3 of the same weights at float32 against {distances}"
    if attribution.nearer == "equal":
        words += ": engine and trainer are equally near to it"
    elif attribution.nearer is not None:
        words += f": nearer to it is {attribution.nearer}"
    return wrap(words, "      ", "    → ")


def _link_row(link: LinkRecord) -> list[str]:
    interval = ""
    if math.isfinite(link.share_low) and math.isfinite(link.share_high):
        interval = f"{_share(link.share_low)} … {_share(link.share_high)}"
    return [link.name, *_moments(link), _share(link.share), interval, bar(link.share, 10).rstrip()]


def _share(share: float) -> str:
    """Two decimals, never a negative zero."""
    return f"{round(share, 2) + 0.0:.2f}" if math.isfinite(share) else "–"


def _moments(link: LinkRecord) -> list[str]:
    return [number(link.k3_kl), number(link.mean_d, 2), number(link.rms_d, 2), number(link.max_abs_d, 2)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _buckets(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    title = _title(f"Which tokens: {TRAINER_ROLLOUT} by probability, step {diagnosis.step}", paint)
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
    """Bucket edges are half decades: 1e-4, 3.2e-4, 0.001, …"""
    if value >= 1e-3 or value == 0:
        return f"{value:.2g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


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
        rows.append([label, line, number(finite[0]), number(recent(values)), number(min(finite)), number(max(finite))])
    if not rows:
        return []
    header = ["", f"steps {curve.steps[0]} to {curve.steps[-1]}", "first", "now", "least", "most"]
    return [_title("Lengths (tokens the model generated), rewards, entropy", paint), *table(header, rows, left=(0, 1))]


def _alerts(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    shown = [alert for alert in diagnosis.alerts if alert.state != "retracted"]
    is_open = [alert for alert in shown if alert.state in ("open", "acknowledged")]
    aside = f"{len(is_open)} open" if is_open else "none open"
    gravest = "critical" if any(alert.severity == "critical" for alert in is_open) else "warning" if is_open else "good"
    lines = [_title("Alerts", paint, aside, "good" if gravest == "good" else STYLES[gravest])]
    for alert in shown:
        head = f"{alert.severity:<8}"
        about = f"step {alert.step}, {alert.rule}, {alert.state}"
        if math.isfinite(alert.value) and math.isfinite(alert.threshold):
            about += f" (value {number(alert.value)}, threshold {number(alert.threshold)})"
        lines.append(f"  {paint(head, STYLES.get(alert.severity))} {about}")
        lines += wrap(alert.why, " " * 8) if alert.why else []
        lines += wrap(alert.what_to_do, " " * 10, " " * 8 + "→ ") if alert.what_to_do else []
    return lines if shown else [*lines, "  nothing has fired"]


def _advice(diagnosis: Diagnosis, paint: Paint) -> list[str]:
    reading = diagnosis.advice
    if reading is None:
        return []
    advice = reading.advice
    told = "the trainer follows it" if advice.mode == "apply" else "shown only: the trainer is told 1.0"
    lines = [
        _title("Learning-rate advice", paint, advice.phase),
        f"  scale {reading.advised_scale:g}; mode {advice.mode} ({told}); revision {advice.revision}",
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
        lines.append(f"  please save the weights of step {advice.want_weights_at_step}, for a probe")
    return lines


def _boundaries(diagnosis: Diagnosis) -> list[tuple[int, float]]:
    """The next steps at which the advised scale falls, and what it falls to."""
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


def _note(text: str, paint: Paint) -> list[str]:
    return [paint(line, "dim") for line in wrap(text, "    ", "    ")]


def _paint_words(lines: list[str], paint: Paint, *, column_of: int, rows: Sequence[Sequence[str]]) -> list[str]:
    """Colour the verdicts of a table's rows: each is the last such word of its line."""
    painted = lines[:1]
    for line, row in zip(lines[1:], rows, strict=True):
        word: Verdict | str = row[column_of]
        before, found, after = line.rpartition(word) if row[column_of] == row[-1] else line.partition(f" {word} ")
        painted.append(before + paint(found, STYLES.get(word)) + after if word and found else line)
    return painted

"""The part of the report about replays of a step: the links of the mismatch."""

import math

from foreshock.api.attribution import AttributionRecord, LinkRecord, SideBranchRecord
from foreshock.commands.report_data import ReportData
from foreshock.commands.text import Paint, bar, count, note, number, section_title, table, wrap
from foreshock.interval_names import RANGE


def attribution_section(report: ReportData, paint: Paint) -> list[str]:
    """Return the lines on the attribution of probed steps and on unfinished probes."""
    lines = [section_title("Attribution: the links of the mismatch", paint)]
    for attribution in report.attributions:
        lines += [*([""] if len(lines) > 1 else []), *_chain(attribution, paint)]
    if not report.attributions:
        lines += wrap(
            "No probed step. Announce checkpoints (`log_checkpoint`), start `foreshock worker`, then: "
            f"foreshock probe {report.run.id} STEP", "  ", "  ")  # fmt: skip
    more = len(report.probed_steps) - len(report.attributions)
    if more > 0:
        lines += note(f"{more} more probed steps; see one with --step N", paint)
    for step, state, reason in report.unfinished_probes[:5]:
        lines += wrap(f"probe of step {step}: {state}{': ' + reason if reason else ''}", "    ", "  ! ")
    return lines


def _chain(attribution: AttributionRecord, paint: Paint) -> list[str]:
    lines = [
        f"  step {attribution.step}: {' → '.join(attribution.chain)}   "
        + paint(f"({count(attribution.rollouts)} rollouts, {count(attribution.tokens)} tokens)", "dim")
    ]
    exact = attribution.exact_kl()
    rows = [_link_row(link, exact.get(link.name, math.nan)) for link in attribution.links]
    whole = attribution.whole
    rows.append([whole.name + " (all)", *_moments(whole), _share(1.0 if math.isfinite(whole.share) else math.nan),
                 "", ""])  # fmt: skip
    header = ["link (π/μ)", "k3_kl", "mean d", "rms d", "max |d|", "share", "range", ""]
    lines += table(header, rows, left=(0, 7), indent="    ")
    if any(link.name in exact for link in attribution.links):
        lines += note("*: exact KL(μ‖π) over the whole vocabulary in place of k3, which is its sampled estimate", paint)
    for conclusion in attribution.conclusions:
        lines += wrap(conclusion.sentence, "      ", "    → ")
    if attribution.floors:
        lines += _floors(attribution)
    if attribution.side_branch is not None:
        lines += _reference(attribution.side_branch)
    checks = f"range: a {RANGE}, by {attribution.method}; "
    checks += f"cancellation Σ E[d_link²]/E[d²] = {number(attribution.cancellation)}; "
    checks += f"|Σ d_link − d| ≤ {number(attribution.telescoping_error, 2)} on every token"
    if attribution.stale:
        lines += wrap("scores or rollouts have arrived since; a new attribution is being computed", "      ", "    → ")
    return [*lines, *note(checks, paint)]


def _floors(attribution: AttributionRecord) -> list[str]:
    """Return the noise floors: the part of a link that is due to batch composition."""
    floors = ", ".join(
        f"{floor.scorer} k3 {number(floor.k3_kl)}, max |d| {number(floor.max_abs_d, 2)}" for floor in attribution.floors
    )
    words = f"noise floor, the same scorer in other batches: {floors}; half of that k3 is in each of its links"
    return wrap(words, "      ", "    → ")


def _reference(branch: SideBranchRecord) -> list[str]:
    """Return the distances of all scores from the reference."""
    distances = ", ".join(f"{link.name.partition('/')[2]} {number(link.k3_kl)}" for link in branch.links)
    return wrap(f"k3 of the same weights at float32 against {distances}", "      ", "    → ")


def _link_row(link: LinkRecord, exact: float) -> list[str]:
    interval = ""
    if math.isfinite(link.share_low) and math.isfinite(link.share_high):
        interval = f"{_share(link.share_low)} … {_share(link.share_high)}"
    k3, *others = _moments(link)
    if math.isfinite(exact):
        k3 = f"{number(exact)}*"
    return [link.name, k3, *others, _share(link.share), interval, bar(link.share, 10).rstrip()]


def _share(share: float) -> str:
    """Format a share with two decimals, without a negative zero."""
    return f"{round(share, 2) + 0.0:.2f}" if math.isfinite(share) else "–"


def _moments(link: LinkRecord) -> list[str]:
    return [number(link.k3_kl), number(link.mean_d, 2), number(link.rms_d, 2), number(link.max_abs_d, 2)]

"""Numbers, times and states as text."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime

from foreshock.model_kind import ModelKind
from foreshock.ranges import Verdict, verdict_of
from foreshock.severity import severity_rank
from foreshock_service.present.pages.figures.attribution import percent
from foreshock_service.present.pages.figures.specification import scientific
from foreshock_service.present.pages.step_models import Value
from foreshock_service.present.pages.view_models import Label, Moment, Tone

DASH = "–"

OUT_OF_DATE = (
    "Some steps were measured by another release, whose statistics this one cannot read. The curves are complete; "
    "buckets, corrections and theory need `foreshock remeasure`."
)

RUN_STATES: dict[str, Label] = {
    "running": Label("running", "good", live=True),
    "stale": Label("stale", "warning"),
    "finished": Label("finished"),
    "failed": Label("failed", "critical"),
}
PROBE_STATES: dict[str, Label] = {
    "queued": Label("queued"),
    "running": Label("running", "good", live=True),
    "done": Label("done", "good"),
    "failed": Label("failed", "critical"),
    "skipped": Label("skipped", "warning"),
}
PHASES: dict[str, str] = {
    "warming": "warming: no baseline yet",
    "watching": "watching: no surge so far",
    "decaying": "decaying after a surge",
    "floor": "on the floor",
    "held": "held by an operator",
}
MODES: dict[str, Label] = {
    "shadow": Label("shadow mode: the trainer gets 1.0"),
    "apply": Label("apply mode: sent to trainers that ask", "good"),
}
VERDICT_TONES: dict[Verdict, Tone] = {"healthy": "", "warning": "warning", "critical": "critical", "unknown": ""}
TONES: dict[str, Tone] = {"info": "", "warning": "warning", "critical": "critical"}


def label_of(state: str, known: dict[str, Label]) -> Label:
    """Return the badge of a state; an unknown state is shown as it is."""
    return known.get(state, Label(state))


def number(value: float | None) -> str:
    """Return a measure with three digits; a dash if it is missing or not estimable, "too large" for ±inf."""
    if value is None or math.isnan(value):
        return DASH
    if math.isinf(value):
        return "too large" if value > 0 else "−too large"
    text = scientific(value)
    return f"−{text[1:]}" if text.startswith("-") else text


def scale_in_words(scale: float) -> str:
    """Return a scale as a phrase: `a quarter of the learning rate`."""
    known = {1.0: "the full learning rate", 0.5: "half the learning rate", 0.25: "a quarter of the learning rate"}
    return known.get(scale, f"{scale:.3g} of the learning rate")


def share_in_words(share: float | None, low: float | None, high: float | None) -> str:
    """Return a share with its interval: `67 % (50 % to 80 %)`."""
    if share is None or not math.isfinite(share):
        return "not estimable"
    if low is None or high is None:
        return percent(share)
    return f"{percent(share)} ({percent(low)} to {percent(high)})"


def count(value: int | None) -> str:
    """Return an integer with its digits in groups of three."""
    return DASH if value is None else f"{value:,}".replace(",", "\u2009")


def moment(at_us: int | None) -> Moment | None:
    """Return a time in UTC microseconds as text; None for None."""
    if at_us is None:
        return None
    at = datetime.fromtimestamp(at_us // 1_000_000, tz=UTC)
    return Moment(at.strftime("%Y-%m-%dT%H:%M:%SZ"), at.strftime("%Y-%m-%d %H:%M UTC"))


def judged_value(measure: str, value: float | None, model_kind: ModelKind | None) -> Value:
    """Return a measure's value with the tone of the range that it lies in; without a range it has none."""
    if value is None or math.isnan(value):
        return Value(DASH)
    return Value(number(value), VERDICT_TONES[verdict_of(measure, value, model_kind)])


def alerts_label(open_alerts: Counter[str]) -> Label:
    """Return the number of open alerts, in the tone of the most severe. `open_alerts`: their number by severity."""
    if not open_alerts:
        return Label("none", "good")
    worst = min(open_alerts, key=severity_rank)
    return Label(f"{open_alerts.total()} open", TONES.get(worst, ""))

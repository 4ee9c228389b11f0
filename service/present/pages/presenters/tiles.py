"""The presenter of a run's first screen: a tile for each number that is read first, with its curve."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis.health import WINDOW_STEPS
from foreshock.diagnosis.run_verdict import RunVerdict
from foreshock.ranges import required_range
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.figures import Curve
from foreshock_service.present.pages.figures.sparkline import sparkline
from foreshock_service.present.pages.formatting import number
from foreshock_service.present.pages.presenters.attribution import origin_of
from foreshock_service.present.pages.presenters.curves import MOST_POINTS, curves_of, first_of, scalar_curves
from foreshock_service.present.pages.presenters.health import TONES, pooled_in_words
from foreshock_service.present.pages.presenters.signals import ENTROPIES, REWARDS
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.view_models import AdvicePanel, Tile
from foreshock_service.runs.health.service import pooled_mismatch
from foreshock_service.runs.measurements.service import MOST_INCOMPLETE

# Steps without a value may lie between those of the newest window.
_TAIL_STEPS = 4 * WINDOW_STEPS
_OF_ROLLOUTS = ("reward_mean", "response_length_mean", "entropy_mean")


def tiles_of(
    viewing: Viewing, run: Run, verdict: RunVerdict, advice: AdvicePanel | None, incomplete: int
) -> list[Tile]:
    """Return the tiles: mismatch and its origin, reward, length, entropy, learning rate, completeness of the data."""
    whole = curves_of(viewing, run.id, ("k3_kl", *_OF_ROLLOUTS), (TRAINER_ROLLOUT, STEP_ROW))
    rollouts = whole.get(STEP_ROW, {})
    newest = rollouts
    if run.last_step is not None and run.last_step >= MOST_POINTS:
        # The curves may be down-sampled: then not all of the newest steps are in them.
        tail_from = run.last_step - _TAIL_STEPS
        newest = curves_of(viewing, run.id, _OF_ROLLOUTS, (STEP_ROW,), tail_from).get(STEP_ROW, {})
    reported = (
        {}
        if all(rollouts.get(name) for name in _OF_ROLLOUTS)
        else scalar_curves(viewing, run.id, (*REWARDS, *ENTROPIES))
    )

    def tile(title: str, measure: str, unit: str, names: Sequence[str] = ()) -> Tile:
        curve, tail = rollouts.get(measure) or Curve((), ()), newest.get(measure) or Curve((), ())
        if not curve:
            curve = tail = first_of(reported, names)
        return _tile_of_curve(title, curve, tail, unit)

    reward = tile("Reward", "reward_mean", "", REWARDS)
    return [
        _mismatch(viewing, run, verdict, whole.get(TRAINER_ROLLOUT, {})),
        reward if verdict.fall is None else replace(reward, tone="critical"),
        tile("Response length", "response_length_mean", "tokens"),
        tile("Entropy", "entropy_mean", "nats", ENTROPIES),
        _origin(viewing, run.id),
        _learning_rate(advice),
        _data(run, incomplete),
    ]


def _mismatch(viewing: Viewing, run: Run, verdict: RunVerdict, curves: Mapping[str, Curve]) -> Tile:
    pooled = pooled_mismatch(viewing.session, [run.id]).get(run.id)
    known = required_range("k3_kl", run.model_kind)
    value = pooled_in_words(pooled)
    if pooled is None or value is None:
        return Tile("Mismatch, k3", "not measured", "log both log-probs to see it")
    mean, _, interval = value.partition(" (")
    interval = f"{interval.removesuffix(')')}; " if interval else ""
    path = sparkline(curves.get("k3_kl", Curve((), ())), logarithmic=True)
    return Tile("Mismatch, k3", mean, f"{interval}healthy {known.healthy}", TONES[verdict.mismatch], path)


def _tile_of_curve(title: str, curve: Curve, tail: Curve, unit: str) -> Tile:
    """Return the median of the newest steps, and the extremes of all steps, which down-sampling keeps."""
    points, newest = curve.points(), [value for _, value in tail.points()[-WINDOW_STEPS:]]
    if not newest:
        return Tile(title, "not logged", "")
    low, high = min(points, key=lambda each: each[1]), max(points, key=lambda each: each[1])
    note = f"{number(low[1])} (step {low[0]}) to {number(high[1])} (step {high[0]})" if low[0] != high[0] else ""
    return Tile(title, f"{number(statistics.median(newest))} {unit}".strip(), note, path=sparkline(curve))


def _origin(viewing: Viewing, run_id: str) -> Tile:
    value, note = origin_of(viewing, run_id)
    return Tile("Mismatch from", value, note, address="#figure-attribution")


def _learning_rate(advice: AdvicePanel | None) -> Tile:
    if advice is None:
        return Tile("Learning rate", "no advice yet", "it starts with the first closed step", address="#advice-title")
    note = "shadow: the trainer gets 1.0" if advice.shadow else "apply: sent to the trainer"
    return Tile(
        "Learning rate", f"× {advice.scale}", note, "" if advice.scale == "1" else "warning", address="#advice-title"
    )


def _data(run: Run, incomplete: int) -> Tile:
    newest = "no step yet" if run.last_step is None else f"newest step {run.last_step}"
    if incomplete:
        steps = "1 step" if incomplete == 1 else f"{incomplete} steps"
        more = " or more" if incomplete == MOST_INCOMPLETE else ""
        return Tile("Data", f"{steps}{more} incomplete", newest, "warning")
    return Tile("Data", "none" if run.last_step is None else "complete", newest)

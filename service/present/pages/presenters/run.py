"""The page of a run: its diagnosis as it is stored, and its first figures."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from foreshock import comparisons, interval_names, page_addresses, ranges
from foreshock.api.diagnosis import Diagnosis, Verdict
from foreshock.api.probes import ProbeRecord
from foreshock.api.runs import IncompleteStep
from foreshock.diagnosis.diagnose import REWARD_RULES
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages import figures, rendering
from foreshock_service.present.pages.figures.drawing import sparkline
from foreshock_service.present.pages.presenters import attribution, step
from foreshock_service.present.pages.presenters.advice import advice_panel, model_kind_in_words
from foreshock_service.present.pages.presenters.alerts import (
    alert_groups,
    changes_in_words,
    run_dashboard,
    standing_alerts,
)
from foreshock_service.present.pages.presenters.figures import RUN_PLOTS
from foreshock_service.present.pages.presenters.viewing import (
    ENTROPIES,
    MOST_POINTS,
    REWARDS,
    Viewing,
    curves_of,
    first_of,
    scalar_curves,
)
from foreshock_service.present.pages.view_models import (
    AdvicePanel,
    Plot,
    ProbeRow,
    RunPage,
    Tile,
    Tone,
    VerdictPanel,
)
from foreshock_service.replay.probes import jobs, policies
from foreshock_service.replay.probes.service import list_probes
from foreshock_service.runs import events, measurements, runs
from foreshock_service.runs.attempts import attempts_of_run
from foreshock_service.runs.measurements import POOLED_STEPS, PooledMeasure, pooled_mismatch
from foreshock_service.runs.steps import (
    MOST_LISTED,
    incomplete_steps,
    missing_shards_of,
    shards_in_words,
    statistics_steps,
)
from foreshock_service.watch.diagnosis import diagnosis_of_run

TONES: dict[Verdict, Tone] = {"unknown": "", "healthy": "good", "warning": "warning", "critical": "critical"}


def pooled_in_words(pooled: PooledMeasure | None) -> str | None:
    """Return a pooled mean with its range; None if there is no mean."""
    if pooled is None:
        return None
    if pooled.high != pooled.high:
        return rendering.number(pooled.mean)
    ends = interval_names.range_in_words(pooled.mean, pooled.low, pooled.high, rendering.number)
    return f"{rendering.number(pooled.mean)} ({ends})"


# Steps without a value may lie between those of the newest window.
_TAIL_STEPS = 4 * POOLED_STEPS
_OF_ROLLOUTS = ("reward_mean", "response_length_mean", "entropy_mean")


def tiles_of(viewing: Viewing, run: Run, found: Diagnosis, advice: AdvicePanel | None, incomplete: int) -> list[Tile]:
    """Return the tiles: mismatch and its origin, reward, length, entropy, learning rate, completeness of the data."""
    whole = curves_of(viewing, run.id, ("k3_kl", *_OF_ROLLOUTS), (comparisons.TRAINER_ROLLOUT, comparisons.STEP_ROW))
    rollouts = whole.get(comparisons.STEP_ROW, {})
    newest = rollouts
    if run.last_step is not None and run.last_step >= MOST_POINTS:
        # The curves may be down-sampled: then not all of the newest steps are in them.
        tail_from = run.last_step - _TAIL_STEPS
        newest = curves_of(viewing, run.id, _OF_ROLLOUTS, (comparisons.STEP_ROW,), tail_from).get(
            comparisons.STEP_ROW, {}
        )
    reported = (
        {}
        if all(rollouts.get(name) for name in _OF_ROLLOUTS)
        else scalar_curves(viewing, run.id, (*REWARDS, *ENTROPIES))
    )

    def tile(title: str, measure: str, unit: str, names: Sequence[str] = ()) -> Tile:
        curve, tail = rollouts.get(measure) or figures.Curve((), ()), newest.get(measure) or figures.Curve((), ())
        if not curve:
            curve = tail = first_of(reported, names)
        return _tile_of_curve(title, curve, tail, unit)

    reward = tile("Reward", "reward_mean", "", REWARDS)
    fallen = any(each.is_open and each.rule in REWARD_RULES for each in found.events)
    return [
        _mismatch(viewing, run, whole.get(comparisons.TRAINER_ROLLOUT, {})),
        replace(reward, tone=TONES[found.verdict]) if fallen else reward,
        tile("Response length", "response_length_mean", "tokens"),
        tile("Entropy", "entropy_mean", "nats", ENTROPIES),
        _origin(viewing, run.id),
        _learning_rate(advice),
        _data(run, found, incomplete),
    ]


def _mismatch(viewing: Viewing, run: Run, curves: Mapping[str, figures.Curve]) -> Tile:
    pooled = pooled_mismatch(viewing.session, [run.id]).get(run.id)
    known = ranges.required_range("k3_kl", run.model_kind)
    value = pooled_in_words(pooled)
    if pooled is None or value is None:
        return Tile("Mismatch, k3", "not measured", "log both log-probs to see it")
    tone = rendering.VERDICT_TONES[known.verdict(pooled.mean)]
    mean, _, interval = value.partition(" (")
    interval = f"{interval.removesuffix(')')}; " if interval else ""
    path = sparkline(curves.get("k3_kl", figures.Curve((), ())), logarithmic=True)
    return Tile("Mismatch, k3", mean, f"{interval}healthy {known.healthy}", tone, path)


def _tile_of_curve(title: str, curve: figures.Curve, tail: figures.Curve, unit: str) -> Tile:
    """Return the median of the newest steps, and the extremes of all steps, which down-sampling keeps."""
    points, newest = curve.points(), [value for _, value in tail.points()[-POOLED_STEPS:]]
    if not newest:
        return Tile(title, "not logged", "")
    low, high = min(points, key=lambda each: each[1]), max(points, key=lambda each: each[1])
    note = (
        f"{rendering.number(low[1])} (step {low[0]}) to {rendering.number(high[1])} (step {high[0]})"
        if low[0] != high[0]
        else ""
    )
    return Tile(title, f"{rendering.number(statistics.median(newest))} {unit}".strip(), note, path=sparkline(curve))


def _origin(viewing: Viewing, run_id: str) -> Tile:
    value, note = attribution.origin_of(viewing, run_id)
    return Tile("Mismatch from", value, note, address="#figure-attribution")


def _learning_rate(advice: AdvicePanel | None) -> Tile:
    if advice is None:
        return Tile("Learning rate", "no advice yet", "it starts with the first closed step", address="#advice-title")
    note = "shadow: the trainer gets 1.0" if advice.shadow else "apply: sent to the trainer"
    return Tile(
        "Learning rate", f"× {advice.scale}", note, "" if advice.scale == "1" else "warning", address="#advice-title"
    )


def _data(run: Run, found: Diagnosis, incomplete: int) -> Tile:
    waiting = next((each.sentence for each in found.missing if " is waiting for " in each.sentence), None)
    if waiting is not None:
        return Tile("Data", "waiting for shards", waiting, "warning")
    newest = "no step yet" if run.last_step is None else f"newest step {run.last_step}"
    if incomplete:
        steps = "1 step" if incomplete == 1 else f"{incomplete} steps"
        more = " or more" if incomplete == MOST_LISTED else ""
        return Tile("Data", f"{steps}{more} incomplete", newest, "warning")
    return Tile("Data", "none" if run.last_step is None else "complete", newest)


MOST_PROBES = 20
UNFINISHED = frozenset({jobs.JobState.QUEUED, jobs.JobState.RUNNING})


def run_page(viewing: Viewing, run_id: str) -> RunPage:
    """Return the page of a run. Raises RunNotFound or RunDeleted."""
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    address = page_addresses.run_page_path(run.project, run.key)
    alerts, found = standing_alerts(viewing, run_id), diagnosis_of_run(viewing.session, run_id)
    advice, incomplete = advice_panel(viewing, run), incomplete_steps(viewing.session, run_id)
    probes = list_probes(viewing.session, viewing.principal, run_id, None, None, MOST_PROBES).items
    return RunPage(
        id=run.id,
        forms_address=f"/runs/{run.id}",
        name=run.name or run.key,
        project=run.project,
        state=rendering.label_of(run.state, rendering.RUN_STATES),
        # A finished run still changes while workers replay it.
        live=run.state == "running" or any(probe.state in UNFINISHED for probe in probes),
        model=run.model,
        model_kind=model_kind_in_words(run),
        trainer=run.trainer,
        engine=run.engine,
        hardware=run.hardware,
        initial_learning_rate=None
        if run.initial_learning_rate is None
        else rendering.number(run.initial_learning_rate),
        attempt=_newest_attempt(viewing, run),
        last_step=run.last_step,
        last_step_address=f"{address}/steps/{run.last_step}",
        started=rendering.moment(run.created_at_us),
        incomplete=_incomplete(viewing, run_id, incomplete),
        coverage=_coverage(viewing, run_id),
        changes=changes_in_words(viewing, run_id),
        out_of_date=rendering.OUT_OF_DATE if measurements.is_run_out_of_date(viewing.session, run_id) else None,
        verdict=VerdictPanel(found.headline, TONES[found.verdict], found.parts()),
        grafana_address=run_dashboard(viewing.context.settings, run.id),
        rules_address=f"{address}/rules",
        tiles=tiles_of(viewing, run, found, advice, len(incomplete)),
        lint=step.lint_of_run(viewing, run_id, run.last_step, address),
        advice=advice,
        alerts=alert_groups(run_id, address, alerts),
        figures=[
            Plot(name, plot.title, f"/pages/runs/{run.id}/figures/{name}.json", plot.wide, over_steps=plot.over_steps)
            for name, plot in RUN_PLOTS.items()
        ],
        axes_address=f"/pages/runs/{run.id}/axes.json",
        steps_address=f"{address}/steps/",
        probes=[_probe(address, probe) for probe in probes],
        probe_policy=policies.policy_in_words(viewing.session, viewing.principal, run_id),
    )


def _incomplete(viewing: Viewing, run_id: str, found: Sequence[IncompleteStep]) -> str | None:
    """Return what the steps that closed without some shards lack; None if there are none."""
    if not found:
        return None
    newest = found[0]
    key = events.StepKey(run_id, newest.attempt, newest.step)
    absent = missing_shards_of(viewing.session, key, newest.expected_shards)
    text = f"Step {newest.step} closed with {shards_in_words(newest.shards, newest.expected_shards, absent)}"
    others = f", {len(found) - 1} earlier steps lack shards too" if len(found) > 1 else ""
    return f"{text}{others}. Each rank sends one shard; numbers are of the rollouts that arrived."


def _coverage(viewing: Viewing, run_id: str) -> str | None:
    """Return what the measures of the newest step rest on of which shards were sent as statistics; None without one."""
    found = statistics_steps(viewing.session, run_id, attempts_of_run(viewing.session, run_id))
    return f"Step {found[0].step}: {found[0].text}." if found else None


def _newest_attempt(viewing: Viewing, run: Run) -> int | None:
    attempts = attempts_of_run(viewing.session, run.id)
    return attempts[-1].attempt if attempts else None


def _probe(address: str, probe: ProbeRecord) -> ProbeRow:
    workers = {job.worker for job in probe.jobs if job.worker}
    return ProbeRow(
        step=probe.step,
        step_address=f"{address}/steps/{probe.step}",
        state=rendering.label_of(probe.state, rendering.PROBE_STATES),
        kind=probe.kind,
        scorers=[f"{asked.scorer} {asked.variant}".strip() for asked in probe.scorers],
        worker=", ".join(sorted(workers)) or None,
        reason=probe.reason,
    )

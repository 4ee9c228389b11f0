"""The presenter of a run: its facts, advice, alerts, figures and probes."""

from __future__ import annotations

from collections.abc import Sequence

from foreshock.model_kind import MODEL_KIND_NAMES
from foreshock.page_addresses import run_page_path
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.formatting import OUT_OF_DATE, PROBE_STATES, RUN_STATES, label_of, moment, number
from foreshock_service.present.pages.presenters.advice import advice_panel
from foreshock_service.present.pages.presenters.alerts import alert_groups, standing_alert, standing_alerts
from foreshock_service.present.pages.presenters.changes import changes_in_words
from foreshock_service.present.pages.presenters.figures import RUN_PLOTS
from foreshock_service.present.pages.presenters.grafana import run_dashboard
from foreshock_service.present.pages.presenters.health import TONES, verdict_of_run
from foreshock_service.present.pages.presenters.lint import lint_of_run
from foreshock_service.present.pages.presenters.risk import risk_strip
from foreshock_service.present.pages.presenters.tiles import tiles_of
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.view_models import Plot, ProbeRow, RunPage, Verdict
from foreshock_service.replay.policies.service import policy_in_words
from foreshock_service.replay.probes.jobs import JobState
from foreshock_service.replay.probes.schemas import ProbeRead
from foreshock_service.replay.probes.service import list_probes
from foreshock_service.runs.attempts.service import attempts_of_run
from foreshock_service.runs.coverage.service import statistics_steps
from foreshock_service.runs.measurements.service import incomplete_steps, is_run_out_of_date
from foreshock_service.runs.runs.service import get_run
from foreshock_service.runs.shard_schemas import IncompleteStep
from foreshock_service.runs.step_key import StepKey
from foreshock_service.runs.steps.service import missing_shards_of, shards_in_words

MOST_PROBES = 20
UNFINISHED = frozenset({JobState.QUEUED, JobState.RUNNING})


def run_page(viewing: Viewing, run_id: str) -> RunPage:
    """Return the page of a run. Raises RunNotFound or RunDeleted."""
    run = get_run(viewing.session, viewing.principal, run_id)
    address = run_page_path(run.project, run.key)
    alerts = standing_alerts(viewing, run_id)
    verdict = verdict_of_run(viewing, run, [standing_alert(each) for each in alerts])
    advice, incomplete = advice_panel(viewing, run), incomplete_steps(viewing.session, run_id)
    probes = list_probes(viewing.session, viewing.principal, run_id, None, None, MOST_PROBES).items
    return RunPage(
        id=run.id,
        forms_address=f"/runs/{run.id}",
        name=run.name or run.key,
        project=run.project,
        state=label_of(run.state, RUN_STATES),
        # A finished run still changes while workers replay it.
        live=run.state == "running" or any(probe.state in UNFINISHED for probe in probes),
        model=run.model,
        model_kind=model_kind_in_words(run),
        trainer=run.trainer,
        engine=run.engine,
        hardware=run.hardware,
        initial_learning_rate=None if run.initial_learning_rate is None else number(run.initial_learning_rate),
        attempt=_newest_attempt(viewing, run),
        last_step=run.last_step,
        last_step_address=f"{address}/steps/{run.last_step}",
        started=moment(run.created_at_us),
        incomplete=_incomplete(viewing, run_id, incomplete),
        coverage=_coverage(viewing, run_id),
        changes=changes_in_words(viewing, run_id),
        out_of_date=OUT_OF_DATE if is_run_out_of_date(viewing.session, run_id) else None,
        verdict=Verdict(verdict.headline, TONES[verdict.verdict], verdict.sentences),
        risk=risk_strip(viewing, run),
        grafana_address=run_dashboard(viewing.context.settings, run.id),
        rules_address=f"{address}/rules",
        tiles=tiles_of(viewing, run, verdict, advice, len(incomplete)),
        lint=lint_of_run(viewing, run_id, run.last_step, address),
        advice=advice,
        alerts=alert_groups(run_id, address, alerts),
        figures=[
            Plot(name, plot.title, f"/pages/runs/{run.id}/figures/{name}.json", plot.wide, over_steps=plot.over_steps)
            for name, plot in RUN_PLOTS.items()
        ],
        axes_address=f"/pages/runs/{run.id}/axes.json",
        steps_address=f"{address}/steps/",
        probes=[_probe(address, probe) for probe in probes],
        probe_policy=policy_in_words(viewing.session, viewing.principal, run_id),
    )


def model_kind_in_words(run: Run) -> str:
    """Return the kind of the run's model and where it comes from."""
    if run.model_kind is None:
        return "unknown, judged as a dense model"
    source = "declared" if run.model_kind_source == "declared" else "from a checkpoint"
    return f"{MODEL_KIND_NAMES[run.model_kind]} ({source})"


def _incomplete(viewing: Viewing, run_id: str, found: Sequence[IncompleteStep]) -> str | None:
    """Return what the steps that closed without some shards lack; None if there are none."""
    if not found:
        return None
    newest = found[0]
    key = StepKey(run_id, newest.attempt, newest.step)
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


def _probe(address: str, probe: ProbeRead) -> ProbeRow:
    workers = {job.worker for job in probe.jobs if job.worker}
    return ProbeRow(
        step=probe.step,
        step_address=f"{address}/steps/{probe.step}",
        state=label_of(probe.state, PROBE_STATES),
        kind=probe.kind,
        scorers=[f"{asked.scorer} {asked.variant}".strip() for asked in probe.scorers],
        worker=", ".join(sorted(workers)) or None,
        reason=probe.reason,
    )

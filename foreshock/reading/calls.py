"""Every reading call of the API, except those about one step: its path, its parameters and what its answer becomes.

`Reader` and `AsyncReader` have a method for each function here and in `step_calls`, with the same parameters. `run` is
a run's id or key, `comparison` is `target/behaviour`, such as "trainer/rollout"; `attempt=None` means the active steps
of all attempts.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from foreshock.api.diagnosis import Diagnosis, Verdict, diagnosis_of
from foreshock.api.probes import HardwareRecord, ProbePolicyRecord, ProbeRecord
from foreshock.api.records import parse
from foreshock.api.runs import (
    AttemptRecord,
    ChangeRecord,
    CheckpointRecord,
    DeletionRecord,
    FindingRecord,
    MeasureRecord,
    RetentionRecord,
    RunRecord,
    StepRecord,
    WeightsRecord,
    run_record,
)
from foreshock.api.service import AuditRecord, ServiceRecord
from foreshock.api.steps import RunLintRecord
from foreshock.api.watch import (
    AdviceRecord,
    AlertOfRun,
    AlertRecord,
    DecisionRecord,
    RulesRecord,
    RunRulesRecord,
    advice_record,
)
from foreshock.model_kind import ModelKind
from foreshock.reading import columns
from foreshock.reading.columns import Measurements, Scalars
from foreshock.reading.request import (
    ITEMS_ON_A_PAGE,
    Listing,
    Query,
    Request,
    get,
    listing,
    probe_path,
    run_path,
    several,
)

__all__ = [
    "advice",
    "alerts",
    "alerts_of_runs",
    "attempts",
    "audit",
    "changed_alerts",
    "changes",
    "checkpoints",
    "decisions",
    "default_rules",
    "deletions",
    "diagnosis",
    "export_measurements",
    "export_scalars",
    "findings",
    "findings_of_runs",
    "hardware",
    "lint_of_run",
    "measurements",
    "measures",
    "probe",
    "probe_policy",
    "probes",
    "probes_of_runs",
    "retention",
    "rules",
    "run",
    "runs",
    "scalars",
    "service",
    "steps",
    "weights",
]


def runs(
    *,
    key: str | None = None,
    model: str | None = None,
    model_kind: ModelKind | None = None,
    states: Sequence[str] = (),
    search: str | None = None,
    verdict: Verdict | None = None,
) -> Listing[RunRecord]:
    """Yield the runs that the key may see, newest first; `search` is a part of the name or key.

    `verdict`: only the runs whose diagnosis has it.
    """
    query = [("key", key), ("model", model), ("model_kind", model_kind), *several("state", states), ("search", search)]
    query.append(("verdict", verdict))
    return listing(run_record, "/v1/runs", query)


def run(run: str) -> Request[RunRecord]:
    """Return a run. Raises RunNotFound."""
    return get(run_record, run_path(run))


def attempts(run: str) -> Listing[AttemptRecord]:
    """Yield the attempts of a run, in order."""
    return listing(AttemptRecord, run_path(run, "attempts"))


def steps(run: str, *, attempt: int | None = None) -> Listing[StepRecord]:
    """Yield the steps of a run, in order."""
    return listing(StepRecord, run_path(run, "steps"), [("attempt", attempt)])


def changes(run: str) -> Listing[ChangeRecord]:
    """Yield the changes of a run by step: announced ones, and those of the setup."""
    return listing(ChangeRecord, run_path(run, "changes"))


def weights(run: str) -> Listing[WeightsRecord]:
    """Yield what each engine held after each weight sync, as the notary found it, by step and engine."""
    return listing(WeightsRecord, run_path(run, "weights"))


def checkpoints(run: str) -> Listing[CheckpointRecord]:
    """Yield the announced weights of a run, by step."""
    return listing(CheckpointRecord, run_path(run, "checkpoints"))


def deletions(run: str) -> Listing[DeletionRecord]:
    """Yield the deletions of rollouts of a run, newest first, and how far they are. The key needs `admin`."""
    return listing(DeletionRecord, run_path(run, "deletions"))


def retention(run: str) -> Request[RetentionRecord]:
    """Return the rules by which a run keeps its tokens: its own, else those of the service's settings."""
    return get(RetentionRecord, run_path(run, "retention"))


ExportFormat = Literal["csv", "parquet"]


def measures() -> Listing[MeasureRecord]:
    """Yield the registered measures."""
    return Listing("/v1/measures", (), partial(parse, MeasureRecord), in_project=False, is_paged=False)


def measurements(
    run: str,
    *,
    measures: Sequence[str] = (),
    comparisons: Sequence[str] = (),
    from_step: int = 0,
    to_step: int | None = None,
    attempt: int | None = None,
    max_points: int | None = None,
) -> Request[Measurements]:
    """Return curves over the steps `from_step` to `to_step` (included); no measures, no comparisons: all of them.

    `max_points` is the largest number of steps of a comparison; the extremes of each measure are among them.
    """
    query = _curves({"measure": measures, "comparison": comparisons}, from_step, to_step, attempt, max_points)
    return get(columns.measurements, run_path(run, "measurements"), query)


def export_measurements(
    run: str,
    format: ExportFormat,  # noqa: A002
    *,
    measures: Sequence[str] = (),
    comparisons: Sequence[str] = (),
    from_step: int = 0,
    to_step: int | None = None,
    attempt: int | None = None,
    max_points: int | None = None,
) -> Request[bytes]:
    """Return the bytes of a CSV or Parquet file of what `measurements` returns."""
    query = _curves({"measure": measures, "comparison": comparisons}, from_step, to_step, attempt, max_points)
    return _export(run_path(run, "measurements"), format, query)


def scalars(
    run: str,
    *,
    names: Sequence[str] = (),
    sources: Sequence[str] = (),
    from_step: int = 0,
    to_step: int | None = None,
    attempt: int | None = None,
    max_points: int | None = None,
) -> Request[Scalars]:
    """Return scalars over the steps `from_step` to `to_step` (included); no names, no sources: all of them.

    `max_points` is the largest number of steps of a curve, which is one name of one source; its extremes are kept.
    """
    query = _curves({"name": names, "source": sources}, from_step, to_step, attempt, max_points)
    return get(columns.scalars, run_path(run, "scalars"), query)


def export_scalars(
    run: str,
    format: ExportFormat,  # noqa: A002
    *,
    names: Sequence[str] = (),
    sources: Sequence[str] = (),
    from_step: int = 0,
    to_step: int | None = None,
    attempt: int | None = None,
    max_points: int | None = None,
) -> Request[bytes]:
    """Return the bytes of a CSV or Parquet file of what `scalars` returns."""
    query = _curves({"name": names, "source": sources}, from_step, to_step, attempt, max_points)
    return _export(run_path(run, "scalars"), format, query)


def _curves(
    names: Mapping[str, Sequence[str]],
    from_step: int,
    to_step: int | None,
    attempt: int | None,
    max_points: int | None,
) -> Query:
    chosen = [pair for name, values in names.items() for pair in several(name, values)]
    limits: Query = [("from_step", from_step), ("to_step", to_step), ("attempt", attempt), ("max_points", max_points)]
    return [*chosen, *limits]


def _export(path: str, format_name: ExportFormat, query: Query) -> Request[bytes]:
    return Request(path, [*query, ("format", format_name)], bytes, accept="*/*")


def diagnosis(run: str) -> Request[Diagnosis]:
    """Return the diagnosis of a run: verdict, headline, what happened, causes, what to do, what is missing."""
    return get(diagnosis_of, run_path(run, "diagnosis"))


def lint_of_run(run: str, *, attempt: int | None = None) -> Request[RunLintRecord]:
    """Return the warnings of a run's closed steps, with the first and the newest step of each."""
    return get(RunLintRecord, run_path(run, "lint"), [("attempt", attempt)])


def findings(run: str, *, sources: Sequence[str] = (), severities: Sequence[str] = ()) -> Listing[FindingRecord]:
    """Yield what is concluded from a run's data, the last changed first; `sources` are "attribution" and "lint"."""
    query = [*several("source", sources), *several("severity", severities)]
    return listing(FindingRecord, run_path(run, "findings"), query)


def findings_of_runs(
    *, sources: Sequence[str] = (), severities: Sequence[str] = (), names: Sequence[str] = ()
) -> Listing[FindingRecord]:
    """Yield the findings of all runs that the key may see, the last changed first."""
    query = [*several("source", sources), *several("severity", severities), *several("name", names)]
    return listing(FindingRecord, "/v1/findings", query)


def alerts(run: str, *, states: Sequence[str] = ()) -> Listing[AlertRecord]:
    """Yield the alerts of a run, newest step first; no states: in any."""
    return listing(AlertRecord, run_path(run, "alerts"), several("state", states))


def changed_alerts(
    run: str, *, states: Sequence[str] = (), wait_seconds: float = 20.0
) -> Request[tuple[AlertRecord, ...]]:
    """Return the newest 500 alerts of a run once one has changed since this reader's call before, or after the time.

    The first call does not wait. `wait_seconds` is at most 30.
    """
    query = [*several("state", states), ("limit", ITEMS_ON_A_PAGE)]

    def read(page: Mapping[str, Any]) -> tuple[AlertRecord, ...]:
        return tuple(parse(AlertRecord, item) for item in page["items"])

    return get(read, run_path(run, "alerts"), query, wait_seconds=wait_seconds)


def alerts_of_runs(
    *, states: Sequence[str] = (), severities: Sequence[str] = (), rules: Sequence[str] = ()
) -> Listing[AlertOfRun]:
    """Yield the alerts of all runs that the key may see, the last changed first."""
    query = [*several("state", states), *several("severity", severities), *several("rule", rules)]
    return listing(AlertOfRun, "/v1/alerts", query)


def advice(run: str, *, step: int | None = None, wait_seconds: float = 0.0) -> Request[AdviceRecord]:
    """Return the learning-rate advice for a step (None: the newest). Trainers use `AdviceFeed`, which never waits.

    With `wait_seconds`, at most 30, it is returned once a decision or an alert has changed it since this reader's call
    before with the same step, or after that time.
    """
    return get(advice_record, run_path(run, "lr-advice"), [("step", step)], wait_seconds=wait_seconds)


def decisions(run: str) -> Listing[DecisionRecord]:
    """Yield the log of decisions on the learning rate, oldest first."""
    return listing(DecisionRecord, run_path(run, "lr-advice", "decisions"))


def rules(run: str, *, step: int | None = None) -> Request[RunRulesRecord]:
    """Return the rules that hold for a run at a step (None: the last one), and all versions of its changes."""
    return get(RunRulesRecord, run_path(run, "rules"), [("step", step)])


def default_rules(*, model_kind: ModelKind | None = None) -> Request[RulesRecord]:
    """Return the default rules of a kind of model (None: unknown), each with the source of its threshold."""
    return get(RulesRecord, "/v1/rules", [("model_kind", model_kind)], in_project=False)


def probes(run: str, *, step: int | None = None) -> Listing[ProbeRecord]:
    """Yield the probes of a run, newest first."""
    return listing(ProbeRecord, run_path(run, "probes"), [("step", step)])


def probes_of_runs(*, kind: str | None = None) -> Listing[ProbeRecord]:
    """Yield the probes of all runs that the key may see, newest first; `kind` is "exact" or "doctor", for example."""
    return listing(ProbeRecord, "/v1/probes", [("kind", kind)])


def probe(probe: str) -> Request[ProbeRecord]:
    """Return a probe by its id."""
    return get(ProbeRecord, probe_path(probe), in_project=False)


def probe_policy(run: str) -> Request[ProbePolicyRecord]:
    """Return which steps of a run are probed automatically, and what its probes have cost."""
    return get(ProbePolicyRecord, run_path(run, "probe-policy"))


def hardware() -> Request[HardwareRecord]:
    """Return the workers, the one seen last first, and the accelerators with their jobs."""
    return get(HardwareRecord, "/v1/hardware", in_project=False)


def service() -> Request[ServiceRecord]:
    """Return the state of the service: the process that answers, its queues, its jobs. The key needs `admin`."""
    return get(ServiceRecord, "/v1/service", in_project=False)


def audit(*, actor: str | None = None, action: str | None = None, run_id: str | None = None) -> Listing[AuditRecord]:
    """Yield who changed advice, alerts, runs and keys, newest first. The key needs `admin`.

    `action` is such as "alert.acknowledge"; the reader's project does not bound the list, that of its key does.
    """
    query = [("actor", actor), ("action", action), ("run", run_id)]
    return listing(AuditRecord, "/v1/audit", query, in_project=False)

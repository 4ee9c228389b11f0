"""Every reading call of the API: its path, its parameters and what its answer becomes.

`Reader` and `AsyncReader` have a method for each function here, with the same parameters. `run` is a run's id or key,
`comparison` is `target/behaviour`, such as "trainer/rollout"; `attempt=None` means the active steps of all attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.layer_divergence import LayerComparison
from foreshock.model_kind import ModelKind
from foreshock.reading import columns
from foreshock.reading.attribution_records import AttributionRecord, attribution_record
from foreshock.reading.columns import Buckets, Measurements, Scalars, TokenIds, Tokens
from foreshock.reading.parsing import parse
from foreshock.reading.request import ITEMS_ON_A_PAGE, Listing, Query, Request, json_request, run_path
from foreshock.reading.run_records import (
    AttemptRecord,
    ChangeRecord,
    CheckpointRecord,
    HealthRecord,
    MeasureRecord,
    RunRecord,
    StepRecord,
    run_record,
)
from foreshock.reading.step_records import (
    CorrectionsRecord,
    ExactStepRecord,
    ExactTokensRecord,
    LintRecord,
    RunLintRecord,
    TheoryRecord,
)
from foreshock.reading.watch_records import (
    AdviceRecord,
    AlertRecord,
    DecisionRecord,
    ProbeRecord,
    RiskRecord,
    advice_record,
)
from foreshock.routing import RoutingComparison

Record = TypeVar("Record")
ExportFormat = Literal["csv", "parquet"]
Condition = Literal["probability", "position", "turn", "length", "entropy", "lag"]


def runs(
    *,
    key: str | None = None,
    model: str | None = None,
    model_kind: ModelKind | None = None,
    states: Sequence[str] = (),
    search: str | None = None,
) -> Listing[RunRecord]:
    """Yield the runs that the key may see, newest first; `search` is a part of the name or key."""
    query = [("key", key), ("model", model), ("model_kind", model_kind), *_several("state", states), ("search", search)]
    return Listing("/v1/runs", query, run_record)


def run(run: str) -> Request[RunRecord]:
    """Return a run. Raises RunNotFound."""
    return json_request(run_path(run), [], run_record)


def attempts(run: str) -> Listing[AttemptRecord]:
    """Yield the attempts of a run, in order."""
    return Listing(run_path(run, "attempts"), [], partial(parse, AttemptRecord))


def steps(run: str, *, attempt: int | None = None) -> Listing[StepRecord]:
    """Yield the steps of a run, in order."""
    return Listing(run_path(run, "steps"), [("attempt", attempt)], partial(parse, StepRecord))


def changes(run: str) -> Listing[ChangeRecord]:
    """Yield the changes of a run by step: announced ones, and those of the setup."""
    return Listing(run_path(run, "changes"), [], partial(parse, ChangeRecord))


def checkpoints(run: str) -> Listing[CheckpointRecord]:
    """Yield the announced weights of a run, by step."""
    return Listing(run_path(run, "checkpoints"), [], partial(parse, CheckpointRecord))


def measures() -> Listing[MeasureRecord]:
    """Yield the registered measures."""
    read = partial(parse, MeasureRecord)
    return Listing("/v1/measures", [], read, in_project=False, is_paged=False)


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
    query = _measurements_query(measures, comparisons, from_step, to_step, attempt, max_points)
    return json_request(run_path(run, "measurements"), query, columns.measurements)


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
    query = _measurements_query(measures, comparisons, from_step, to_step, attempt, max_points)
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
    query = _scalars_query(names, sources, from_step, to_step, attempt, max_points)
    return json_request(run_path(run, "scalars"), query, columns.scalars)


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
    query = _scalars_query(names, sources, from_step, to_step, attempt, max_points)
    return _export(run_path(run, "scalars"), format, query)


def buckets(
    run: str,
    step: int,
    *,
    by: Condition = "probability",
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[Buckets]:
    """Return the mismatch of a step in buckets of a condition of its tokens."""
    query: Query = [("by", by), ("comparison", comparison), ("attempt", attempt)]
    return json_request(run_path(run, "steps", step, "buckets"), query, columns.buckets)


def token_ids(
    run: str,
    step: int,
    *,
    limit: int | None = None,
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[TokenIds]:
    """Return the mismatch of a step by token id; `limit` is the largest number of ids."""
    query: Query = [("by", "token_id"), ("limit", limit), ("comparison", comparison), ("attempt", attempt)]
    return json_request(run_path(run, "steps", step, "buckets"), query, columns.token_ids)


def worst_tokens(
    run: str, step: int, *, count: int = 20, comparison: str = TRAINER_ROLLOUT, attempt: int | None = None
) -> Request[Tokens]:
    """Return the tokens of a step with the largest |d|, at most 1,000."""
    query: Query = [("worst", count), ("comparison", comparison), ("attempt", attempt)]
    return json_request(run_path(run, "steps", step, "tokens"), query, columns.tokens)


def rollout_tokens(
    run: str,
    step: int,
    sample_id: str,
    *,
    from_position: int = 0,
    to_position: int | None = None,
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[Tokens]:
    """Return one rollout token by token, from one position of the response to another (included)."""
    part = [("from_position", from_position), ("to_position", to_position)]
    query: Query = [("sample_id", sample_id), *part, ("comparison", comparison), ("attempt", attempt)]
    return json_request(run_path(run, "steps", step, "tokens"), query, columns.tokens)


def health(run: str, *, steps: int | None = None, model_kind: ModelKind | None = None) -> Request[HealthRecord]:
    """Return the verdict on the newest `steps` measured steps, judged as `model_kind` (None: the run's)."""
    query: Query = [("steps", steps), ("model_kind", model_kind)]
    return json_request(run_path(run, "health"), query, partial(parse, HealthRecord))


def risk(run: str) -> Request[RiskRecord]:
    """Return the ordinal risk of a run, with its reasons."""
    return json_request(run_path(run, "risk"), [], partial(parse, RiskRecord))


def attribution(run: str, step: int, *, attempt: int | None = None) -> Request[AttributionRecord]:
    """Return the causes of a step's mismatch. Raises Rejected (404) if no scores of the step are published."""
    read = partial(attribution_record, step)
    return json_request(run_path(run, "steps", step, "attribution"), [("attempt", attempt)], read)


def lint(run: str, step: int, *, attempt: int | None = None) -> Request[LintRecord]:
    """Return the lint of a step's log-probs: named warnings with evidence, and the checks that were made."""
    return _of_step(run, step, "lint", [("attempt", attempt)], LintRecord)


def lint_of_run(run: str, *, attempt: int | None = None) -> Request[RunLintRecord]:
    """Return the warnings of a run's closed steps, with the first and the newest step of each."""
    return json_request(run_path(run, "lint"), [("attempt", attempt)], partial(parse, RunLintRecord))


def corrections(
    run: str,
    step: int,
    *,
    names: Sequence[str] = (),
    thresholds: Sequence[str] = (),
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[CorrectionsRecord]:
    """Return the effect of corrections on a step: kept tokens, variance, distortion. No names: all of them.

    `thresholds`, such as "2" or "0.5_5", are of the one correction that is named; none: the usual ones.
    """
    chosen = [*_several("correction", names), *_several("threshold", thresholds)]
    query: Query = [*chosen, ("comparison", comparison), ("attempt", attempt)]
    return _of_step(run, step, "corrections", query, CorrectionsRecord)


def theory(
    run: str,
    step: int,
    *,
    delta_max: float | None = None,
    gradient_bound: float | None = None,
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[TheoryRecord]:
    """Return bounds on the bias of a step's gradient, and the cost of its noise at η and η/2.

    `delta_max` is the largest exact total variation, `gradient_bound` an upper bound of ‖∇log π‖ of one token.
    """
    bounds: Query = [("delta_max", delta_max), ("gradient_bound", gradient_bound)]
    return _of_step(run, step, "theory", [*bounds, ("comparison", comparison), ("attempt", attempt)], TheoryRecord)


def exact(run: str, step: int, *, attempt: int | None = None) -> Request[ExactStepRecord]:
    """Return the exact divergences of a step's pairs. Raises Rejected (404) if none are published."""
    return _of_step(run, step, "exact", [("attempt", attempt)], ExactStepRecord)


def routing(run: str, step: int, *, attempt: int | None = None) -> Request[tuple[RoutingComparison, ...]]:
    """Return the newest comparisons of routed experts of a step. Raises Rejected (404) if none are published."""
    path = run_path(run, "steps", step, "routing")
    return json_request(
        path, [("attempt", attempt)], lambda value: tuple(map(RoutingComparison.from_dict, value["items"]))
    )


def layers(
    run: str, step: int, *, attempt: int | None = None, pair: str | None = None
) -> Request[tuple[LayerComparison, ...]]:
    """Return the newest comparison by layer of each pair of scorers of a step, or of one `compared/reference`.

    Raises Rejected (404) if none are published.
    """

    def read(value: Any) -> tuple[LayerComparison, ...]:
        return tuple(LayerComparison.from_dict({**item, "step": value["step"]}) for item in value["items"])

    return json_request(run_path(run, "steps", step, "layers"), [("attempt", attempt), ("pair", pair)], read)


def exact_tokens(
    run: str,
    step: int,
    *,
    pair: str | None = None,
    count: int = 20,
    sample_id: str | None = None,
    from_position: int = 0,
    to_position: int | None = None,
    attempt: int | None = None,
) -> Request[ExactTokensRecord]:
    """Return the tokens with the largest KL(μ‖π), at most 1,000, or those of the rollout `sample_id`.

    Of a rollout, from one position of the response to another (included). `pair` is one that `exact` returned; None:
    the service's default.
    """
    part = [("from_position", from_position), ("to_position", to_position)]
    query: Query = [("pair", pair), ("worst", count), ("sample_id", sample_id), *part, ("attempt", attempt)]
    read = partial(parse, ExactTokensRecord)
    return json_request(run_path(run, "steps", step, "exact", "tokens"), query, read)


def changed_alerts(
    run: str, *, states: Sequence[str] = (), wait_seconds: float = 20.0
) -> Request[tuple[AlertRecord, ...]]:
    """Return the newest 500 alerts of a run once one has changed since this reader's call before, or after the time.

    The first call does not wait. `wait_seconds` is at most 30.
    """
    query: Query = [*_several("state", states), ("limit", ITEMS_ON_A_PAGE)]
    return json_request(
        run_path(run, "alerts"),
        query,
        lambda page: tuple(parse(AlertRecord, item) for item in page["items"]),
        wait_seconds=wait_seconds,
    )


def alerts(run: str, *, states: Sequence[str] = ()) -> Listing[AlertRecord]:
    """Yield the alerts of a run, newest step first; no states: in any."""
    return Listing(run_path(run, "alerts"), _several("state", states), partial(parse, AlertRecord))


def alerts_of_runs(
    *, states: Sequence[str] = (), severities: Sequence[str] = (), rules: Sequence[str] = ()
) -> Listing[AlertRecord]:
    """Yield the alerts of all runs that the key may see, the last changed first."""
    query = [*_several("state", states), *_several("severity", severities), *_several("rule", rules)]
    return Listing("/v1/alerts", query, partial(parse, AlertRecord))


def advice(run: str, *, step: int | None = None, wait_seconds: float = 0.0) -> Request[AdviceRecord]:
    """Return the learning-rate advice for a step (None: the newest). Trainers use `AdviceFeed`, which never waits.

    With `wait_seconds`, at most 30, it is returned once a decision or an alert has changed it since this reader's call
    before with the same step, or after that time.
    """
    return json_request(run_path(run, "lr-advice"), [("step", step)], advice_record, wait_seconds=wait_seconds)


def decisions(run: str) -> Listing[DecisionRecord]:
    """Yield the log of decisions on the learning rate, oldest first."""
    return Listing(run_path(run, "lr-advice", "decisions"), [], partial(parse, DecisionRecord))


def probes(run: str, *, step: int | None = None) -> Listing[ProbeRecord]:
    """Yield the probes of a run, newest first."""
    return Listing(run_path(run, "probes"), [("step", step)], partial(parse, ProbeRecord))


def probes_of_runs(*, kind: str | None = None) -> Listing[ProbeRecord]:
    """Yield the probes of all runs that the key may see, newest first; `kind` is "exact" or "weights"."""
    return Listing("/v1/probes", [("kind", kind)], partial(parse, ProbeRecord))


def probe(probe: str) -> Request[ProbeRecord]:
    """Return a probe by its id."""
    return json_request(f"/v1/probes/{probe}", [], partial(parse, ProbeRecord), in_project=False)


def _of_step(run: str, step: int, name: str, query: Query, kind: type[Record]) -> Request[Record]:
    return json_request(run_path(run, "steps", step, name), query, partial(parse, kind))


def _several(name: str, values: Sequence[str]) -> list[tuple[str, str | int | float | None]]:
    if isinstance(values, str):
        raise TypeError(f"{name} takes several names, such as [{values!r}], got {values!r}")
    return [(name, value) for value in values]


def _measurements_query(
    measures: Sequence[str],
    comparisons: Sequence[str],
    from_step: int,
    to_step: int | None,
    attempt: int | None,
    max_points: int | None,
) -> Query:
    names = [*_several("measure", measures), *_several("comparison", comparisons)]
    return [*names, *_range(from_step, to_step, attempt, max_points)]


def _scalars_query(
    names: Sequence[str],
    sources: Sequence[str],
    from_step: int,
    to_step: int | None,
    attempt: int | None,
    max_points: int | None,
) -> Query:
    chosen = [*_several("name", names), *_several("source", sources)]
    return [*chosen, *_range(from_step, to_step, attempt, max_points)]


def _range(from_step: int, to_step: int | None, attempt: int | None, max_points: int | None) -> Query:
    return [("from_step", from_step), ("to_step", to_step), ("attempt", attempt), ("max_points", max_points)]


def _export(path: str, format_name: ExportFormat, query: Query) -> Request[bytes]:
    return Request(path, [*query, ("format", format_name)], bytes, accept="*/*")

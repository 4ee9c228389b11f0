"""The calls that read what the service concludes: findings, lint, corrections, theory, health, risk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.model_kind import ModelKind
from foreshock.reading.finding_records import FindingRecord
from foreshock.reading.parsing import parse
from foreshock.reading.request import Listing, Query, Request, json_request, of_step, run_path, several
from foreshock.reading.run_records import HealthRecord
from foreshock.reading.step_records import CorrectionsRecord, LintRecord, RunLintRecord, TheoryRecord
from foreshock.reading.watch_records import RiskRecord

__all__ = ["corrections", "findings", "findings_of_runs", "health", "lint", "lint_of_run", "risk", "theory"]


def health(run: str, *, steps: int | None = None, model_kind: ModelKind | None = None) -> Request[HealthRecord]:
    """Return the verdict on the newest `steps` measured steps, judged as `model_kind` (None: the run's)."""
    query: Query = [("steps", steps), ("model_kind", model_kind)]
    return json_request(run_path(run, "health"), query, partial(parse, HealthRecord))


def risk(run: str) -> Request[RiskRecord]:
    """Return the ordinal risk of a run, with its reasons."""
    return json_request(run_path(run, "risk"), [], partial(parse, RiskRecord))


def lint(run: str, step: int, *, attempt: int | None = None) -> Request[LintRecord]:
    """Return the lint of a step's log-probs: named warnings with evidence, and the checks that were made."""
    return of_step(run, step, "lint", [("attempt", attempt)], LintRecord)


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
    chosen = [*several("correction", names), *several("threshold", thresholds)]
    query: Query = [*chosen, ("comparison", comparison), ("attempt", attempt)]
    return of_step(run, step, "corrections", query, CorrectionsRecord)


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
    return of_step(run, step, "theory", [*bounds, ("comparison", comparison), ("attempt", attempt)], TheoryRecord)


def findings(run: str, *, sources: Sequence[str] = (), severities: Sequence[str] = ()) -> Listing[FindingRecord]:
    """Yield what is concluded from a run's data, the last changed first; `sources` are "attribution" and "lint"."""
    query = [*several("source", sources), *several("severity", severities)]
    return Listing(run_path(run, "findings"), query, partial(parse, FindingRecord))


def findings_of_runs(
    *, sources: Sequence[str] = (), severities: Sequence[str] = (), names: Sequence[str] = ()
) -> Listing[FindingRecord]:
    """Yield the findings of all runs that the key may see, the last changed first."""
    query = [*several("source", sources), *several("severity", severities), *several("name", names)]
    return Listing("/v1/findings", query, partial(parse, FindingRecord))

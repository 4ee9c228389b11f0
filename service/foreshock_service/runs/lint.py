"""Lint of stored rollouts: evidence for each shard, a verdict for each closed step, a summary for each run."""

import json
import math
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Text, cast, func, or_, select
from sqlalchemy.orm import Session

from foreshock import json_values
from foreshock.api import steps as records
from foreshock.api.records import parse, to_json
from foreshock.diagnosis.findings import PastFinding
from foreshock.diagnosis.history import NEWEST_STEPS as WINDOW_STEPS
from foreshock.diagnosis.quantities import ENTROPY_KEY, quantities_of
from foreshock.lint import CHECKS
from foreshock.lint.checks import sampling
from foreshock.lint.checks.pairs import IDENTICAL
from foreshock.lint.judging import Finding
from foreshock.lint.report import outcome_records
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock.severity import severity_rank
from foreshock_service.platform import parameters, problem, security
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables import Run, ShardLint, StepLint
from foreshock_service.runs import attempts, due, events, findings, judging, runs, scalars, steps

router = parameters.api_router(prefix="/v1/runs/{run}", tags=["lint"])

_STEP_KEY = ("run_id", "attempt", "step")
_SURPRISAL = "raw_log_probs"
_SHOWN = ("title", "seen", "remedy")
_SUMS = ("surprisal_tokens", "surprisal", "entropy", "surprisal_variance", "largest_surprisal")
# Evidence of a shard is read in about 0.3 ms.
_MOST_WINDOW_SHARDS = 256


class LintNotFound(problem.ProblemError, status=404, problem_type="lint-not-found"):
    """Missing lint: the step has no shard."""


@router.get("/lint")
def read_run_lint(asked: runs.RunToRead, attempt: parameters.ActiveOrAttempt = None) -> records.RunLintRecord:
    """Return the warnings of the run's closed steps, with the first and the newest step of each."""
    with asked.reading() as session:
        return read_run(session, asked.principal, asked.run, attempt)


@router.get("/steps/{step}/lint")
def read_step_lint(asked: attempts.StepOfRequest) -> records.LintRecord:
    """Return the lint of this step's log-probs: named warnings with evidence, and the checks that were not made."""
    with asked.reading() as session:
        found = read_step(session, asked.principal, asked.run, asked.step, asked.attempt)
        return steps.with_shards(session, asked.key(session), found)


def store_evidence(session: Session, key: events.StepKey, shard: int, part: judging.LintPart) -> None:
    """Store the evidence of a shard, or overwrite that of a shard which was measured again."""
    row = {
        **key._asdict(),
        "shard": shard,
        "statistics_version": STATISTICS_VERSION,
        "evidence": part.evidence,
        "examples": part.examples,
    }
    upsert(session, ShardLint, [row], (*_STEP_KEY, "shard"))


def _without_titles(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without the titles of its checks: they are half of its bytes, and the same at each step."""
    return report | {"checks": [{name: each[name] for name in ("name", "state", "why")} for each in report["checks"]]}


def evidence_of_step(session: Session, key: events.StepKey) -> list[judging.LintPart]:
    """Return the evidence of a step's shards, in order."""
    query = select(ShardLint.evidence, ShardLint.examples).filter_by(**key._asdict()).order_by(ShardLint.shard)
    return [judging.LintPart(*row) for row in session.execute(query)]


def store_verdict(session: Session, key: events.StepKey, verdict: judging.StepVerdict, *, again: bool) -> None:
    """Store the verdict on a step, or overwrite an older one; `again`: the step may have one. The run is locked."""
    warnings = verdict.report.warnings
    worst = warnings[0].severity if warnings else "info"
    row = {
        **key._asdict(),
        "severity": None if worst == "info" else worst,
        "warnings": {warning.name: warning.severity for warning in warnings},
        "report": _without_titles(to_json(verdict.report)),
        **{name: getattr(verdict, name) for name in _SUMS},
        "sources": verdict.sources or None,
        "prompts": verdict.prompts or None,
    }
    upsert(session, StepLint, [row], _STEP_KEY)
    if again:
        due.mark(session, key.run_id, source="lint")
    elif warnings:
        at = (None, 1, key.step, key.step)
        new = [findings.Finding(each.name, each.severity, each.title, each.seen, each.remedy, *at) for each in warnings]
        findings.add_step(session, key, "lint", new)


def findings_of_run(session: Session, run_id: str) -> list[findings.Finding]:
    """Return the warnings of the run's active steps, each with the evidence of the newest step that has it."""
    found = []
    for name, warned in _warned_steps(session, run_id, None, infos=True).items():
        stored = session.get(StepLint, tuple(attempts.resolve_step(session, run_id, warned.newest_step, None)))
        # If a verdict has changed since the steps were read, the findings are read again.
        warnings = [] if stored is None else stored.report["warnings"]
        newest = next(({key: each[key] for key in _SHOWN} for each in warnings if each["name"] == name), None)
        if newest is not None:
            found.append(findings.Finding(name, sentence=newest.pop("seen"), **newest, **warned._asdict()))
    return found


def checked_steps(session: Session, run_id: str, first: int) -> int:
    """Return the number of active steps from `first` on that were checked."""
    active = attempts.active_rows(session, run_id, StepLint, first)
    return session.scalar(select(func.count()).where(StepLint.run_id == run_id, active)) or 0


def faulty_steps(session: Session, run_id: str, first: int, last: int) -> set[int]:
    """Return the active steps from `first` to `last` with a critical finding: their measures are of wrong data."""
    active = attempts.active_rows(session, run_id, StepLint, first, last)
    query = select(StepLint.step).where(StepLint.run_id == run_id, active, StepLint.severity == "critical")
    return set(session.scalars(query))


def rewards_by_source(
    session: Session, run_id: str, *ranges: tuple[int, int]
) -> dict[int, dict[str, tuple[int, float]]]:
    """Return step → data source → number and sum of its rewards, of the active steps in some ranges of steps."""
    within = or_(*(StepLint.step.between(first, last) for first, last in ranges))
    active = attempts.active_rows(session, run_id, StepLint, min(first for first, _ in ranges))
    query = select(StepLint.step, StepLint.sources).where(StepLint.run_id == run_id, active, within)
    rows = session.execute(query.order_by(StepLint.step))
    return {step: {name: (count, total) for name, (count, total) in found.items()} for step, found in rows if found}


def prompts_by_step(session: Session, run_id: str, first: int) -> dict[int, list[int]]:
    """Return the least hashes of the prompts of the active steps from `first` on that have some."""
    active = attempts.active_rows(session, run_id, StepLint, first)
    query = select(StepLint.step, StepLint.prompts).where(StepLint.run_id == run_id, active)
    return {step: found for step, found in session.execute(query.order_by(StepLint.step)) if found}


def fault_of_log_probs(session: Session, run_id: str, first: int, last: int) -> str:
    """Return why the log-probs of the active steps from `first` to `last` show no mismatch, by the newest finding.

    Empty if none is proven: a mismatch that is only large for the entropy is one.
    """
    active = attempts.active_rows(session, run_id, StepLint, first, last)
    query = select(StepLint.report).where(StepLint.run_id == run_id, active, StepLint.severity.is_not(None))
    for report in session.scalars(query.order_by(StepLint.step.desc())):
        for found in report["warnings"]:
            check = CHECKS.get(found["name"])
            is_fault = found["severity"] == "critical" and check is not None and check.explains
            if is_fault or found["title"] == IDENTICAL.title:
                title: str = found["title"]
                return title
    return ""


def read_step(
    session: Session, principal: security.Principal, run_id: str, step: int, attempt: int | None
) -> records.LintRecord:
    """Return the verdict on a step; if it is open, on the shards that have arrived. Raise LintNotFound."""
    run = runs.get_run(session, principal, run_id)
    key = attempts.resolve_step(session, run_id, step, attempt)
    # Judged again: the stored verdict uses no scalars, which may arrive later, and no model kind, which may change.
    entropy = _logged_entropy(session, run, key)
    verdict = judging.judge_step(step, key.attempt, evidence_of_step(session, key), entropy, run.model_kind)
    if verdict is not None:
        report = verdict.report
    elif (stored := session.get(StepLint, tuple(key))) is not None:
        titles = {name: check.title for name, check in CHECKS.items()}
        checks = [{"title": titles.get(each["name"], each["name"]), **each} for each in stored.report["checks"]]
        report = parse(records.LintRecord, stored.report | {"checks": checks})
    else:
        raise LintNotFound(
            f"step {step} of attempt {key.attempt} was not checked: no shard of it has evidence of the lint"
        )
    return replace(report, coverage=steps.coverage_of_step(session, key, report.rollouts))


def read_run(
    session: Session, principal: security.Principal, run_id: str, attempt: int | None
) -> records.RunLintRecord:
    """Return the lint of a run, over the active steps or over one attempt."""
    run = runs.get_run(session, principal, run_id)
    checked, clean, sums = _run_sums(session, *_chosen(session, run_id, attempt))
    warnings = [
        records.RunWarningRecord(name=name, title=CHECKS[name].title if name in CHECKS else name, **warned._asdict())
        for name, warned in _warned_steps(session, run_id, attempt).items()
    ]
    warnings.sort(key=lambda each: (severity_rank(each.severity), -each.newest_step, each.name))
    # The steps are independent parts of one martingale.
    whole, check = outcome_records(CHECKS[_SURPRISAL], sampling.check_surprisal(sums)) if checked else (None, None)
    is_known = any(warning.name == _SURPRISAL for warning in warnings)
    if whole is not None and not is_known:
        is_known = _is_declared(session, *_chosen(session, run_id, attempt))
    return records.RunLintRecord(
        checked_steps=checked,
        clean_steps=clean,
        warnings=tuple(warnings),
        window=_window(session, run, attempt, known={warning.name for warning in warnings}),
        whole_run=None if is_known else whole,
        whole_run_check=check,
    )


def _window(session: Session, run: Run, attempt: int | None, known: set[str]) -> tuple[records.LintWarningRecord, ...]:
    """Return the findings of the newest steps together, except those in `known`, which single steps have."""
    checked = select(StepLint.run_id, StepLint.attempt, StepLint.step).where(*_chosen(session, run.id, attempt))
    newest = session.execute(checked.order_by(StepLint.step.desc(), StepLint.attempt.desc()).limit(WINDOW_STEPS))
    keys = [events.StepKey(*row) for row in newest][::-1]
    shards = [shard for key in keys for shard in evidence_of_step(session, key)]
    if not shards or len(shards) > _MOST_WINDOW_SHARDS:
        return ()
    logged = [value for key in keys if (value := _logged_entropy(session, run, key)) is not None]
    found = judging.judge_window(shards, sum(logged) / len(logged) if logged else None, run.model_kind)
    return tuple(warning for warning in found if warning.name not in known)


def _logged_entropy(session: Session, run: Run, key: events.StepKey) -> float | None:
    """Return the trainer's entropy of a step in nats, under a well-known name or the run's own; None without any.

    Only positive values count: some trainers log the entropy's term of the loss under the same name.
    """
    positive = {name: value for name, value in scalars.scalars_of_step(session, key).items() if value > 0.0}
    return quantities_of(positive, run.scalar_names or {}).get(ENTROPY_KEY)


class _Warned(NamedTuple):
    severity: records.LintSeverity
    steps: int
    first_step: int
    newest_step: int


def _warned_steps(session: Session, run_id: str, attempt: int | None, *, infos: bool = False) -> dict[str, _Warned]:
    """Return each warning's steps among the active ones or those of one attempt; `infos`: with infos."""
    # Steps mostly have the same warnings, so that few groups are read.
    text = cast(StepLint.warnings, Text)
    query = select(text, func.count(), func.min(StepLint.step), func.max(StepLint.step)).group_by(text)
    query = query.where(*_chosen(session, run_id, attempt))
    if not infos:
        query = query.where(StepLint.severity.is_not(None))
    found: dict[str, _Warned] = {}
    for warnings, *numbers in session.execute(query):
        for name, severity in json.loads(warnings).items():
            if infos or severity != "info":
                new = _Warned(severity, *numbers)
                old = found.get(name, new._replace(steps=0))
                found[name] = _Warned(
                    min(old.severity, new.severity, key=severity_rank),
                    old.steps + new.steps,
                    min(old.first_step, new.first_step),
                    max(old.newest_step, new.newest_step),
                )
    return found


def found_together(session: Session, run_id: str, first: int, newest: int) -> PastFinding | None:
    """Return the finding of the surprisal test over the active steps `first` to `newest` together; None if clean."""
    chosen = StepLint.run_id == run_id, attempts.active_rows(session, run_id, StepLint, first, newest)
    _, _, sums = _run_sums(session, *chosen)
    check, found = CHECKS[_SURPRISAL], sampling.check_surprisal(sums)
    if not isinstance(found, Finding) or _is_declared(session, *chosen):
        return None
    return PastFinding(
        "lint", check.name, found.severity, check.title, found.seen, check.remedy, sums.clusters, first, newest
    )


def _is_declared(session: Session, *chosen: ColumnElement[bool]) -> bool:
    """Return whether the newest chosen step declares that the logged μ sampled it: `entropy` is in doubt then."""
    report = session.scalar(select(StepLint.report).where(*chosen).order_by(StepLint.step.desc()).limit(1)) or {}
    of_checks = {each["name"]: each["why"] for each in report.get("checks", ())}
    return str(of_checks.get(_SURPRISAL, "")).startswith(sampling.BY_DECLARATION)


def _run_sums(session: Session, *chosen: ColumnElement[bool]) -> tuple[int, int, sampling.SurprisalSums]:
    """Return (checked steps, clean steps, sums) of the chosen steps."""
    excess = StepLint.surprisal - StepLint.entropy
    query = select(
        func.count(),
        func.count().filter(StepLint.severity.is_(None)),
        func.count().filter(StepLint.surprisal_tokens > 0),
        func.coalesce(func.sum(StepLint.surprisal_tokens), 0),
        func.sum(StepLint.surprisal),
        func.sum(StepLint.entropy),
        func.sum(StepLint.surprisal_variance),
        func.max(StepLint.largest_surprisal),
        func.sum(excess * excess),
    ).where(*chosen)
    steps, clean, tested, tokens, *sums = session.execute(query).one()
    surprisal, entropy, variance, largest, square_excess = map(json_values.number_or_nan, sums)
    z = (surprisal - entropy) / math.sqrt(square_excess) if square_excess > 0 else math.nan
    found = sampling.SurprisalSums(int(tokens), surprisal, entropy, variance, largest, int(tested), z, "steps")
    return int(steps), int(clean), found


def _chosen(session: Session, run_id: str, attempt: int | None) -> tuple[ColumnElement[bool], ...]:
    return StepLint.run_id == run_id, attempts.rows_of_steps(session, run_id, attempt, StepLint)

"""Verify from outside what must hold after the kills, with the senders' journals, the files and another service."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from sqlalchemy import select

from benchmarks.faults.senders import RunSender
from benchmarks.faults.served import Served
from benchmarks.faults.workload import Item, RunPlan
from benchmarks.forking import environment, run_forked
from benchmarks.running_service import wait_until
from foreshock.diagnosis.rule import CLIENT_LOSSES, INCOMPLETE_STEP, STALE_RUN
from foreshock.digests import digest_of_bytes
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock_service.platform.database.engine import table_of
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import (
    Attribution,
    DueMark,
    ProbeJob,
    Score,
    ScoreFile,
    Shard,
    Step,
    StoredFinding,
)
from foreshock_service.watch.detection.states import newest_state
from tests.service.runs.step_rows import comparable

_SETTLE_SECONDS = 60.0
# Age at which the service under test regards the file of a killed request as an orphan, and interval of its sweeps.
ORPHAN_GRACE_SECONDS = 4.0
_ORPHAN_PATIENCE_SECONDS = 120.0
# Rules that depend on when messages arrive and not on the data.
_OF_ARRIVAL = frozenset({STALE_RUN, CLIENT_LOSSES})
# How often a diagnosis was stored: after a kill, parts of what follows from a step may be worked out one by one.
_OF_WORK = {"diagnosis": ("revision",)}
_UNSTABLE = re.compile(r"(_us|_at|^id|_id|^job|^probe|^lease|^run|^worker|^version|duration|seconds)")
# Exact for every run; the advice of a run is exact only if a single sender's order determines it.
_EXACT = (
    "steps", "shards", "shard_statistics", "shard_lint", "measurements", "measurement_statistics", "step_lint",
    "scalars",
)  # fmt: skip


@dataclass(slots=True)
class Findings:
    """Counts over the verified runs; `problems` names each violation."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def problem(self, kind: str, text: str) -> None:
        """Count a violation."""
        self.counts[kind] += 1
        self.problems.append(f"{kind}: {text}")


@dataclass(slots=True)
class Totals:
    """Kills by point, and the findings."""

    kills: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    runs: int = 0
    decoder_kills: int = 0

    @property
    def done(self) -> int:
        """Return the number of kills of the service."""
        return sum(self.kills.values())


def is_settled(database: Database, run_id: str) -> bool:
    """Return whether every step of the run is closed, no attribution is stale, and the run is advanced."""
    with database.read() as session:
        steps = session.scalars(select(Step).where(Step.run_id == run_id)).all()
        stale = session.scalars(select(Attribution.stale).where(Attribution.run_id == run_id)).all()
        due = session.scalars(select(DueMark.id).where(DueMark.run_id == run_id)).all()
    closed = all(step.closed_at_us is not None and step.folded_shards == step.received_shards for step in steps)
    return closed and not any(stale) and not due


def verify_run(
    findings: Findings, served: Served, files: Callable[[], Path], sender: RunSender, clean_service: Served
) -> None:
    """Send a run also to a service without kills; compare it with its journal, its `files` and that service's run."""
    clean, before = RunSender(clean_service.url, sender.plan, canonical=True), len(findings.problems)
    clean.run()
    with served.database() as database, clean_service.database() as clean_database:
        for each, run_id in ((database, sender.run_id), (clean_database, clean.run_id)):
            # After a crash, the sweeper settles the run.
            if not wait_until(partial(is_settled, each, run_id), _SETTLE_SECONDS):
                findings.problem("not_closed", f"{sender.plan.key}: steps stay open or attributions stale")
        _check_run(findings, database, files(), sender, clean, clean_database)
        _check_answers(findings, sender, served.url, clean, clean_service.url)
    for text in findings.problems[before:]:
        print(f"  {text}", flush=True)


def _check_run(
    findings: Findings, database: Database, store: Path, sender: RunSender, clean: RunSender, clean_database: Database
) -> None:
    where = sender.plan.key
    for text in sender.journal.refusals:
        findings.problem("refused", f"{where}: {text}")
    for text in clean.journal.refusals:
        findings.problem("refused_clean", f"{where}: {text}")
    findings.counts["steps"] += sender.plan.steps
    _check_shards(findings, where, database, store, sender)
    _check_scores(findings, where, database, store, sender)
    ours, theirs = comparable(database, sender.run_id), comparable(clean_database, clean.run_id)
    for table in _EXACT:
        findings.counts[f"compared_rows_of_{table}"] += len(theirs[table])
        if ours[table] != theirs[table]:
            findings.problem("mismatches", f"{where}: {table}: {_first_difference(ours[table], theirs[table])}")
    _check_snapshots(findings, where, ours["detector_snapshots"], theirs["detector_snapshots"])
    # The newest state, as a starting service derives it.
    newest = [_newest_state(*each) for each in ((database, sender), (clean_database, clean))]
    findings.counts["newest_detector_states"] += 1
    if newest[0] != newest[1]:
        findings.problem("mismatches", f"{where}: the detectors' newest state differs")
    mine, others = (_alerts(rows["alerts"], sender.plan) for rows in (ours, theirs))
    findings.counts["alerts"] += len(mine)
    for row in others:
        findings.counts[f"compared_alerts_of_{row['rule']}"] += 1
    if mine != others:
        findings.problem("mismatches", f"{where}: alerts: {_first_difference(mine, others)}")
    found, expected = (_conclusions(*each) for each in ((database, sender), (clean_database, clean)))
    findings.counts["compared_findings"] += len(expected)
    if found != expected:
        findings.problem("mismatches", f"{where}: findings: {_first_difference(found, expected)}")
    _check_advice(findings, where, sender, ours["advice_decisions"], theirs["advice_decisions"])


def check_files(findings: Findings, database: Database, store: Path) -> None:
    """Count the catalogue's missing files, and the files that are not in the catalogue."""
    named = set()
    with database.read() as session:
        for table in (Shard, ScoreFile):
            named |= set(session.scalars(select(table.file)))
    found = {str(path.relative_to(store)) for path in store.rglob("*.parquet") if "temporary" not in path.parts}
    for name in sorted(named - found):
        findings.problem("missing_files", name)
    findings.counts["files"] += len(found)
    findings.counts["orphans"] += len(found - named)
    temporary = [path for path in (store / "temporary").rglob("*") if path.is_file() and path.suffix != ".lock"]
    findings.counts["temporaries"] += len(temporary)


def _check_shards(findings: Findings, where: str, database: Database, store: Path, sender: RunSender) -> None:
    with database.read() as session:
        rows = {
            (row.attempt, row.step, row.shard): row
            for row in session.scalars(select(Shard).where(Shard.run_id == sender.run_id))
        }
        steps = session.scalars(select(Step).where(Step.run_id == sender.run_id)).all()
    acknowledged = sender.journal.shards
    findings.counts["acknowledged_shards"] += len(acknowledged)
    findings.counts["acknowledged_requests"] += sender.journal.answers
    for key, item in acknowledged.items():
        row = rows.get(key)
        if row is None or row.digest != digest_of_bytes(item.content):
            findings.problem("lost", f"{where}: shard {key} is not in the catalogue with its digest")
        elif not _is_readable(store / row.file, item):
            findings.problem("unreadable", f"{where}: the tokens of shard {key}, {row.file}")
    for key in rows.keys() - acknowledged.keys():
        findings.problem("unasked", f"{where}: shard {key} is stored and nothing acknowledged it")
    by_step: dict[tuple[int, int], list[Shard]] = {}
    for (attempt, step, _), row in rows.items():
        by_step.setdefault((attempt, step), []).append(row)
    for each in steps:
        shards = by_step.get((each.attempt, each.step), [])
        counted = (each.received_shards, each.rollouts, each.tokens)
        if counted != (len(shards), sum(row.rollouts for row in shards), sum(row.tokens for row in shards)):
            findings.problem("doubled", f"{where}: step {each.step} of attempt {each.attempt} counts {counted}")
    findings.counts["duplicates"] += sum(
        1 for item, status, _ in sender.journal.acknowledged if item.is_shard and status == 200
    )


def _is_readable(path: Path, item: Item) -> bool:
    """Return whether the stored tokens equal those of the body; for a shard of statistics, whether they can be read."""
    try:
        stored = decode_rollouts(path.read_bytes())
    except Exception:
        return False
    return item.kind == "statistics" or _are_equal(stored, decode_rollouts(item.content))


def _are_equal(one: RolloutBatch, other: RolloutBatch) -> bool:
    names = ("response_token_ids", "prompt_token_ids", "rollout_log_probs", "trainer_log_probs", "response_offsets")
    equal = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
    return equal and list(one.sample_ids) == list(other.sample_ids)


def _check_scores(findings: Findings, where: str, database: Database, store: Path, sender: RunSender) -> None:
    with database.read() as session:
        query = select(ScoreFile).join(ProbeJob, ProbeJob.id == ScoreFile.job_id)
        stored = session.scalars(query).all()
        published = session.scalars(select(Score).where(Score.run_id == sender.run_id)).all()
    digests = {(row.scorer, row.digest): row for row in stored}
    findings.counts["acknowledged_scores"] += len(sender.journal.scores)
    for key in sender.journal.scores:
        row = digests.get(key)
        if row is None or not (store / row.file).is_file():
            findings.problem("lost", f"{where}: scores {key}")
    scored = Counter((row.attempt, row.step, row.scorer, row.variant) for row in published)
    for name, count in scored.items():
        if count > 1:
            findings.problem("doubled", f"{where}: scores {name} are published {count} times")
    jobs = {row.job_id for row in published}
    for job in sender.journal.completed_jobs:
        if job not in jobs:
            findings.problem("lost", f"{where}: the scores of the completed job {job} are not published")


def _check_snapshots(findings: Findings, where: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Compare the states of the detectors that both services stored, and the steps that they have seen."""
    mine, others = ({(row["attempt"], row["step"]): row["state"] for row in rows} for rows in (ours, theirs))
    if max(mine, default=None) != max(others, default=None):
        findings.problem("mismatches", f"{where}: the newest detector states are {max(mine)} and {max(others)}")
    for key in sorted(mine.keys() & others.keys()):
        if mine[key] is None or others[key] is None:
            continue
        findings.counts["detector_states"] += 1
        if mine[key] != others[key]:
            findings.problem("mismatches", f"{where}: the detectors' state after {key} differs")


def _newest_state(database: Database, sender: RunSender) -> bytes:
    with database.read() as session:
        return newest_state(session, sender.run_id).to_bytes()


def _conclusions(database: Database, sender: RunSender) -> list[dict[str, Any]]:
    """Return the conclusions about the run, without times."""
    table = table_of(StoredFinding)
    chosen = [column for column in table.columns if column.name not in ("run_id", "changed_at_us")]
    query = select(*chosen).where(table.c.run_id == sender.run_id).order_by(table.c.source, table.c.name)
    with database.read() as session:
        return [dict(row) for row in session.execute(query).mappings()]


def _alerts(rows: list[dict[str, Any]], plan: RunPlan) -> list[dict[str, Any]]:
    """Return the alerts that were not retracted. Retracted ones depend on the order of arrival, not on the data.

    A step whose shards never come closes after the grace time and is judged then, unless a rewind supersedes it
    earlier. The alerts of superseded steps therefore depend on timing and are left out for such plans.
    """
    if plan.some_never_sent:
        rows = [row for row in rows if not plan.is_superseded(row["attempt"], row["step"])]
    kept = [row for row in rows if row["state"] != "retracted" and row["rule"] not in _OF_ARRIVAL]
    # A resolved alert of missing shards is one of superseded steps.
    kept = [row for row in kept if row["rule"] != INCOMPLETE_STEP or row["state"] != "resolved"]
    return sorted(kept, key=lambda row: (row["rule"], row["attempt"], row["step"]))


def _check_advice(
    findings: Findings, where: str, sender: RunSender, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> None:
    findings.counts["decisions"] += len(ours)
    ours, theirs = (sorted(rows, key=lambda row: int(row["revision"])) if rows and "revision" in rows[0] else rows
                    for rows in (ours, theirs))  # fmt: skip
    if sender.plan.serial:
        findings.counts["advice_compared"] += 1
        findings.counts["compared_decisions"] += len(theirs)
        if ours != theirs:
            findings.problem("mismatches", f"{where}: advice: {_first_difference(ours, theirs)}")
    seen = [(each["attempt"], each["revision"]) for each in sender.journal.advice]
    if seen != sorted(seen):
        findings.problem("advice_went_back", f"{where}: a poll got an older revision than an earlier poll: {seen}")


def _check_answers(findings: Findings, sender: RunSender, url: str, clean: RunSender, clean_url: str) -> None:
    """Compare the answers of both services about each replayed step; for a serial run its advice and diagnosis too."""
    for phase in sender.plan.phases:
        for item in phase.probe[-1:]:
            paths = [f"steps/{item.step}/attribution", *(("lr-advice", "diagnosis") if sender.plan.serial else ())]
            for path in paths:
                mine, other = (_answer(at, each, path) for at, each in ((url, sender), (clean_url, clean)))
                findings.counts["answers_compared"] += 1
                if mine != other:
                    findings.problem("mismatches", f"{sender.plan.key}: {path}: {_difference(mine, other)}")


def _answer(url: str, sender: RunSender, path: str) -> Any:
    answer = httpx.get(f"{url}/v1/runs/{sender.run_id}/{path}", timeout=30).raise_for_status().json()
    return _stable({name: value for name, value in answer.items() if name not in _OF_WORK.get(path, ())})


def _stable(value: Any) -> Any:
    """Return a JSON value without ids and times."""
    if isinstance(value, dict):
        found = {name: _stable(each) for name, each in value.items() if not _UNSTABLE.search(name)}
        if isinstance(found.get("alerts"), list):
            # Alerts that were opened together come in the order of their ids.
            found["alerts"].sort(key=lambda alert: (alert["rule"], alert["step"]))
        if isinstance(found.get("scores"), list):
            # They come newest first, but the jobs of a probe may end in any order.
            found["scores"].sort(key=lambda score: (score["scorer"], score["variant"]))
        return found
    return [_stable(each) for each in value] if isinstance(value, list) else value


def _first_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    if len(ours) != len(theirs):
        have, want = Counter(map(_name_of, ours)), Counter(map(_name_of, theirs))
        return f"{len(ours)} rows instead of {len(theirs)}; too many: {have - want}; missing: {want - have}"
    for mine, other in zip(ours, theirs, strict=True):
        if mine != other:
            return _difference(mine, other)
    return "?"


def _name_of(row: dict[str, Any]) -> str:
    names = ("attempt", "step", "shard", "comparison", "name", "rule", "state", "revision", "kind", "evidence")
    return " ".join(str(row[name])[:100] for name in names if name in row)


def _difference(mine: Any, other: Any) -> str:
    if isinstance(mine, dict) and isinstance(other, dict):
        names = [name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)]
        at = {name: mine.get(name) for name in ("attempt", "step", "shard", "rule", "revision") if name in mine}
        return f"{at} {', '.join(f'{name}: {_difference(mine.get(name), other.get(name))}' for name in names)}"[:600]
    return f"{str(mine)[:120]} instead of {str(other)[:120]}"


def check_catalogue(findings: Findings, served: Served) -> None:
    """Run `foreshock check`: every row has its intact file, and after a sweep of the service every file has a row."""
    deadline = time.monotonic() + _ORPHAN_PATIENCE_SECONDS
    while True:
        checked, problems = _check(served)
        orphans = [each for each in problems if each.startswith("no row names it")]
        if not orphans or time.monotonic() > deadline:
            break
        findings.counts["orphans_seen_by_checks"] += len(orphans)
        time.sleep(1.0)
    findings.counts["checks"] += 1
    findings.counts["files_checked"] += checked
    for each in problems:
        findings.problem("check", each)


def _check(served: Served) -> tuple[int, list[str]]:
    """Return the number of files and the problems that the command prints."""
    done = run_forked(["check"], environment(**served.settings), served.folder)
    found = re.search(r"^([\d,]+) files checked, ([\d,]+) problems$", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"foreshock check failed: {done.stdout[-1000:]} {done.stderr[-2000:]}")
    return int(found[1].replace(",", "")), done.stdout[: found.start()].splitlines()

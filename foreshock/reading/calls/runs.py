"""The calls that read runs and what belongs to them: attempts, steps, changes, checkpoints, deletions, retention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from foreshock.model_kind import ModelKind
from foreshock.reading.parsing import parse
from foreshock.reading.request import Listing, Request, json_request, run_path, several
from foreshock.reading.run_records import (
    AttemptRecord,
    ChangeRecord,
    CheckpointRecord,
    DeletionRecord,
    RetentionRecord,
    RunRecord,
    StepRecord,
    run_record,
)

__all__ = ["attempts", "changes", "checkpoints", "deletions", "retention", "run", "runs", "steps"]


def runs(
    *,
    key: str | None = None,
    model: str | None = None,
    model_kind: ModelKind | None = None,
    states: Sequence[str] = (),
    search: str | None = None,
) -> Listing[RunRecord]:
    """Yield the runs that the key may see, newest first; `search` is a part of the name or key."""
    query = [("key", key), ("model", model), ("model_kind", model_kind), *several("state", states), ("search", search)]
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


def deletions(run: str) -> Listing[DeletionRecord]:
    """Yield the deletions of rollouts of a run, newest first, and how far they are. The key needs `admin`."""
    return Listing(run_path(run, "deletions"), [], partial(parse, DeletionRecord))


def retention(run: str) -> Request[RetentionRecord]:
    """Return the rules by which a run keeps its tokens: its own, else those of the service's settings."""
    return json_request(run_path(run, "retention"), [], partial(parse, RetentionRecord))

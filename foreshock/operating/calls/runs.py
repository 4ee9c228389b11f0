"""The calls that change a run: its fields, its retention, what is deleted, changes and checkpoints announced later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from foreshock.changes import ChangeKind
from foreshock.model_kind import ModelKind
from foreshock.operating.request import UNCHANGED, Unchanged, given, json_change
from foreshock.reading.parsing import parse
from foreshock.reading.request import Request, names_of, run_path
from foreshock.reading.run_records import (
    ChangeRecord,
    CheckpointRecord,
    DeletionRecord,
    RetentionRecord,
    RunRecord,
    run_record,
)

__all__ = [
    "CheckpointFormat",
    "announce_change",
    "announce_checkpoint",
    "clear_retention",
    "delete_rollouts",
    "delete_run",
    "set_retention",
    "update_run",
]

CheckpointFormat = Literal["hf_safetensors", "fsdp", "dcp", "megatron"]


def update_run(
    run: str,
    *,
    state: Literal["running", "finished", "failed"] | None = None,
    name: str | Unchanged | None = UNCHANGED,
    advice_mode: Literal["shadow", "apply"] | None = None,
    model_kind: ModelKind | Unchanged | None = UNCHANGED,
    scalar_names: Mapping[str, str] | Unchanged | None = UNCHANGED,
) -> Request[RunRecord]:
    """Change fields of a run; what is not given stays unchanged.

    None removes a name, a declared kind of model (then that of its checkpoint holds) and declared names of scalars.
    """
    removable = {
        "name": name,
        "model_kind": model_kind,
        "scalar_names": dict(scalar_names) if isinstance(scalar_names, Mapping) else scalar_names,
    }
    body = given({"state": state, "advice_mode": advice_mode})
    body |= {field: value for field, value in removable.items() if value is not UNCHANGED}
    return json_change("PATCH", run_path(run), run_record, body)


def delete_run(run: str) -> Request[None]:
    """Delete a run; later calls that name it, late uploads included, are Rejected (410). The key needs `admin`.

    Its files go after the service's grace, and its key stays taken. It is sent again only if the service has not
    received it: the second time the run would be gone.
    """
    return Request(run_path(run), (), _nothing, method="DELETE", is_repeatable=False)


def delete_rollouts(
    run: str, *, sample_ids: Sequence[str] = (), group_ids: Sequence[str] = ()
) -> Request[DeletionRecord]:
    """Delete the tokens of rollouts by sample or group id, now and when they are sent again; aggregates stay.

    At most 10,000 ids of each kind. `Reader.deletions` says how far it is. Each call is a deletion of its own: it is
    sent again only if the service has not received it. The key needs `admin`.
    """
    body = {
        "sample_ids": names_of("sample_ids", sample_ids),
        "group_ids": names_of("group_ids", group_ids),
    }
    path = run_path(run, "deletions")
    return json_change("POST", path, partial(parse, DeletionRecord), body, is_repeatable=False)


def set_retention(
    run: str, *, last_steps: int | None, every_steps: int | None = None, alert_steps: int | None = None
) -> Request[RetentionRecord]:
    """Give a run rules of its own for which steps keep their tokens. The key needs `admin`.

    The newest `last_steps` (None: all steps, whatever the settings say), each `every_steps`-th, and `alert_steps`
    before and after each alert (None: 2).
    """
    body = {"last_steps": last_steps, **given({"every_steps": every_steps, "alert_steps": alert_steps})}
    return json_change("PUT", run_path(run, "retention"), partial(parse, RetentionRecord), body)


def clear_retention(run: str) -> Request[None]:
    """Remove the run's own rules of retention: those of the service's settings hold again. The key needs `admin`."""
    return Request(run_path(run, "retention"), (), _nothing, method="DELETE")


def announce_change(
    run: str,
    step: int,
    kind: ChangeKind,
    *,
    note: str | None = None,
    before: float | str | None = None,
    after: float | str | None = None,
    attempt: int = 1,
) -> Request[ChangeRecord]:
    """Announce a change at a step that the trainer did not: the baselines of the warnings begin anew there.

    A second announcement of the same kind and step replaces the words of the first. `attempt` is the one that computes
    the step. A trainer calls `Client.log_change`.
    """
    body = given({"note": note, "before": before, "after": after})
    path, read = run_path(run, "changes", step, kind), partial(parse, ChangeRecord)
    return json_change("PUT", path, read, body, query=[("attempt", attempt)])


def announce_checkpoint(
    run: str,
    step: int,
    *,
    root: str,
    path: str,
    digest: str,
    format: CheckpointFormat = "hf_safetensors",  # noqa: A002
    model_kind: ModelKind | None = None,
    weights_version: int | None = None,
    expires_at_us: int | None = None,
    attempt: int = 1,
) -> Request[CheckpointRecord]:
    """Announce saved weights that sampled a step, for example of an imported run.

    `root` is a name from the workers' configuration, `path` is below it; `digest` is
    `foreshock.digests.weights_digest(folder)`; `expires_at_us` is in UTC microseconds, None: never. `attempt` is the
    one that computes the step. A trainer calls `Client.log_checkpoint`.
    """
    body = given({
        "root": root,
        "path": path,
        "digest": digest,
        "format": format,
        "model_kind": model_kind,
        "weights_version": weights_version,
        "expires_at_us": expires_at_us,
    })  # fmt: skip
    read = partial(parse, CheckpointRecord)
    return json_change("PUT", run_path(run, "checkpoints", step), read, body, query=[("attempt", attempt)])


def _nothing(body: bytes) -> None:
    """Read the empty answer of a deletion."""

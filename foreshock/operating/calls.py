"""Every call of an operator: its path, its body and what its answer becomes.

`Operator` and `AsyncOperator` have a method for each function here, with the same parameters. `run` is a run's id or
key. A parameter that is None is left out of the body, so that the service's default holds, unless its call says
otherwise. What a trainer sends is sent by `foreshock.Client`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from foreshock.api.probes import PriorityName, ProbePolicyRecord, ProbeRecord
from foreshock.api.runs import (
    ChangeRecord,
    CheckpointFormat,
    CheckpointRecord,
    DeletionRecord,
    RetentionRecord,
    RunRecord,
    run_record,
)
from foreshock.api.watch import AdviceRecord, AlertRecord, RulesVersionRecord, advice_record
from foreshock.changes import ChangeKind
from foreshock.model_kind import ModelKind
from foreshock.reading.request import (
    UNCHANGED,
    Request,
    Unchanged,
    change,
    given,
    names_of,
    probe_path,
    run_path,
    step_path,
)
from foreshock.scorers import split_score_name

__all__ = [
    "acknowledge_alert",
    "announce_change",
    "announce_checkpoint",
    "cancel_probe",
    "clear_retention",
    "decide",
    "delete_rollouts",
    "delete_run",
    "examine_step",
    "request_probe",
    "resolve_alert",
    "retry_probe",
    "set_probe_policy",
    "set_retention",
    "set_rules",
    "update_run",
]

DecisionKind = Literal["hold", "release", "raise", "halve"]


def acknowledge_alert(run: str, alert: str) -> Request[AlertRecord]:
    """Mark an alert as seen by a person. Raises Rejected (409) if it is resolved or retracted."""
    return change("POST", run_path(run, "alerts", alert, "acknowledge"), AlertRecord)


def resolve_alert(run: str, alert: str) -> Request[AlertRecord]:
    """Resolve an alert; its rule may fire again later, as a new alert. Raises Rejected (409) if it was retracted."""
    return change("POST", run_path(run, "alerts", alert, "resolve"), AlertRecord)


def decide(run: str, kind: DecisionKind, reason: str) -> Request[AdviceRecord]:
    """Hold, release, raise or halve the learning rate as an operator, and return the advice that follows.

    `reason` is kept in the log of decisions. Raises Rejected (409) if the decision changes nothing, or the run has
    ended. It is sent again only if the service has not received it: two halvings are a quarter. The key needs `admin`.
    """
    path, body = run_path(run, "lr-advice", "decisions"), {"kind": kind, "reason": reason}
    return change("POST", path, advice_record, body, is_repeatable=False)


def set_rules(run: str, toml: str) -> Request[RulesVersionRecord]:
    """Change a run's rules from the step that the file names; its alerts are derived again. The key needs `admin`.

    `toml` is the text of a file of rules; one without rules brings the defaults back. Raises Rejected (422) if it is
    invalid. Each call is a version: it is sent again only if the service has not received it.
    """
    return change("PUT", run_path(run, "rules"), RulesVersionRecord, {"toml": toml}, is_repeatable=False)


ProbeKind = Literal["exact", "doctor", "matrix", "layers", "routing", "update"]


def request_probe(
    run: str,
    step: int,
    *,
    scorers: Sequence[str] = (),
    exact_pairs: Sequence[str] = (),
    kind: ProbeKind = "exact",
    attempt: int | None = None,
    accelerator: str | None = None,
    environment: str | None = None,
    max_rollouts: int | None = None,
    priority: PriorityName | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    checkpoint_step: int | None = None,
    max_candidates: int | None = None,
) -> Request[ProbeRecord]:
    """Request that workers score a step's rollouts again; an equal request returns the same probe.

    `scorers` are names such as "vllm.prefill", or "vllm.prefill@rebatched" for a variant; `exact_pairs` are comparisons
    to compute over the whole vocabulary; `options` are by scorer. docs/probes.md describes kinds and environments.
    """
    body = given({
        "step": step,
        "scorers": _scorers(scorers),
        "exact_pairs": names_of("exact_pairs", exact_pairs),
        "kind": kind,
        "attempt": attempt,
        "accelerator": accelerator,
        "environment": environment,
        "max_rollouts": max_rollouts,
        "priority": priority,
        "options": None if options is None else {name: dict(values) for name, values in options.items()},
        "checkpoint_step": checkpoint_step,
        "max_candidates": max_candidates,
    })  # fmt: skip
    return change("POST", run_path(run, "probes"), ProbeRecord, body)


def examine_step(
    run: str,
    step: int,
    *,
    attempt: int | None = None,
    budget_seconds: float | None = None,
    max_rollouts: int | None = None,
    max_candidates: int | None = None,
) -> Request[ProbeRecord]:
    """Have the doctor examine a step, and return its probe; `Reader.doctor` has the report when it is done.

    `budget_seconds`: the time for replays (default: 600); `max_candidates`: earlier checkpoints to try (default: 8).
    """
    body = given({
        "attempt": attempt,
        "budget_seconds": budget_seconds,
        "max_rollouts": max_rollouts,
        "max_candidates": max_candidates,
    })  # fmt: skip
    return change("POST", step_path(run, step, "doctor"), ProbeRecord, body)


def retry_probe(probe: str) -> Request[ProbeRecord]:
    """Queue the failed and skipped jobs of an ended probe again. Raises Rejected (409) if it has not ended.

    It is sent again only if the service has not received it: the second time the probe would not have ended.
    """
    return change("POST", probe_path(probe, "retry"), ProbeRecord, in_project=False, is_repeatable=False)


def cancel_probe(probe: str) -> Request[ProbeRecord]:
    """Skip the unfinished jobs of a probe; scores of finished ones stay. Raises Rejected (409) if it has ended."""
    return change("DELETE", probe_path(probe), ProbeRecord, in_project=False)


def set_probe_policy(
    run: str,
    *,
    every_steps: int | None = None,
    on_alerts: bool = False,
    doctor_on_alerts: bool = False,
    rollouts: int | None = None,
    scorers: Sequence[str] | None = None,
    accelerator: str | None = None,
    budget_seconds: float | None = None,
) -> Request[ProbePolicyRecord]:
    """Set which steps of a run are probed automatically; it replaces the policy, None gives a field its default.

    `every_steps`: the first step with a checkpoint in each so many; `on_alerts`: steps near an open alert;
    `doctor_on_alerts`: the doctor examines the first step near an open alert on the mismatch; `budget_seconds`:
    accelerator seconds that the run's probes may use. Without arguments nothing is probed automatically. The key needs
    `admin`.
    """
    body = given({
        "every_steps": every_steps,
        "on_alerts": on_alerts,
        "doctor_on_alerts": doctor_on_alerts,
        "rollouts": rollouts,
        "scorers": None if scorers is None else _scorers(scorers),
        "accelerator": accelerator,
        "budget_seconds": budget_seconds,
    })  # fmt: skip
    return change("PUT", run_path(run, "probe-policy"), ProbePolicyRecord, body)


def _scorers(names: Sequence[str]) -> list[dict[str, str]]:
    split = map(split_score_name, names_of("scorers", names))
    return [{"scorer": scorer, "variant": variant} for scorer, variant in split]


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
    return change("PATCH", run_path(run), run_record, body)


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
    body = {"sample_ids": names_of("sample_ids", sample_ids), "group_ids": names_of("group_ids", group_ids)}
    return change("POST", run_path(run, "deletions"), DeletionRecord, body, is_repeatable=False)


def set_retention(
    run: str, *, last_steps: int | None, every_steps: int | None = None, alert_steps: int | None = None
) -> Request[RetentionRecord]:
    """Give a run rules of its own for which steps keep their tokens. The key needs `admin`.

    The newest `last_steps` (None: all steps, whatever the settings say), each `every_steps`-th, and `alert_steps`
    before and after each alert (None: 2).
    """
    body = {"last_steps": last_steps, **given({"every_steps": every_steps, "alert_steps": alert_steps})}
    return change("PUT", run_path(run, "retention"), RetentionRecord, body)


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
    return change("PUT", run_path(run, "changes", step, kind), ChangeRecord, body, query=[("attempt", attempt)])


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
    return change("PUT", run_path(run, "checkpoints", step), CheckpointRecord, body, query=[("attempt", attempt)])


def _nothing(body: bytes) -> None:
    """Read the empty answer of a deletion."""

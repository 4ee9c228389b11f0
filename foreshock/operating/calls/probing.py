"""The calls that order probes: requests, retries, cancellations, and the policy of automatic ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from foreshock.operating.request import given, json_change
from foreshock.reading.parsing import parse
from foreshock.reading.probe_records import ProbePolicyRecord
from foreshock.reading.request import Request, names_of, probe_path, run_path
from foreshock.reading.watch_records import ProbeRecord
from foreshock.scorers import split_score_name

__all__ = ["ProbeKind", "ProbePriority", "cancel_probe", "request_probe", "retry_probe", "set_probe_policy"]

ProbeKind = Literal["exact", "weights", "matrix", "layers", "routing"]
ProbePriority = Literal["low", "normal", "high", "urgent"]


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
    priority: ProbePriority | None = None,
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
    return json_change("POST", run_path(run, "probes"), partial(parse, ProbeRecord), body)


def retry_probe(probe: str) -> Request[ProbeRecord]:
    """Queue the failed and skipped jobs of an ended probe again. Raises Rejected (409) if it has not ended.

    It is sent again only if the service has not received it: the second time the probe would not have ended.
    """
    read = partial(parse, ProbeRecord)
    return json_change("POST", probe_path(probe, "retry"), read, in_project=False, is_repeatable=False)


def cancel_probe(probe: str) -> Request[ProbeRecord]:
    """Skip the unfinished jobs of a probe; scores of finished ones stay. Raises Rejected (409) if it has ended."""
    return json_change("DELETE", probe_path(probe), partial(parse, ProbeRecord), in_project=False)


def set_probe_policy(
    run: str,
    *,
    every_steps: int | None = None,
    on_alerts: bool = False,
    rollouts: int | None = None,
    scorers: Sequence[str] | None = None,
    accelerator: str | None = None,
    budget_seconds: float | None = None,
) -> Request[ProbePolicyRecord]:
    """Set which steps of a run are probed automatically; it replaces the policy, None gives a field its default.

    `every_steps`: the first step with a checkpoint in each so many; `on_alerts`: steps near an open alert;
    `budget_seconds`: accelerator seconds that the run's probes may use. Without arguments nothing is probed
    automatically. The key needs `admin`.
    """
    body = given({
        "every_steps": every_steps,
        "on_alerts": on_alerts,
        "rollouts": rollouts,
        "scorers": None if scorers is None else _scorers(scorers),
        "accelerator": accelerator,
        "budget_seconds": budget_seconds,
    })  # fmt: skip
    return json_change("PUT", run_path(run, "probe-policy"), partial(parse, ProbePolicyRecord), body)


def _scorers(names: Sequence[str]) -> list[dict[str, str]]:
    split = map(split_score_name, names_of("scorers", names))
    return [{"scorer": scorer, "variant": variant} for scorer, variant in split]

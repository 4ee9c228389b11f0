"""The async twin of `Reader`: the same methods, whose answers are awaited and whose lists are async iterators.

async with foreshock.AsyncReader() as reader:
    async for run in reader.runs(states=["running"]):
        measured = await reader.measurements(run.id, measures=["k3_kl"])
"""

from __future__ import annotations

from foreshock.reading import api
from foreshock.reading.async_caller import AsyncCaller, call, listing

__all__ = ["AsyncReader"]


class AsyncReader(AsyncCaller):
    """Reads runs, steps, curves, tokens, alerts, probes and advice; for many tasks of one event loop.

    Arguments not given come from `FORESHOCK_URL` and `FORESHOCK_API_KEY`. `project=None`: runs of all projects that the
    key may see. A request that fails because the service is away or busy is repeated for `retry_seconds`, each attempt
    has `timeout_seconds`.

    Lists are async iterators that ask for the next page when they need it. Every failure is a ServiceError.
    The newest answers are kept, at most 16 MiB of them: one that has not changed is not sent again.
    """

    runs = listing(api.runs)
    run = call(api.run)
    attempts = listing(api.attempts)
    steps = listing(api.steps)
    changes = listing(api.changes)
    checkpoints = listing(api.checkpoints)
    deletions = listing(api.deletions)
    retention = call(api.retention)
    measures = listing(api.measures)
    measurements = call(api.measurements)
    export_measurements = call(api.export_measurements)
    scalars = call(api.scalars)
    export_scalars = call(api.export_scalars)
    buckets = call(api.buckets)
    token_ids = call(api.token_ids)
    worst_tokens = call(api.worst_tokens)
    rollout_tokens = call(api.rollout_tokens)
    exact_tokens = call(api.exact_tokens)
    health = call(api.health)
    risk = call(api.risk)
    findings = listing(api.findings)
    findings_of_runs = listing(api.findings_of_runs)
    lint = call(api.lint)
    lint_of_run = call(api.lint_of_run)
    corrections = call(api.corrections)
    theory = call(api.theory)
    attribution = call(api.attribution)
    exact = call(api.exact)
    routing = call(api.routing)
    layers = call(api.layers)
    weights_search = call(api.weights_search)
    matrix = call(api.matrix)
    alerts = listing(api.alerts)
    changed_alerts = call(api.changed_alerts)
    alerts_of_runs = listing(api.alerts_of_runs)
    advice = call(api.advice)
    decisions = listing(api.decisions)
    rules = call(api.rules)
    default_rules = call(api.default_rules)
    probes = listing(api.probes)
    probes_of_runs = listing(api.probes_of_runs)
    probe = call(api.probe)
    probe_policy = call(api.probe_policy)
    hardware = call(api.hardware)
    service = call(api.service)
    audit = listing(api.audit)

"""Reading what the service has, from a script or a notebook.

    with foreshock.Reader() as reader:
        for run in reader.runs(states=["running"]):
            steps, k3 = reader.measurements(run.id, measures=["k3_kl"]).curve("trainer/rollout", "k3_kl")

`foreshock/reading/calls/` has the parameters and the documentation of every method.
"""

from __future__ import annotations

from foreshock.reading import api
from foreshock.reading.caller import Caller, answer_of, call, items_of, listing

__all__ = ["Reader", "answer_of", "items_of"]


class Reader(Caller):
    """Reads runs, steps, curves, tokens, alerts, probes and advice. Use one reader per thread.

    Arguments not given come from `FORESHOCK_URL` and `FORESHOCK_API_KEY`. `project=None`: runs of all projects that the
    key may see. A request that fails because the service is away or busy is repeated for `retry_seconds`, each attempt
    has `timeout_seconds`.

    Lists are iterators that ask for the next page when they need it. Every failure is a ServiceError.
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

"""Reading what the service has, from a script or a notebook.

    with foreshock.Reader() as reader:
        for run in reader.runs(states=["running"]):
            steps, k3 = reader.measurements(run.id, measures=["k3_kl"]).curve("trainer/rollout", "k3_kl")

    async with foreshock.AsyncReader() as reader:
        async for run in reader.runs(states=["running"]):
            measured = await reader.measurements(run.id, measures=["k3_kl"])

`foreshock/reading/calls.py` and `step_calls.py` have the parameters and the documentation of every method.
"""

from foreshock.reading import calls, step_calls
from foreshock.reading.caller import AsyncCaller, Caller, call, listing


class _Methods:
    """The methods of both readers."""

    runs = listing(calls.runs)
    run = call(calls.run)
    attempts = listing(calls.attempts)
    steps = listing(calls.steps)
    changes = listing(calls.changes)
    checkpoints = listing(calls.checkpoints)
    weights = listing(calls.weights)
    deletions = listing(calls.deletions)
    retention = call(calls.retention)
    measures = listing(calls.measures)
    measurements = call(calls.measurements)
    export_measurements = call(calls.export_measurements)
    scalars = call(calls.scalars)
    export_scalars = call(calls.export_scalars)
    buckets = call(step_calls.buckets)
    token_ids = call(step_calls.token_ids)
    worst_tokens = call(step_calls.worst_tokens)
    rollout_tokens = call(step_calls.rollout_tokens)
    export_rollouts = call(step_calls.export_rollouts)
    exact_tokens = call(step_calls.exact_tokens)
    diagnosis = call(calls.diagnosis)
    findings = listing(calls.findings)
    findings_of_runs = listing(calls.findings_of_runs)
    lint = call(step_calls.lint)
    lint_of_run = call(calls.lint_of_run)
    corrections = call(step_calls.corrections)
    theory = call(step_calls.theory)
    attribution = call(step_calls.attribution)
    exact = call(step_calls.exact)
    routing = call(step_calls.routing)
    layers = call(step_calls.layers)
    update = call(step_calls.update)
    doctor = call(step_calls.doctor)
    matrix = call(step_calls.matrix)
    alerts = listing(calls.alerts)
    changed_alerts = call(calls.changed_alerts)
    alerts_of_runs = listing(calls.alerts_of_runs)
    advice = call(calls.advice)
    decisions = listing(calls.decisions)
    rules = call(calls.rules)
    default_rules = call(calls.default_rules)
    probes = listing(calls.probes)
    probes_of_runs = listing(calls.probes_of_runs)
    probe = call(calls.probe)
    probe_policy = call(calls.probe_policy)
    hardware = call(calls.hardware)
    service = call(calls.service)
    audit = listing(calls.audit)


class Reader(_Methods, Caller):
    """Reads runs, steps, curves, tokens, alerts, probes and advice. Use one reader per thread.

    Arguments not given come from `FORESHOCK_URL` and `FORESHOCK_API_KEY`. `project=None`: runs of all projects that the
    key may see. A request that fails because the service is away or busy is repeated for `retry_seconds`, each attempt
    has `timeout_seconds`.

    Lists are iterators that ask for the next page when they need it. Every failure is a ServiceError.
    The newest answers with an ETag (curves, advice, alerts) are kept, at most 16 MiB of them: unchanged ones are not
    sent again.
    """


class AsyncReader(_Methods, AsyncCaller):
    """The async form of `Reader`, for many tasks of one event loop: answers are awaited, lists are async iterators."""

"""Every reading call of the API: its path, its parameters and what its answer becomes.

`Reader` and `AsyncReader` have a method for each function here, with the same parameters. `run` is a run's id or key,
`comparison` is `target/behaviour`, such as "trainer/rollout"; `attempt=None` means the active steps of all attempts.
"""

from __future__ import annotations

from foreshock.reading.calls.analyses import (
    corrections,
    findings,
    findings_of_runs,
    health,
    lint,
    lint_of_run,
    risk,
    theory,
)
from foreshock.reading.calls.curves import export_measurements, export_scalars, measurements, measures, scalars
from foreshock.reading.calls.operations import audit, service
from foreshock.reading.calls.probing import hardware, probe, probe_policy, probes, probes_of_runs
from foreshock.reading.calls.replays import attribution, exact, layers, matrix, routing, weights_search
from foreshock.reading.calls.runs import attempts, changes, checkpoints, deletions, retention, run, runs, steps
from foreshock.reading.calls.tokens import buckets, exact_tokens, rollout_tokens, token_ids, worst_tokens
from foreshock.reading.calls.watching import (
    advice,
    alerts,
    alerts_of_runs,
    changed_alerts,
    decisions,
    default_rules,
    rules,
)

__all__ = [
    "advice",
    "alerts",
    "alerts_of_runs",
    "attempts",
    "attribution",
    "audit",
    "buckets",
    "changed_alerts",
    "changes",
    "checkpoints",
    "corrections",
    "decisions",
    "default_rules",
    "deletions",
    "exact",
    "exact_tokens",
    "export_measurements",
    "export_scalars",
    "findings",
    "findings_of_runs",
    "hardware",
    "health",
    "layers",
    "lint",
    "lint_of_run",
    "matrix",
    "measurements",
    "measures",
    "probe",
    "probe_policy",
    "probes",
    "probes_of_runs",
    "retention",
    "risk",
    "rollout_tokens",
    "routing",
    "rules",
    "run",
    "runs",
    "scalars",
    "service",
    "steps",
    "theory",
    "token_ids",
    "weights_search",
    "worst_tokens",
]

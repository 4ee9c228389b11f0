"""Every call of an operator: its path, its body and what its answer becomes.

`Operator` and `AsyncOperator` have a method for each function here, with the same parameters. `run` is a run's id or
key. A parameter that is None is left out of the body, so that the service's default holds, unless its call says
otherwise. What a trainer sends is sent by `foreshock.Client`.
"""

from __future__ import annotations

from foreshock.operating.calls.probing import cancel_probe, request_probe, retry_probe, set_probe_policy
from foreshock.operating.calls.runs import (
    announce_change,
    announce_checkpoint,
    clear_retention,
    delete_rollouts,
    delete_run,
    set_retention,
    update_run,
)
from foreshock.operating.calls.watching import acknowledge_alert, decide, resolve_alert, set_rules

__all__ = [
    "acknowledge_alert",
    "announce_change",
    "announce_checkpoint",
    "cancel_probe",
    "clear_retention",
    "decide",
    "delete_rollouts",
    "delete_run",
    "request_probe",
    "resolve_alert",
    "retry_probe",
    "set_probe_policy",
    "set_retention",
    "set_rules",
    "update_run",
]

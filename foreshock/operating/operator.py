"""Changing what the service has, from a script or a notebook.

    with foreshock.Operator() as operator:
        operator.decide("my-run", "hold", "the reward fell after step 400")

`foreshock/operating/calls/` has the parameters and the documentation of every method.
"""

from __future__ import annotations

from foreshock.operating import api
from foreshock.reading.caller import Caller, call
from foreshock.reading.reader import Reader

__all__ = ["Operator"]


class Operator(Caller):
    """Answers alerts, decides on the learning rate, orders probes, and changes or deletes runs. Use one per thread.

    Arguments not given come from `FORESHOCK_URL` and `FORESHOCK_API_KEY`. `project` is that of run keys; None: the one
    project that has the key. A call that fails because the service is away or busy is repeated for `retry_seconds`,
    each attempt has `timeout_seconds`. Calls that must not happen twice, such as `decide`, are sent again only if the
    service has not received them.

    Every failure is a ServiceError; `error.problem` has the service's detail and `request_id`. Nothing runs in the
    background: a trainer uses `Client`, which never raises and never waits.
    """

    acknowledge_alert = call(api.acknowledge_alert)
    resolve_alert = call(api.resolve_alert)
    decide = call(api.decide)
    set_rules = call(api.set_rules)
    request_probe = call(api.request_probe)
    retry_probe = call(api.retry_probe)
    cancel_probe = call(api.cancel_probe)
    set_probe_policy = call(api.set_probe_policy)
    update_run = call(api.update_run)
    announce_change = call(api.announce_change)
    announce_checkpoint = call(api.announce_checkpoint)
    set_retention = call(api.set_retention)
    clear_retention = call(api.clear_retention)
    delete_rollouts = call(api.delete_rollouts)
    delete_run = call(api.delete_run)

    def reader(self) -> Reader:
        """Return a reader of what the service has, with this operator's address, key and project."""
        return Reader(**vars(self.settings))

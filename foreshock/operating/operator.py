"""Changing what the service has, from a script or a notebook.

    with foreshock.Operator() as operator:
        operator.decide("my-run", "hold", "the reward fell after step 400")

    async with foreshock.AsyncOperator() as operator:
        await operator.decide("my-run", "hold", "the reward fell after step 400")

`foreshock/operating/calls.py` has the parameters and the documentation of every method.
"""

from foreshock.operating import calls
from foreshock.reading.caller import AsyncCaller, Caller, call
from foreshock.reading.reader import AsyncReader, Reader


class _Methods:
    """The methods of both operators."""

    acknowledge_alert = call(calls.acknowledge_alert)
    resolve_alert = call(calls.resolve_alert)
    decide = call(calls.decide)
    set_rules = call(calls.set_rules)
    request_probe = call(calls.request_probe)
    retry_probe = call(calls.retry_probe)
    cancel_probe = call(calls.cancel_probe)
    examine_step = call(calls.examine_step)
    set_probe_policy = call(calls.set_probe_policy)
    update_run = call(calls.update_run)
    announce_change = call(calls.announce_change)
    announce_checkpoint = call(calls.announce_checkpoint)
    set_retention = call(calls.set_retention)
    clear_retention = call(calls.clear_retention)
    delete_rollouts = call(calls.delete_rollouts)
    delete_run = call(calls.delete_run)


class Operator(_Methods, Caller):
    """Answers alerts, decides on the learning rate, orders probes, and changes or deletes runs. Use one per thread.

    Arguments not given come from `FORESHOCK_URL` and `FORESHOCK_API_KEY`. `project` is that of run keys; None: the one
    project that has the key. A call that fails because the service is away or busy is repeated for `retry_seconds`,
    each attempt has `timeout_seconds`. Calls that must not happen twice, such as `decide`, are sent again only if the
    service has not received them.

    Every failure is a ServiceError; `error.problem` has the service's detail and `request_id`. Nothing runs in the
    background: a trainer uses `Client`, which never raises and never waits.
    """

    def reader(self) -> Reader:
        """Return a reader of what the service has, with this operator's address, key and project."""
        return Reader(**self.settings)


class AsyncOperator(_Methods, AsyncCaller):
    """The async form of `Operator`, for many tasks of one event loop: answers are awaited."""

    def reader(self) -> AsyncReader:
        """Return a reader of what the service has, with this operator's address, key and project."""
        return AsyncReader(**self.settings)

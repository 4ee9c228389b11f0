"""Change what the service stores, from a script or a notebook.

    with foreshock.Operator() as operator:
        operator.decide("my-run", "hold", "the reward fell after step 400")

    async with foreshock.AsyncOperator() as operator:
        await operator.decide("my-run", "hold", "the reward fell after step 400")

`run` is a run's id or key. A parameter that is None is left out of the body, so that the service's default holds,
unless its method says otherwise. A trainer sends its data with `foreshock.Client`.
"""

# mypy: disable-error-code="empty-body"

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
)
from foreshock.api.watch import AdviceRecord, AlertRecord, RulesVersionRecord
from foreshock.changes import ChangeKind
from foreshock.json_values import given
from foreshock.learning_rate.advice import AdviceMode, OperatorKind
from foreshock.model_kind import ModelKind
from foreshock.reading.caller import UNCHANGED, AsyncCaller, Caller, Unchanged
from foreshock.reading.described import Values, change, names_of
from foreshock.reading.reader import AsyncReader, Reader
from foreshock.scorers import split_score_name

ProbeKind = Literal["exact", "doctor", "layers", "routing", "update"]


def _policy(values: Values) -> Values:
    """Return a body with its scorers as the service has them."""
    scorers = values["scorers"]
    if scorers is not None:
        split = map(split_score_name, names_of("scorers", scorers))
        values["scorers"] = [{"scorer": scorer, "variant": variant} for scorer, variant in split]
    return given(values)


def _probe(values: Values) -> Values:
    options = values["options"]
    values["options"] = None if options is None else {name: dict(of_scorer) for name, of_scorer in options.items()}
    return _policy(values)


def _fields_of_run(values: Values) -> Values:
    """Return the fields that change: None removes those that may be missing."""
    names = values["scalar_names"]
    values["scalar_names"] = dict(names) if isinstance(names, Mapping) else names
    body = given({name: values.pop(name) for name in ("state", "advice_mode")})
    return body | {name: value for name, value in values.items() if value is not UNCHANGED}


def _retention(values: Values) -> Values:
    """Return the body; `last_steps` None is a rule, not a missing field."""
    return {"last_steps": values["last_steps"], **given(values)}


class _Methods:
    """The methods of both operators."""

    @change("POST", "/v1/runs/{run}/alerts/{alert}/acknowledge")
    def acknowledge_alert(self, run: str, alert: str) -> AlertRecord:
        """Mark an alert as seen by a person. Raises Rejected (409) if it is resolved or retracted."""

    @change("POST", "/v1/runs/{run}/alerts/{alert}/resolve")
    def resolve_alert(self, run: str, alert: str) -> AlertRecord:
        """Resolve an alert; its rule may fire again, as a new alert. Raises Rejected (409) if it was retracted."""

    @change("POST", "/v1/runs/{run}/lr-advice/decisions", is_repeatable=False)
    def decide(self, run: str, kind: OperatorKind, reason: str) -> AdviceRecord:
        """Hold, release, raise or halve the learning rate as an operator, and return the advice that follows.

        `reason` is kept in the log of decisions. Raises Rejected (409) if the decision changes nothing, or the run has
        ended. It is sent again only if the service has not received it: two halvings are a quarter. The key needs
        `admin`.
        """

    @change("PUT", "/v1/runs/{run}/rules", is_repeatable=False)
    def set_rules(self, run: str, toml: str) -> RulesVersionRecord:
        """Change a run's rules from the step that the file names; its alerts are derived again. The key needs `admin`.

        `toml` is the text of a file of rules; one without rules brings the defaults back. Raises Rejected (422) if it
        is invalid. Each call is a version: it is sent again only if the service has not received it.
        """

    @change("POST", "/v1/runs/{run}/probes", body=_probe)
    def request_probe(
        self,
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
    ) -> ProbeRecord:
        """Request that workers score a step's rollouts again; an equal request returns the same probe.

        `scorers` are names such as "vllm.prefill", or "vllm.prefill@rebatched" for a variant; `exact_pairs` are
        comparisons to compute over the whole vocabulary; `options` are by scorer. docs/probes.md describes kinds and
        environments.
        """

    @change("POST", "/v1/runs/{run}/steps/{step}/doctor")
    def examine_step(
        self,
        run: str,
        step: int,
        *,
        attempt: int | None = None,
        budget_seconds: float | None = None,
        max_rollouts: int | None = None,
        max_candidates: int | None = None,
        against: str | None = None,
    ) -> ProbeRecord:
        """Have the doctor examine a step, and return its probe; `Reader.doctor` has the report when it is done.

        `budget_seconds`: the time for replays (default: DOCTOR_SECONDS of `foreshock.probe_kinds`); `max_candidates`:
        earlier checkpoints to try (default: DOCTOR_CANDIDATES); `against`: the id of another run of the project, whose
        weights and configuration are tried too.
        """

    @change("POST", "/v1/probes/{probe}/retry", in_project=False, is_repeatable=False)
    def retry_probe(self, probe: str) -> ProbeRecord:
        """Queue the failed and skipped jobs of an ended probe again. Raises Rejected (409) if it has not ended.

        It is sent again only if the service has not received it: the second time the probe would not have ended.
        """

    @change("DELETE", "/v1/probes/{probe}", in_project=False)
    def cancel_probe(self, probe: str) -> ProbeRecord:
        """Skip the unfinished jobs of a probe; scores of finished ones stay. Raises Rejected (409) if it has ended."""

    @change("PUT", "/v1/runs/{run}/probe-policy", body=_policy)
    def set_probe_policy(
        self,
        run: str,
        *,
        every_steps: int | None = None,
        on_alerts: bool = False,
        doctor_on_alerts: bool = False,
        rollouts: int | None = None,
        scorers: Sequence[str] | None = None,
        accelerator: str | None = None,
        budget_seconds: float | None = None,
    ) -> ProbePolicyRecord:
        """Set which steps of a run are probed automatically; it replaces the policy, None gives a field its default.

        `every_steps`: the first step with a checkpoint in each so many; `on_alerts`: steps near an open alert;
        `doctor_on_alerts`: the doctor examines the first step near an open alert on the mismatch; `budget_seconds`:
        accelerator seconds that the run's probes may use. Without arguments nothing is probed automatically. The key
        needs `admin`.
        """

    @change("PATCH", "/v1/runs/{run}", body=_fields_of_run)
    def update_run(
        self,
        run: str,
        *,
        state: Literal["running", "finished", "failed"] | None = None,
        name: str | Unchanged | None = UNCHANGED,
        advice_mode: AdviceMode | None = None,
        model_kind: ModelKind | Unchanged | None = UNCHANGED,
        scalar_names: Mapping[str, str] | Unchanged | None = UNCHANGED,
    ) -> RunRecord:
        """Change fields of a run; what is not given stays unchanged.

        None removes a name, a declared kind of model (then that of its checkpoint holds) and declared names of scalars.
        """

    @change("DELETE", "/v1/runs/{run}", is_repeatable=False)
    def delete_run(self, run: str) -> None:
        """Delete a run; later calls that name it, late uploads included, are Rejected (410). The key needs `admin`.

        Its files go after the service's grace, and its key stays taken. It is sent again only if the service has not
        received it: the second time the run would be gone.
        """

    @change("POST", "/v1/runs/{run}/deletions", is_repeatable=False)
    def delete_rollouts(
        self, run: str, *, sample_ids: Sequence[str] = (), group_ids: Sequence[str] = ()
    ) -> DeletionRecord:
        """Delete the tokens of rollouts by sample or group id, now and when they are sent again; aggregates stay.

        At most 10,000 ids of each kind. `Reader.deletions` reports its progress. Each call is a deletion of its own: it
        is sent again only if the service has not received it. The key needs `admin`.
        """

    @change("PUT", "/v1/runs/{run}/retention", body=_retention)
    def set_retention(
        self, run: str, *, last_steps: int | None, every_steps: int | None = None, alert_steps: int | None = None
    ) -> RetentionRecord:
        """Give a run rules of its own for which steps keep their tokens. The key needs `admin`.

        The newest `last_steps` (None: all steps, whatever the settings say), each `every_steps`-th, and `alert_steps`
        before and after each alert (None: 2).
        """

    @change("DELETE", "/v1/runs/{run}/retention")
    def clear_retention(self, run: str) -> None:
        """Remove the run's own rules of retention: the service's settings hold again. The key needs `admin`."""

    @change("PUT", "/v1/runs/{run}/changes/{step}/{kind}", query=("attempt",))
    def announce_change(
        self,
        run: str,
        step: int,
        kind: ChangeKind,
        *,
        note: str | None = None,
        before: float | str | None = None,
        after: float | str | None = None,
        attempt: int = 1,
    ) -> ChangeRecord:
        """Announce a change that the trainer did not announce: the baselines of the warnings start again at its step.

        A second announcement of the same kind and step replaces the first. `attempt` is the one that computes the step.
        A trainer calls `Client.log_change`.
        """

    @change("PUT", "/v1/runs/{run}/checkpoints/{step}", query=("attempt",))
    def announce_checkpoint(
        self,
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
    ) -> CheckpointRecord:
        """Announce saved weights that sampled a step, for example of an imported run.

        `root` is a name from the workers' configuration, `path` is below it; `digest` is
        `foreshock.digests.weights_digest(folder)`; `expires_at_us` is in UTC microseconds, None: never. `attempt` is
        the one that computes the step. A trainer calls `Client.log_checkpoint`.
        """


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

"""Read what the service has from a script or a notebook, and make the changes that a person makes.

    with foreshock.Reader() as reader:
        for run in reader.runs(states=["running"]):
            steps, k3 = reader.measurements(run.id, measures=["k3_kl"]).curve("trainer/rollout", "k3_kl")
        reader.hold("my-run", "the reward fell after step 400")

`run` is a run's id or key, `comparison` is `target/behaviour`, such as "trainer/rollout"; `attempt=None` means the
active steps of all attempts. `GET /openapi.json` has the routes that have no method here; `reader.connection` sends
requests to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import httpx

from foreshock.api.attribution import AttributionRecord
from foreshock.api.diagnosis import Diagnosis, Verdict, diagnosis_of
from foreshock.api.doctor import DoctorStepRecord
from foreshock.api.probes import HardwareRecord, PriorityName, ProbeRecord
from foreshock.api.records import parse
from foreshock.api.replays import ExactStepRecord
from foreshock.api.runs import (
    AttemptRecord,
    ChangeRecord,
    CheckpointRecord,
    FindingRecord,
    MeasureRecord,
    RunRecord,
    StepRecord,
    WeightsRecord,
    run_record,
)
from foreshock.api.steps import CorrectionsRecord, LintRecord, TheoryRecord
from foreshock.api.watch import AdviceRecord, AlertOfRun, AlertRecord, DecisionRecord, RulesRecord, advice_record
from foreshock.client import columns
from foreshock.client.columns import Buckets, Measurements, Scalars, Tokens
from foreshock.client.connection import (
    LONGEST_ANSWER_BYTES,
    ServiceConnection,
    configured,
)
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.errors import ServiceUnavailable, WrongService
from foreshock.json_values import given
from foreshock.layer_divergence import LayerComparison
from foreshock.learning_rate.modes import AdviceMode, Lever
from foreshock.model_kind import ModelKind
from foreshock.retry import Backoff, retry
from foreshock.routing import RoutingComparison
from foreshock.scorers import split_score_name

Answer = TypeVar("Answer")
Read = Callable[[Any], Answer]
BucketCondition = Literal["probability", "position", "turn", "length", "entropy", "lag"]

# The service's limit.
ITEMS_ON_A_PAGE = 500


class Reader:
    """Reads runs, steps, curves, tokens, alerts, probes and advice. Use one reader per thread.

    Arguments not given come from `FORESHOCK_URL` and `FORESHOCK_API_KEY`. `project=None`: runs of all projects that the
    key may see. A question that fails because the service is away or busy is repeated for `retry_seconds`, each attempt
    has `timeout_seconds`; a change is sent once. Lists are iterators that ask for the next page when they need it.
    Every failure is a ServiceError; `error.problem` has the service's detail and `request_id`.
    """

    def __init__(
        self,
        url: str | None = None,
        project: str | None = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 10.0,
        max_answer_bytes: int = LONGEST_ANSWER_BYTES,
    ) -> None:
        """Prepare the connection; nothing is sent yet. Raises ConfigurationError if `url` is not an http(s) address."""
        address, key = configured(url, api_key)
        self.project = project
        self.retry_seconds = retry_seconds
        self.connection = ServiceConnection(
            address, key, timeout_seconds=timeout_seconds, max_answer_bytes=max_answer_bytes
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    # Runs.

    def runs(
        self,
        *,
        key: str | None = None,
        model: str | None = None,
        model_kind: ModelKind | None = None,
        states: Sequence[str] = (),
        search: str | None = None,
        verdict: Verdict | None = None,
    ) -> Iterator[RunRecord]:
        """Yield the runs that the key may see, newest first; `search` is a part of the name or key.

        `verdict`: only the runs whose diagnosis has it.
        """
        query = {"key": key, "model": model, "model_kind": model_kind, "search": search, "verdict": verdict}
        return self._items("/v1/runs", run_record, state=_several("states", states), **query)

    def run(self, run: str) -> RunRecord:
        """Return a run. Raises RunNotFound."""
        return self._get(_of_run(run), run_record)

    def attempts(self, run: str) -> Iterator[AttemptRecord]:
        """Yield the attempts of a run, in order."""
        return self._items(_of_run(run, "attempts"), _record(AttemptRecord))

    def steps(self, run: str, *, attempt: int | None = None) -> Iterator[StepRecord]:
        """Yield the steps of a run, in order."""
        return self._items(_of_run(run, "steps"), _record(StepRecord), attempt=attempt)

    def changes(self, run: str) -> Iterator[ChangeRecord]:
        """Yield the changes of a run by step: announced ones, and those of the setup."""
        return self._items(_of_run(run, "changes"), _record(ChangeRecord))

    def weights(self, run: str) -> Iterator[WeightsRecord]:
        """Yield what each engine held after each weight sync, as the notary found it, by step and engine."""
        return self._items(_of_run(run, "weights"), _record(WeightsRecord))

    def checkpoints(self, run: str) -> Iterator[CheckpointRecord]:
        """Yield the announced weights of a run, by step."""
        return self._items(_of_run(run, "checkpoints"), _record(CheckpointRecord))

    # Curves.

    def measures(self) -> tuple[MeasureRecord, ...]:
        """Return the registered measures."""
        return self._get("/v1/measures", _all_of(_record(MeasureRecord)), of_project=False)

    def measurements(
        self,
        run: str,
        *,
        measures: Sequence[str] = (),
        comparisons: Sequence[str] = (),
        from_step: int = 0,
        to_step: int | None = None,
        attempt: int | None = None,
        max_points: int | None = None,
    ) -> Measurements:
        """Return curves over the steps `from_step` to `to_step` (included); no measures, no comparisons: all of them.

        `max_points` is the largest number of steps of a comparison; the extremes of each measure are among them.
        """
        return self._get(
            _of_run(run, "measurements"), columns.measurements, measure=_several("measures", measures),
            comparison=_several("comparisons", comparisons), from_step=from_step, to_step=to_step, attempt=attempt,
            max_points=max_points,
        )  # fmt: skip

    def scalars(
        self,
        run: str,
        *,
        names: Sequence[str] = (),
        sources: Sequence[str] = (),
        from_step: int = 0,
        to_step: int | None = None,
        attempt: int | None = None,
        max_points: int | None = None,
    ) -> Scalars:
        """Return scalars over the steps `from_step` to `to_step` (included); no names, no sources: all of them.

        `max_points` is the largest number of steps of a curve, which is one name of one source; its extremes are kept.
        """
        return self._get(
            _of_run(run, "scalars"), columns.scalars, name=_several("names", names),
            source=_several("sources", sources), from_step=from_step, to_step=to_step, attempt=attempt,
            max_points=max_points,
        )  # fmt: skip

    # One step.

    def buckets(
        self,
        run: str,
        step: int,
        *,
        by: BucketCondition = "probability",
        comparison: str = TRAINER_ROLLOUT,
        attempt: int | None = None,
    ) -> Buckets:
        """Return the mismatch of a step in buckets of a condition of its tokens."""
        path = _of_step(run, step, "buckets")
        return self._get(path, columns.buckets, by=by, comparison=comparison, attempt=attempt)

    def worst_tokens(
        self, run: str, step: int, *, count: int = 20, comparison: str = TRAINER_ROLLOUT, attempt: int | None = None
    ) -> Tokens:
        """Return the tokens of a step with the largest |d|, at most 1,000."""
        path = _of_step(run, step, "tokens")
        return self._get(path, columns.tokens, worst=count, comparison=comparison, attempt=attempt)

    def rollout_tokens(
        self,
        run: str,
        step: int,
        sample_id: str,
        *,
        from_position: int = 0,
        to_position: int | None = None,
        comparison: str = TRAINER_ROLLOUT,
        attempt: int | None = None,
    ) -> Tokens:
        """Return one rollout token by token, from one position of the response to another (included)."""
        return self._get(
            _of_step(run, step, "tokens"), columns.tokens, sample_id=sample_id, from_position=from_position,
            to_position=to_position, comparison=comparison, attempt=attempt,
        )  # fmt: skip

    def export_rollouts(self, run: str, step: int, *, attempt: int | None = None) -> bytes:
        """Return the bytes of a Parquet file with every stored rollout of a step, a row each, in the rollout table."""
        return self._ask(_of_step(run, step, "rollouts"), {"attempt": attempt}, accept="*/*").content

    def lint(self, run: str, step: int, *, attempt: int | None = None) -> LintRecord:
        """Return the lint of a step's log-probs: named warnings with evidence, and the checks that were made."""
        return self._get(_of_step(run, step, "lint"), _record(LintRecord), attempt=attempt)

    def corrections(
        self,
        run: str,
        step: int,
        *,
        names: Sequence[str] = (),
        thresholds: Sequence[str] = (),
        comparison: str = TRAINER_ROLLOUT,
        attempt: int | None = None,
    ) -> CorrectionsRecord:
        """Return the effect of corrections on a step: kept tokens, variance, distortion. No names: all of them.

        `thresholds`, such as "2" or "0.5_5", are of the one correction that is named; none: the usual ones.
        """
        return self._get(
            _of_step(run, step, "corrections"), _record(CorrectionsRecord), correction=_several("names", names),
            threshold=_several("thresholds", thresholds), comparison=comparison, attempt=attempt,
        )  # fmt: skip

    def theory(
        self,
        run: str,
        step: int,
        *,
        delta_max: float | None = None,
        gradient_bound: float | None = None,
        comparison: str = TRAINER_ROLLOUT,
        attempt: int | None = None,
    ) -> TheoryRecord:
        """Return bounds on the bias of a step's gradient, and the cost of its noise at η and η/2.

        `delta_max` is the largest exact total variation, `gradient_bound` an upper bound of ‖∇log π‖ of one token.
        """
        return self._get(
            _of_step(run, step, "theory"), _record(TheoryRecord), delta_max=delta_max, gradient_bound=gradient_bound,
            comparison=comparison, attempt=attempt,
        )  # fmt: skip

    def attribution(self, run: str, step: int, *, attempt: int | None = None) -> AttributionRecord:
        """Return the causes of a step's mismatch. Raises Rejected (404) if no scores of the step are published."""
        return self._get(_of_step(run, step, "attribution"), _record(AttributionRecord), attempt=attempt)

    def exact(self, run: str, step: int, *, attempt: int | None = None) -> ExactStepRecord:
        """Return the exact divergences of a step's pairs. Raises Rejected (404) if none are published."""
        return self._get(_of_step(run, step, "exact"), _record(ExactStepRecord), attempt=attempt)

    def routing(self, run: str, step: int, *, attempt: int | None = None) -> tuple[RoutingComparison, ...]:
        """Return the newest comparisons of routed experts of a step. Raises Rejected (404) if none are published."""
        return self._get(_of_step(run, step, "routing"), _all_of(_record(RoutingComparison)), attempt=attempt)

    def layers(
        self, run: str, step: int, *, attempt: int | None = None, pair: str | None = None
    ) -> tuple[LayerComparison, ...]:
        """Return the newest comparison by layer of each pair of scorers of a step, or of one `compared/reference`.

        Raises Rejected (404) if none are published.
        """
        return self._get(_of_step(run, step, "layers"), _all_of(_record(LayerComparison)), attempt=attempt, pair=pair)

    def doctor(self, run: str, step: int, *, attempt: int | None = None) -> DoctorStepRecord:
        """Return the newest report of the doctor on a step. Raises Rejected (404) if it was not examined."""
        return self._get(_of_step(run, step, "doctor"), _record(DoctorStepRecord), attempt=attempt)

    # Judgements.

    def diagnosis(self, run: str) -> Diagnosis:
        """Return the diagnosis of a run: verdict, headline, what happened, causes, what to do, what is missing."""
        return self._get(_of_run(run, "diagnosis"), diagnosis_of)

    def findings(
        self,
        run: str | None = None,
        *,
        sources: Sequence[str] = (),
        severities: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> Iterator[FindingRecord]:
        """Yield the conclusions from a run's data, the last changed first; None: from all runs that the key may see.

        `sources` are for example "attribution" and "lint"; `names` are for a list over runs.
        """
        return self._items(
            "/v1/findings" if run is None else _of_run(run, "findings"), _record(FindingRecord),
            source=_several("sources", sources), severity=_several("severities", severities),
            name=_several("names", names),
        )  # fmt: skip

    def alerts(self, run: str, *, states: Sequence[str] = ()) -> Iterator[AlertRecord]:
        """Yield the alerts of a run, newest step first; no states: in any."""
        return self._items(_of_run(run, "alerts"), _record(AlertRecord), state=_several("states", states))

    def alerts_of_runs(
        self, *, states: Sequence[str] = (), severities: Sequence[str] = (), rules: Sequence[str] = ()
    ) -> Iterator[AlertOfRun]:
        """Yield the alerts of all runs that the key may see, the last changed first."""
        return self._items(
            "/v1/alerts", _record(AlertOfRun), state=_several("states", states),
            severity=_several("severities", severities), rule=_several("rules", rules),
        )  # fmt: skip

    def rules(self, *, model_kind: ModelKind | None = None) -> RulesRecord:
        """Return the service's rules for a kind of model (None: unknown), each with the source of its threshold."""
        return self._get("/v1/rules", _record(RulesRecord), model_kind=model_kind, of_project=False)

    def advice(self, run: str, *, step: int | None = None) -> AdviceRecord:
        """Return the advice of all levers for a step (None: the newest). Trainers use `AdviceFeed`, which never
        waits."""
        return self._get(_of_run(run, "advice"), advice_record, step=step)

    def decisions(self, run: str) -> Iterator[DecisionRecord]:
        """Yield the log of decisions on all levers, oldest first."""
        return self._items(_of_run(run, "lr-advice/decisions"), _record(DecisionRecord))

    # Probes.

    def probes(self, run: str, *, step: int | None = None) -> Iterator[ProbeRecord]:
        """Yield the probes of a run, newest first."""
        return self._items(_of_run(run, "probes"), _record(ProbeRecord), step=step)

    def probe(self, probe: str) -> ProbeRecord:
        """Return a probe by its id."""
        return self._get(f"/v1/probes/{_segment(probe)}", _record(ProbeRecord), of_project=False)

    def hardware(self) -> HardwareRecord:
        """Return the workers, the one seen last first, and the accelerators with their jobs."""
        return self._get("/v1/hardware", _record(HardwareRecord), of_project=False)

    # Changes.

    def set_advice_mode(self, run: str, mode: AdviceMode, *, lever: Lever = "rate") -> RunRecord:
        """Set whether the trainer follows a lever ("apply") or it is only shown ("shadow"), and return the run."""
        name = "advice_mode" if lever == "rate" else f"{lever}_mode"
        return self._change("PATCH", _of_run(run), run_record, **{name: mode})

    def hold(self, run: str, reason: str, *, lever: Lever = "rate") -> AdviceRecord:
        """Freeze a lever, and return the advice that follows; `reason` is kept in the log of decisions.

        Raises Rejected (409) if the decision changes nothing, or the run has ended. The key needs `admin`.
        """
        path = _of_run(run, "advice/decisions")
        return self._change("POST", path, advice_record, lever=lever, kind="hold", reason=reason)

    def halve(self, run: str, reason: str) -> AdviceRecord:
        """Halve the learning rate, and return the advice that follows; `reason` is kept in the log of decisions.

        Raises Rejected (409) if the run has ended. The key needs `admin`.
        """
        return self._change("POST", _of_run(run, "advice/decisions"), advice_record, kind="halve", reason=reason)

    def request_probe(
        self,
        run: str,
        step: int,
        *,
        scorers: Sequence[str] = (),
        exact_pairs: Sequence[str] = (),
        kind: str = "exact",
        attempt: int | None = None,
        accelerator: str | None = None,
        max_rollouts: int | None = None,
        priority: PriorityName | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> ProbeRecord:
        """Request that workers score a step's rollouts again; an equal request returns the same probe.

        `scorers` are names such as "vllm.prefill", or "vllm.prefill@rebatched" for a variant; `exact_pairs` are
        comparisons to compute over the whole vocabulary; `options` are by scorer. docs/probes.md describes the kinds.
        """
        split = map(split_score_name, _several("scorers", scorers))
        named = [{"scorer": scorer, "variant": variant} for scorer, variant in split]
        return self._change(
            "POST", _of_run(run, "probes"), _record(ProbeRecord), step=step, scorers=named,
            exact_pairs=_several("exact_pairs", exact_pairs), kind=kind, attempt=attempt, accelerator=accelerator,
            max_rollouts=max_rollouts, priority=priority, options=options,
        )  # fmt: skip

    def examine_step(
        self,
        run: str,
        step: int,
        *,
        attempt: int | None = None,
        budget_seconds: float | None = None,
        max_rollouts: int | None = None,
        against: str | None = None,
    ) -> ProbeRecord:
        """Have the doctor examine a step, and return its probe; `doctor` has the report when it is done.

        `budget_seconds`: the time for replays (default: DOCTOR_SECONDS of `foreshock.probe_kinds`); `against`: the id
        of another run of the project, whose weights and configuration are tried too.
        """
        return self._change(
            "POST", _of_run(run, "probes"), _record(ProbeRecord), step=step, kind="doctor", attempt=attempt,
            budget_seconds=budget_seconds, max_rollouts=max_rollouts, against=against,
        )  # fmt: skip

    def delete_run(self, run: str) -> None:
        """Delete a run; later calls that name it, late uploads included, are Rejected (410). The key needs `admin`.

        Its files go after the service's grace, and its key stays taken.
        """
        self.connection.request("DELETE", _of_run(run), query={"project": self.project})

    # Requests.

    def _ask(
        self,
        path: str,
        query: Mapping[str, Any],
        *,
        of_project: bool = True,
        accept: str = "application/json",
    ) -> httpx.Response:
        """Return the answer to a GET, asked again while the service is away or busy. Raises ServiceError."""
        named = {**query, "project": self.project if of_project else None}
        # A parameter with several values is repeated.
        pairs = [(name, each) for name, value in named.items() for each in (value if type(value) is list else [value])]
        return retry(
            lambda: self.connection.request("GET", path, query=pairs, headers={"Accept": accept}),
            Backoff(first_seconds=0.25, longest_seconds=5.0),
            # A request to a wrong address will not succeed later.
            is_retryable=lambda error: isinstance(error, ServiceUnavailable) and not isinstance(error, WrongService),
            deadline_seconds=self.retry_seconds,
        )

    def _get(self, path: str, read: Read[Answer], *, of_project: bool = True, **query: Any) -> Answer:
        """Return what `read` makes of the JSON at a path. Raises ServiceError."""
        return self._decoded(self._ask(path, query, of_project=of_project), read)

    def _items(self, path: str, read: Read[Answer], **query: Any) -> Iterator[Answer]:
        """Yield the items of a list, page after page. Raises ServiceError."""
        cursor: str | None = None
        while True:
            items, cursor = self._get(
                path, lambda page: (_all_of(read)(page), page.get("next_cursor")), limit=ITEMS_ON_A_PAGE,
                cursor=cursor, **query,
            )  # fmt: skip
            yield from items
            if cursor is None:
                return

    def _change(self, method: Literal["POST", "PATCH"], path: str, read: Read[Answer], **body: Any) -> Answer:
        """Send a change once, without the values that are None, and return the answer. Raises ServiceError."""
        query = {"project": self.project}
        return self._decoded(self.connection.request(method, path, query=query, json_body=given(body)), read)

    def _decoded(self, response: httpx.Response, read: Read[Answer]) -> Answer:
        """Return what `read` makes of the JSON of an answer. Raises WrongService if it cannot be read."""
        value = self.connection.decoded(response)
        try:
            return read(value)
        except (KeyError, TypeError, ValueError) as error:
            path, problem = response.request.url.path, f"{type(error).__name__}: {error}"
            raise WrongService(
                f"this release cannot read the answer of {self.connection.url} to {path} ({problem}); check "
                "FORESHOCK_URL, and that client and service are at most one release apart"
            ) from error


def _of_run(run: str, below: str = "") -> str:
    """Return the path of a run, or of what is below it."""
    return f"/v1/runs/{_segment(run)}{below and '/'}{below}"


def _of_step(run: str, step: int, below: str) -> str:
    return f"{_of_run(run, 'steps')}/{step}/{below}"


def _segment(name: str) -> str:
    """Return a name as one segment of a path: a run's key may have a slash."""
    return quote(name, safe="")


def _record(kind: type[Answer]) -> Read[Answer]:
    return functools.partial(parse, kind)


def _all_of(read: Read[Answer]) -> Read[tuple[Answer, ...]]:
    """Return the function that reads the items of a list."""
    return lambda value: tuple(read(item) for item in value["items"])


def _several(argument: str, values: Sequence[str]) -> list[str]:
    """Return the values of an argument. Raises TypeError for one text instead of several."""
    if isinstance(values, str):
        raise TypeError(f"{argument} takes several names, such as [{values!r}], got {values!r}")
    return list(values)

"""Read from the service in a script or a notebook.

    with foreshock.Reader() as reader:
        for run in reader.runs(states=["running"]):
            steps, k3 = reader.measurements(run.id, measures=["k3_kl"]).curve("trainer/rollout", "k3_kl")

    async with foreshock.AsyncReader() as reader:
        async for run in reader.runs(states=["running"]):
            measured = await reader.measurements(run.id, measures=["k3_kl"])

`run` is a run's id or key, `comparison` is `target/behaviour`, such as "trainer/rollout"; `attempt=None` means the
active steps of all attempts.
"""

# mypy: disable-error-code="empty-body"

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from foreshock.api.diagnosis import Diagnosis, Verdict
from foreshock.api.probes import HardwareRecord, ProbePolicyRecord, ProbeRecord
from foreshock.api.records import parse
from foreshock.api.runs import (
    AttemptRecord,
    ChangeRecord,
    CheckpointRecord,
    DeletionRecord,
    FindingRecord,
    MeasureRecord,
    RetentionRecord,
    RunRecord,
    StepRecord,
    WeightsRecord,
)
from foreshock.api.service import ServiceRecord
from foreshock.api.steps import RunLintRecord
from foreshock.api.watch import (
    AdviceRecord,
    AlertOfRun,
    AlertRecord,
    DecisionRecord,
    RulesRecord,
    RunRulesRecord,
)
from foreshock.model_kind import ModelKind
from foreshock.reading.caller import ITEMS_ON_A_PAGE, AsyncCaller, Caller
from foreshock.reading.columns import Measurements, Scalars
from foreshock.reading.described import get, listing
from foreshock.reading.steps import StepMethods

ExportFormat = Literal["csv", "parquet"]


def _alerts(page: Mapping[str, Any]) -> tuple[AlertRecord, ...]:
    return tuple(parse(AlertRecord, item) for item in page["items"])


class _Methods(StepMethods):
    """The methods of both readers."""

    @listing("/v1/runs", states="state")
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

    @get("/v1/runs/{run}")
    def run(self, run: str) -> RunRecord:
        """Return a run. Raises RunNotFound."""

    @listing("/v1/runs/{run}/attempts")
    def attempts(self, run: str) -> Iterator[AttemptRecord]:
        """Yield the attempts of a run, in order."""

    @listing("/v1/runs/{run}/steps")
    def steps(self, run: str, *, attempt: int | None = None) -> Iterator[StepRecord]:
        """Yield the steps of a run, in order."""

    @listing("/v1/runs/{run}/changes")
    def changes(self, run: str) -> Iterator[ChangeRecord]:
        """Yield the changes of a run by step: announced ones, and those of the setup."""

    @listing("/v1/runs/{run}/weights")
    def weights(self, run: str) -> Iterator[WeightsRecord]:
        """Yield what each engine held after each weight sync, as the notary found it, by step and engine."""

    @listing("/v1/runs/{run}/checkpoints")
    def checkpoints(self, run: str) -> Iterator[CheckpointRecord]:
        """Yield the announced weights of a run, by step."""

    @listing("/v1/runs/{run}/deletions")
    def deletions(self, run: str) -> Iterator[DeletionRecord]:
        """Yield the deletions of rollouts of a run, newest first, with their progress. The key needs `admin`."""

    @get("/v1/runs/{run}/retention")
    def retention(self, run: str) -> RetentionRecord:
        """Return the rules by which a run keeps its tokens: its own, else those of the service's settings."""

    @listing("/v1/measures", in_project=False, is_paged=False)
    def measures(self) -> Iterator[MeasureRecord]:
        """Yield the registered measures."""

    @get("/v1/runs/{run}/measurements", measures="measure", comparisons="comparison")
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

    @get("/v1/runs/{run}/measurements", measures="measure", comparisons="comparison")
    def export_measurements(
        self,
        run: str,
        format: ExportFormat,  # noqa: A002
        *,
        measures: Sequence[str] = (),
        comparisons: Sequence[str] = (),
        from_step: int = 0,
        to_step: int | None = None,
        attempt: int | None = None,
        max_points: int | None = None,
    ) -> bytes:
        """Return the bytes of a CSV or Parquet file with the content of `measurements`."""

    @get("/v1/runs/{run}/scalars", names="name", sources="source")
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

    @get("/v1/runs/{run}/scalars", names="name", sources="source")
    def export_scalars(
        self,
        run: str,
        format: ExportFormat,  # noqa: A002
        *,
        names: Sequence[str] = (),
        sources: Sequence[str] = (),
        from_step: int = 0,
        to_step: int | None = None,
        attempt: int | None = None,
        max_points: int | None = None,
    ) -> bytes:
        """Return the bytes of a CSV or Parquet file with the content of `scalars`."""

    @get("/v1/runs/{run}/diagnosis")
    def diagnosis(self, run: str) -> Diagnosis:
        """Return the diagnosis of a run: verdict, headline, what happened, causes, what to do, what is missing."""

    @get("/v1/runs/{run}/lint")
    def lint_of_run(self, run: str, *, attempt: int | None = None) -> RunLintRecord:
        """Return the warnings of a run's closed steps, with the first and the newest step of each."""

    @listing("/v1/runs/{run}/findings", sources="source", severities="severity")
    def findings(
        self, run: str, *, sources: Sequence[str] = (), severities: Sequence[str] = ()
    ) -> Iterator[FindingRecord]:
        """Yield the conclusions from a run's data, the last changed first; `sources` are "attribution" and "lint"."""

    @listing("/v1/findings", sources="source", severities="severity", names="name")
    def findings_of_runs(
        self, *, sources: Sequence[str] = (), severities: Sequence[str] = (), names: Sequence[str] = ()
    ) -> Iterator[FindingRecord]:
        """Yield the findings of all runs that the key may see, the last changed first."""

    @listing("/v1/runs/{run}/alerts", states="state")
    def alerts(self, run: str, *, states: Sequence[str] = ()) -> Iterator[AlertRecord]:
        """Yield the alerts of a run, newest step first; no states: in any."""

    @get("/v1/runs/{run}/alerts", fixed=[("limit", ITEMS_ON_A_PAGE)], read=_alerts, states="state")
    def changed_alerts(
        self, run: str, *, states: Sequence[str] = (), wait_seconds: float = 20.0
    ) -> tuple[AlertRecord, ...]:
        """Return the newest 500 alerts of a run once one has changed since this reader's last call, or after the time.

        The first call does not wait. `wait_seconds` is at most 30.
        """

    @listing("/v1/alerts", states="state", severities="severity", rules="rule")
    def alerts_of_runs(
        self, *, states: Sequence[str] = (), severities: Sequence[str] = (), rules: Sequence[str] = ()
    ) -> Iterator[AlertOfRun]:
        """Yield the alerts of all runs that the key may see, the last changed first."""

    @get("/v1/runs/{run}/lr-advice")
    def advice(self, run: str, *, step: int | None = None, wait_seconds: float = 0.0) -> AdviceRecord:
        """Return the learning-rate advice for a step (None: the newest). Trainers use `AdviceFeed`, which never waits.

        With `wait_seconds`, at most 30, it is returned once a decision or an alert has changed it since this reader's
        previous call with the same step, or after that time.
        """

    @listing("/v1/runs/{run}/lr-advice/decisions")
    def decisions(self, run: str) -> Iterator[DecisionRecord]:
        """Yield the log of decisions on the learning rate, oldest first."""

    @get("/v1/runs/{run}/rules")
    def rules(self, run: str, *, step: int | None = None) -> RunRulesRecord:
        """Return the rules that hold for a run at a step (None: the last one), and all versions of its changes."""

    @get("/v1/rules", in_project=False)
    def default_rules(self, *, model_kind: ModelKind | None = None) -> RulesRecord:
        """Return the default rules of a kind of model (None: unknown), each with the source of its threshold."""

    @listing("/v1/runs/{run}/probes")
    def probes(self, run: str, *, step: int | None = None) -> Iterator[ProbeRecord]:
        """Yield the probes of a run, newest first."""

    @listing("/v1/probes")
    def probes_of_runs(self, *, kind: str | None = None) -> Iterator[ProbeRecord]:
        """Yield the probes of all runs that the key may see, newest first; `kind`, for example "exact" or "doctor"."""

    @get("/v1/probes/{probe}", in_project=False)
    def probe(self, probe: str) -> ProbeRecord:
        """Return a probe by its id."""

    @get("/v1/runs/{run}/probe-policy")
    def probe_policy(self, run: str) -> ProbePolicyRecord:
        """Return which steps of a run are probed automatically, and what its probes have cost."""

    @get("/v1/hardware", in_project=False)
    def hardware(self) -> HardwareRecord:
        """Return the workers, the one seen last first, and the accelerators with their jobs."""

    @get("/v1/service", in_project=False)
    def service(self) -> ServiceRecord:
        """Return the release of the service, and what it accepts."""


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

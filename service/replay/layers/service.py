"""Comparisons by layer: stored while a job runs, published when it is complete, read by step."""

from __future__ import annotations

from sqlalchemy.orm import Session

from foreshock.comparisons import comparison_name
from foreshock.layer_divergence import LAYERS_KIND, LayerComparison
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables.probe_results import StoredLayerComparison
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.replay.layers.schemas import LayersBody, LayersRead, LayersStepRead
from foreshock_service.replay.leases.result_repository import ResultRepository
from foreshock_service.replay.leases.service import hold
from foreshock_service.runs.attempts.service import resolve_step
from foreshock_service.runs.runs.service import get_run

_RESULTS = ResultRepository(StoredLayerComparison)
# Comparisons of a step that are looked at, newest first, and pairs that are shown.
_MOST_READ, _MOST_PAIRS = 100, 8


class LayersNotFound(ProblemError):
    """No comparison by layer of this step is done: request one with a probe of the kind `layers`."""

    status = 404
    problem_type = "layers-not-found"


class LayersMissing(ProblemError):
    """The job is a comparison by layer and its result was not sent."""

    status = 409
    problem_type = "layers-missing"


class NoLayerComparison(ProblemError):
    """The job requests no comparison by layer, or the result is of another step, scorers or weights than the job."""

    status = 422
    problem_type = "no-layer-comparison"


def store_layers(context: ServiceContext, principal: Principal, lease_id: str, token: int, body: LayersBody) -> None:
    """Store the result of a leased comparison; sent again, it replaces itself.

    Raises LeaseNotFound, LeaseLost, NoLayerComparison.
    """
    context.database.write(lambda session: _store(session, principal, lease_id, token, body))


def publish_layers(session: Session, job: ProbeJob, probe: Probe, token: int, now_us: int) -> None:
    """Publish the result of this try, if its job is a comparison by layer. Raises LayersMissing if it was not sent."""
    if probe.kind != LAYERS_KIND:
        return
    if not _RESULTS.publish(session, job.id, token, now_us):
        raise LayersMissing(
            "the comparison by layer is missing: send it with PUT /v1/leases/{lease}/layers, then complete"
        )


def read_layers(
    session: Session, principal: Principal, run_id: str, step: int, attempt: int | None, pair: str | None
) -> LayersStepRead:
    """Return the newest comparison of each pair of a step. Raises LayersNotFound, RunNotFound, RunDeleted."""
    get_run(session, principal, run_id)
    key = resolve_step(session, run_id, step, attempt)
    newest: dict[str, StoredLayerComparison] = {}
    for row in _RESULTS.newest(session, key, _MOST_READ, **({} if pair is None else {"pair": pair})):
        newest.setdefault(row.pair, row)
    if not newest:
        raise LayersNotFound(
            f"no comparison by layer of {pair or 'any pair'} at step {step} of attempt {key.attempt} is done: request "
            f"one with foreshock probe {run_id} {step} --layers"
        )
    items = [LayersRead.of(LayerComparison.from_dict(row.document)) for row in list(newest.values())[:_MOST_PAIRS]]
    return LayersStepRead(run=run_id, step=key.step, attempt=key.attempt, items=items)


def _store(session: Session, principal: Principal, lease_id: str, token: int, body: LayersBody) -> None:
    _, job, probe = hold(session, principal, lease_id, token)
    if probe.kind != LAYERS_KIND:
        raise NoLayerComparison(f"the job is of a probe of the kind {probe.kind!r}, expected {LAYERS_KIND!r}")
    asked = [each["scorer"] for each in job.scorers]
    if (body.step, [body.compared, body.reference]) != (probe.step, asked):
        raise NoLayerComparison(
            f"got step {body.step} of {body.compared} and {body.reference}, expected step {probe.step} of "
            f"{' and '.join(asked)}"
        )
    for fingerprint in (body.compared_fingerprint, body.reference_fingerprint):
        used = fingerprint.get("weights_digest")
        if used not in (None, probe.checkpoint["digest"]):
            raise NoLayerComparison(f"its fingerprint has the weights {used}, expected those of the probe")
    row = {
        "job_id": job.id,
        "token": token,
        "run_id": probe.run_id,
        "attempt": probe.attempt,
        "step": probe.step,
        "pair": comparison_name(body.compared, body.reference),
        "document": body.model_dump(mode="json"),
        "published_at_us": None,
    }
    _RESULTS.put(session, row)

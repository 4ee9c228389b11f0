"""Comparisons by layer: where in the network two scorers depart."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, status

from foreshock.comparisons import comparison_name
from foreshock.layer_divergence import LayerComparison
from foreshock.probe_kinds import LAYERS as LAYERS_PROBE
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob, StoredLayerComparison
from foreshock_service.platform.parameters import ActiveOrAttempt, StepPath
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Reader, Worker
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.probes.schemas import PairKey
from foreshock_service.replay.results.documents import DocumentKind, foreign_weights, newest_by_pair, visible_step
from foreshock_service.replay.results.layers_schemas import LayersBody, LayersRead, LayersStepRead
from foreshock_service.runs.run_endpoints import RunIdentifier

router = APIRouter(prefix="/v1")

# Comparisons of a step that are read, newest first, and pairs that are shown.
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


def _check(body: LayersBody, job: ProbeJob, probe: Probe) -> str | None:
    asked = [each["scorer"] for each in job.scorers]
    if (body.step, [body.compared, body.reference]) != (probe.step, asked):
        return (
            f"got step {body.step} of {body.compared} and {body.reference}, expected step {probe.step} of "
            f"{' and '.join(asked)}"
        )
    used = foreign_weights((body.compared_fingerprint, body.reference_fingerprint), probe)
    return f"its fingerprint has the weights {used}, expected those of the probe" if used is not None else None


LAYERS = DocumentKind(
    probe=LAYERS_PROBE,
    noun="comparison by layer",
    table=StoredLayerComparison,
    check=_check,
    columns=lambda body, probe: {"pair": comparison_name(body.compared, body.reference)},
    missing=LayersMissing,
    wrong=NoLayerComparison,
)


@router.put("/leases/{lease}/layers", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_layers(
    lease: LeaseIdentifier, token: LeaseToken, body: LayersBody, context: Context, principal: Worker
) -> None:
    """Store a comparison by layer; it counts when the job is complete."""
    LAYERS.store(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/layers", tags=["layers"])
def read_layers(
    run: RunIdentifier,
    step: StepPath,
    context: Context,
    principal: Reader,
    attempt: ActiveOrAttempt = None,
    pair: Annotated[PairKey | None, Query(description="`compared/reference`; absent: the newest pairs")] = None,
) -> LayersStepRead:
    """Return the newest comparison by layer of each pair at a step: where in the network two scorers depart.

    404 `layers-not-found`: none is done; request a probe of the kind `layers`.
    """
    with context.database.read() as session:
        key = visible_step(session, principal, run, step, attempt)
        rows = LAYERS.newest(session, key, _MOST_READ, **({} if pair is None else {"pair": pair}))
    if not rows:
        raise LayersNotFound(
            f"no comparison by layer of {pair or 'any pair'} at step {step} of attempt {key.attempt} is done: request "
            f"one with foreshock probe {run} {step} --layers"
        )
    newest = newest_by_pair(rows, _MOST_PAIRS)
    items = [LayersRead.of(LayerComparison.from_dict(row.document)) for row in newest]
    return LayersStepRead(run=run, step=key.step, attempt=key.attempt, items=items)

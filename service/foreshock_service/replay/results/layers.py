"""Comparisons by layer: where in the network two scorers diverge."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Query, status

from foreshock import layer_divergence, probe_kinds
from foreshock.api.records import Record, parse
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Probe, ProbeJob
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.probes.schemas import PairKey
from foreshock_service.replay.results.documents import DocumentKind, foreign_weights
from foreshock_service.runs.attempts import StepOfRequest

router = parameters.api_router(prefix="/v1")

MOST_LAYERS = 1_000
_MOST_PAIRS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersStepRecord(Record):
    """The newest comparison of each pair of a step, the newest first."""

    run: str
    attempt: int
    step: int
    items: tuple[layer_divergence.LayerComparison, ...]


def _check(body: layer_divergence.LayerComparison, job: ProbeJob, probe: Probe) -> str | None:
    asked = [each["scorer"] for each in job.scorers]
    if (body.step, [body.compared, body.reference], body.pair) != (probe.step, asked, "/".join(asked)):
        return (
            f"got step {body.step} of {body.compared} and {body.reference}, expected step {probe.step} of "
            f"{' and '.join(asked)}"
        )
    if not 3 <= len(body.layers) <= MOST_LAYERS + 2:
        return f"a comparison has 3 to {MOST_LAYERS + 2} places, got {len(body.layers)}"
    expected = layer_divergence.names_of_places(len(body.layers) - 2)
    if tuple(layer.name for layer in body.layers) != expected:
        return f"layers must be {expected[0]}, {expected[1]}, … {expected[-1]} in this order"
    return foreign_weights((body.compared_fingerprint, body.reference_fingerprint), probe)


KIND = DocumentKind(
    probe=probe_kinds.LAYERS,
    noun="comparison by layer",
    check=_check,
    pair=lambda body: body.pair,
)


@router.put("/leases/{lease}/layers", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_layers(
    lease: LeaseIdentifier,
    token: LeaseToken,
    body: layer_divergence.LayerComparison,
    context: Context,
    principal: security.Worker,
) -> None:
    """Store a comparison by layer; it counts when the job is complete."""
    KIND.store(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/layers", tags=["layers"])
def read_layers(
    asked: StepOfRequest,
    pair: Annotated[PairKey | None, Query(description="`compared/reference`; absent: the newest pairs")] = None,
) -> LayersStepRecord:
    """Return the newest comparison by layer of each pair at a step: where in the network two scorers depart.

    404 `result-not-found`: none is done; request a probe of the kind `layers`.
    """
    key, found = KIND.of_step(asked, _MOST_PAIRS, pair)
    items = tuple(parse(layer_divergence.LayerComparison, row.document) for row, _ in found)
    return LayersStepRecord(run=key.run_id, step=key.step, attempt=key.attempt, items=items)

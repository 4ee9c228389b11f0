"""Comparisons by layer: where in the network two scorers diverge."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, status

from foreshock import comparisons, layer_divergence, probe_kinds
from foreshock.api.records import Record, from_attributes
from foreshock_service.platform import parameters, problem, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Probe, ProbeJob
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.probes.schemas import PairKey
from foreshock_service.replay.results.documents import DocumentKind, foreign_weights
from foreshock_service.runs.run_endpoints import RunIdentifier

router = APIRouter(prefix="/v1")

MOST_LAYERS = 1_000
_MOST_PAIRS = 8


class LayersNotFound(problem.ProblemError, status=404, problem_type="layers-not-found"):
    """No comparison by layer of this step is done: request one with a probe of the kind `layers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord(Record):
    """One place as it is shown: `embeddings`, the output of `layers.N`, or `norm`, the input of the head."""

    name: str
    distance: layer_divergence.Distance
    """of the compared scorer from the reference"""
    compared_floor: layer_divergence.Distance
    """of the compared scorer in other batches from itself"""
    reference_floor: layer_divergence.Distance
    """of the reference in other batches from itself"""
    departs: bool
    """the interval of `relative_l2` lies above those of both noise floors"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersRecord(Record):
    """A comparison of two scorers by layer, from the embeddings to the input of the head."""

    pair: str
    """`compared/reference`"""
    compared: str
    reference: str
    rollouts: int
    """rollouts with a compared state"""
    groups: int
    """prompt groups of these rollouts"""
    tokens: int
    """response tokens of the probe"""
    states: int
    """compared states, at each place"""
    non_finite: int
    """states left out: a distance is NaN or infinite"""
    departure: str | None
    """the first place that departs; null: none does beyond its noise floor"""
    sentence: str
    layers: tuple[LayerRecord, ...]
    compared_fingerprint: Mapping[str, Any]
    reference_fingerprint: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersStepRecord(Record):
    """The newest comparison of each pair of a step, the newest first."""

    run: str
    attempt: int
    step: int
    items: tuple[LayersRecord, ...]


def _check(body: layer_divergence.LayerComparison, job: ProbeJob, probe: Probe) -> str | None:
    asked = [each["scorer"] for each in job.scorers]
    if (body.step, [body.compared, body.reference]) != (probe.step, asked):
        return (
            f"got step {body.step} of {body.compared} and {body.reference}, expected step {probe.step} of "
            f"{' and '.join(asked)}"
        )
    if not 3 <= len(body.layers) <= MOST_LAYERS + 2:
        return f"a comparison has 3 to {MOST_LAYERS + 2} places, got {len(body.layers)}"
    expected = layer_divergence.names_of_places(len(body.layers) - 2)
    if tuple(layer.name for layer in body.layers) != expected:
        return f"layers must be {expected[0]}, {expected[1]}, … {expected[-1]} in this order"
    if min(body.rollouts, body.groups, body.tokens, body.states, body.non_finite, *map(_smallest, body.layers)) < 0:
        return "counts and distances must be at least 0"
    return foreign_weights((body.compared_fingerprint, body.reference_fingerprint), probe)


def _smallest(layer: layer_divergence.ComparedLayer) -> float:
    distances = (layer.distance, layer.compared_floor, layer.reference_floor)
    means = [each.relative_l2 for each in distances]
    values = [each for mean in means for each in (mean.mean, mean.low, mean.high)]
    return min(each for each in (*values, *(each.relative_l2_p99 for each in distances), 0.0) if each is not None)


KIND = DocumentKind(
    probe=probe_kinds.LAYERS,
    noun="comparison by layer",
    check=_check,
    pair=lambda body: comparisons.comparison_name(body.compared, body.reference),
    not_found=LayersNotFound,
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
    run: RunIdentifier,
    step: parameters.StepPath,
    context: Context,
    principal: security.Reader,
    attempt: parameters.ActiveOrAttempt = None,
    pair: Annotated[PairKey | None, Query(description="`compared/reference`; absent: the newest pairs")] = None,
) -> LayersStepRecord:
    """Return the newest comparison by layer of each pair at a step: where in the network two scorers depart.

    404 `layers-not-found`: none is done; request a probe of the kind `layers`.
    """
    key, found = KIND.of_step(context, principal, run, step, attempt, _MOST_PAIRS, pair)
    items = tuple(_record(row.pair, layer_divergence.LayerComparison.from_dict(row.document)) for row, _ in found)
    return LayersStepRecord(run=run, step=key.step, attempt=key.attempt, items=items)


def _record(pair: str, found: layer_divergence.LayerComparison) -> LayersRecord:
    layers = tuple(from_attributes(LayerRecord, layer) for layer in found.layers)
    return from_attributes(LayersRecord, found, pair=pair, sentence=found.in_words(), layers=layers)

"""Comparisons of the routed experts of two scorers of a mixture of experts."""

from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import status

from foreshock import comparisons, probe_kinds, routing, scorers
from foreshock.api.records import Record, parse
from foreshock.measures.estimators.intervals import Interval
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Probe, ProbeJob
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.results.documents import DocumentKind, foreign_weights
from foreshock_service.runs.attempts import StepOfRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord(routing.RoutingComparison):
    """A published comparison, and how it was made."""

    rollouts: int
    """rollouts of the probe"""
    tokens: int
    """response tokens of the probe"""
    from_sample: bool
    """a part of the step's rollouts"""
    published_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStepRecord(Record):
    """The newest comparison of each pair of scores at a step, the newest first."""

    run: str
    attempt: int
    step: int
    items: tuple[RoutingRecord, ...]


router = parameters.api_router(prefix="/v1")

_MOST_PAIRS = 16


def _check(body: routing.RoutingComparison, job: ProbeJob, probe: Probe) -> str | None:
    asked = [scorers.score_name(each["scorer"], each["variant"]) for each in job.scorers]
    if [body.target, body.behaviour] != asked:
        return f"got routes of {body.target} and {body.behaviour}, expected those of {' and '.join(asked)}"
    measures = body.measures
    layers = [each.layer for each in measures.layers]
    if not 1 <= len(layers) <= routing.MOST_LAYERS or layers != sorted(set(layers)):
        return f"a comparison has 1 to {routing.MOST_LAYERS} layers in rising order, each once"
    shares = [measures.any_difference, measures.k3_share]
    shares += [share for each in measures.layers for share in (each.agreement, each.overlap, each.first_differences)]
    parts = (measures.all_tokens, measures.agreeing, measures.differing)
    nats = [interval for part in parts for interval in (part.k3_kl, part.abs_d)]
    if max(_bounds(shares)) > 1 or min(_bounds([*shares, *nats])) < 0:
        return "shares must be from 0 to 1, means in nats at least 0"
    if min(measures.top_k, *layers, measures.groups, measures.excluded, *(part.tokens for part in parts)) < 0:
        return "counts must be at least 0"
    return foreign_weights((body.target_fingerprint, body.behaviour_fingerprint), probe)


def _bounds(intervals: Iterable[Interval]) -> list[float]:
    values = (value for each in intervals for value in (each.mean, each.low, each.high, 0.0))
    return [value for value in values if value is not None]


KIND = DocumentKind(
    probe=probe_kinds.ROUTING,
    noun="comparison of routed experts",
    check=_check,
    pair=lambda body: comparisons.comparison_name(body.target, body.behaviour),
)


@router.put("/leases/{lease}/routing", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_routing(
    lease: LeaseIdentifier,
    token: LeaseToken,
    body: routing.RoutingComparison,
    context: Context,
    principal: security.Worker,
) -> None:
    """Store a comparison of routed experts; it counts when the job is complete."""
    KIND.store(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/routing", tags=["routing"])
def read_routing(asked: StepOfRequest) -> RoutingStepRecord:
    """Return the newest comparison of routed experts of each pair of scorers at a step.

    404 `result-not-found`: none is done; request a probe of the kind `routing`.
    """
    key, found = KIND.of_step(asked, _MOST_PAIRS)
    items = tuple(
        parse(
            RoutingRecord,
            {
                **row.document,
                **{name: getattr(probe, name) for name in ("rollouts", "tokens", "from_sample")},
                "published_at_us": row.published_at_us,
            },
        )
        for row, probe in found
    )
    return RoutingStepRecord(run=key.run_id, attempt=key.attempt, step=key.step, items=items)

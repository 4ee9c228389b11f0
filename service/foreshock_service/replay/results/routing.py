"""Comparisons of the routed experts of two scorers of a mixture of experts."""

import itertools
from typing import Annotated, Any, Generic, Self, TypeVar

from fastapi import APIRouter, status
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from foreshock import comparisons, interval_names, probe_kinds, routing, scorers
from foreshock_service.platform import parameters, problem, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Probe, ProbeJob
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.results.documents import DocumentKind, foreign_weights
from foreshock_service.runs.run_endpoints import RunIdentifier

Count = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ScoreName = Annotated[str, StringConstraints(max_length=201, pattern=r"^[a-z0-9_]+\.[a-z0-9_]+(@[a-z0-9_.-]+)?$")]


Number = TypeVar("Number")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class IntervalBody(_Strict, Generic[Number]):
    """A mean with its bootstrap-t interval by prompt group; null if it cannot be estimated."""

    mean: Number | None
    low: Number | None = Field(description=f"of a {interval_names.RANGE}. {interval_names.RANGE_NOTE}")
    high: Number | None
    clusters: Count = Field(description="prompt groups with such tokens")


class ShareInterval(IntervalBody[Share]):
    """A share of tokens, 0 to 1."""


class NatsInterval(IntervalBody[Nats]):
    """A token mean in nats."""


class LayerRoutingBody(_Strict):
    """The routing of one layer."""

    layer: Count = Field(description="number of the layer in the model, from 0")
    agreement: ShareInterval = Field(description="share of tokens with the same set of experts")
    overlap: ShareInterval = Field(description="mean share of a token's experts that both sides chose")
    first_differences: ShareInterval = Field(description="share of tokens whose first layer with a difference is this")


class RoutedTokensBody(_Strict):
    """The mismatch of some of the tokens."""

    tokens: Count
    rollouts: Count
    k3_kl: NatsInterval = Field(description="mean k3; over all tokens an estimate of KL(μ‖π)")
    abs_d: NatsInterval = Field(description="mean |log π − log μ|")


class RoutingMeasuresBody(_Strict):
    """Agreement of the experts of the target π and the behaviour μ over model-generated tokens."""

    top_k: int = Field(ge=1, lt=2**15, description="experts that each layer routes a token to")
    layers: list[LayerRoutingBody] = Field(min_length=1, max_length=routing.MOST_LAYERS)
    any_difference: ShareInterval = Field(description="share of tokens with another set of experts in any layer")
    k3_share: ShareInterval = Field(description="share of the sum of k3 that these tokens carry")
    all_tokens: RoutedTokensBody
    agreeing: RoutedTokensBody = Field(description="tokens with the same experts in all layers")
    differing: RoutedTokensBody = Field(description="tokens with a difference in any layer")
    groups: Count = Field(description="prompt groups, by which the intervals are clustered")
    excluded: Count = Field(description="tokens left out: their log-prob is not finite, or no state is before them")

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        numbers = [each.layer for each in self.layers]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise ValueError("layers must be in rising order, each once")
        return self


class RoutingBody(_Strict):
    """A comparison of routed experts, as a worker sends it."""

    target: ScoreName = Field(description="the score that gives π: a scorer, or scorer@variant")
    behaviour: ScoreName = Field(description="the score that gives μ: a scorer, or scorer@variant")
    target_fingerprint: parameters.JsonObject
    behaviour_fingerprint: parameters.JsonObject
    measures: RoutingMeasuresBody


class RoutingRead(RoutingBody):
    """A published comparison, and how it was made."""

    model_config = ConfigDict(extra="ignore")

    # Checked when it was stored.
    target_fingerprint: dict[str, Any]
    behaviour_fingerprint: dict[str, Any]
    rollouts: int = Field(description="rollouts of the probe")
    tokens: int = Field(description="response tokens of the probe")
    from_sample: bool = Field(description="a part of the step's rollouts")
    published_at_us: int


class RoutingStepRead(BaseModel):
    """The newest comparison of each pair of scores at a step, the newest first."""

    run: str
    attempt: int
    step: int
    items: list[RoutingRead]


router = APIRouter(prefix="/v1")

_MOST_PAIRS = 16


class RoutingNotFound(problem.ProblemError, status=404, problem_type="routing-not-found"):
    """No routed experts of this step are compared: request a probe of the kind `routing`."""


def _check(body: RoutingBody, job: ProbeJob, probe: Probe) -> str | None:
    asked = [scorers.score_name(each["scorer"], each["variant"]) for each in job.scorers]
    if [body.target, body.behaviour] != asked:
        return f"got routes of {body.target} and {body.behaviour}, expected those of {' and '.join(asked)}"
    return foreign_weights((body.target_fingerprint, body.behaviour_fingerprint), probe)


KIND = DocumentKind(
    probe=probe_kinds.ROUTING,
    noun="comparison of routed experts",
    check=_check,
    pair=lambda body: comparisons.comparison_name(body.target, body.behaviour),
    not_found=RoutingNotFound,
)


@router.put("/leases/{lease}/routing", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_routing(
    lease: LeaseIdentifier, token: LeaseToken, body: RoutingBody, context: Context, principal: security.Worker
) -> None:
    """Store a comparison of routed experts; it counts when the job is complete."""
    KIND.store(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/routing", tags=["routing"])
def read_routing(
    run: RunIdentifier,
    step: parameters.StepPath,
    context: Context,
    principal: security.Reader,
    attempt: parameters.ActiveOrAttempt = None,
) -> RoutingStepRead:
    """Return the newest comparison of routed experts of each pair of scorers at a step.

    404 `routing-not-found`: none is done; request a probe of the kind `routing`.
    """
    key, found = KIND.of_step(context, principal, run, step, attempt, _MOST_PAIRS)
    items = [
        RoutingRead.model_validate(
            row.document
            | {name: getattr(probe, name) for name in ("rollouts", "tokens", "from_sample")}
            | {"published_at_us": row.published_at_us}
        )
        for row, probe in found
    ]
    return RoutingStepRead(run=run, attempt=key.attempt, step=key.step, items=items)

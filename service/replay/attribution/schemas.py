"""What the attribution of a step looks like over HTTP; the same document is what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, Field

from foreshock.json_values import finite_or_none
from foreshock.measures.estimators.attribution import Attribution, Link, SideBranch
from service.replay.attribution.compute import Floor
from service.replay.attribution.excess import excess_over_floors
from service.runs.step_key import StepKey


class LinkRead(BaseModel):
    """One comparison `target/behaviour`, in nats per token; null where it cannot be estimated."""

    name: str
    cause: str
    k3_kl: float | None
    excess_k3_kl: float | None = Field(
        description="k3 less half the noise floor of each of its two ends; may be below 0; null where one is not known"
    )
    mean_d: float | None
    rms_d: float | None
    max_abs_d: float | None
    share: float | None = Field(description="E[d_link·d]/E[d²]; the shares of the links add to 1")
    share_low: float | None = Field(description="95 % bootstrap interval by prompt group")
    share_high: float | None

    @classmethod
    def of(cls, link: Link, floors: Mapping[str, float]) -> Self:
        """The link as it is shown."""
        return cls(
            name=link.name,
            cause=link.cause,
            k3_kl=finite_or_none(link.k3_kl),
            excess_k3_kl=excess_over_floors(link.name, link.k3_kl, floors),
            mean_d=finite_or_none(link.mean_d),
            rms_d=finite_or_none(link.rms_d),
            max_abs_d=finite_or_none(link.max_abs_d),
            share=finite_or_none(link.share),
            share_low=finite_or_none(link.share_low),
            share_high=finite_or_none(link.share_high),
        )


class SideBranchRead(BaseModel):
    """Every score against float32: which of engine and trainer is nearer to the truth."""

    reference: str
    links: list[LinkRead]
    engine: str | None
    trainer: str | None
    nearer: str | None = Field(description="the nearer of the two, `equal`, or null where one is missing")
    tokens: int
    rollouts: int

    @classmethod
    def of(cls, branch: SideBranch, floors: Mapping[str, float]) -> Self:
        """The branch as it is shown."""
        return cls(
            reference=branch.reference,
            links=[LinkRead.of(link, floors) for link in branch.links],
            engine=branch.engine,
            trainer=branch.trainer,
            nearer=branch.nearer,
            tokens=branch.tokens,
            rollouts=branch.rollouts,
        )


class FloorRead(BaseModel):
    """The noise floor of a scorer: itself again, with other batches. Half of its k3 is in each comparison."""

    scorer: str
    comparison: str
    k3_kl: float | None
    mean_abs_d: float | None
    max_abs_d: float | None
    rollouts: int
    tokens: int

    @classmethod
    def of(cls, floor: Floor) -> Self:
        """The floor as it is shown."""
        return cls(
            scorer=floor.scorer,
            comparison=floor.comparison,
            k3_kl=finite_or_none(floor.k3_kl),
            mean_abs_d=finite_or_none(floor.mean_abs_d),
            max_abs_d=finite_or_none(floor.max_abs_d),
            rollouts=floor.rollouts,
            tokens=floor.tokens,
        )


class ScoreSource(BaseModel):
    """A replayed score that took part: what made it."""

    scorer: str
    variant: str
    fingerprint_digest: str
    fingerprint: dict[str, Any]
    accelerator: str
    device_name: str
    rollouts: int


class AttributionRead(BaseModel):
    """Where the mismatch of a step comes from: the chain of scores from logged `rollout` to logged `trainer`."""

    run: str
    step: int
    attempt: int
    chain: list[str]
    missing: list[str] = Field(description="scores of the full chain that are not there; their links are one")
    links: list[LinkRead]
    whole: LinkRead
    side_branch: SideBranchRead | None
    floors: list[FloorRead]
    cancellation: float | None = Field(description="Σ E[d_link²]/E[d²]: above 1 where links cancel")
    telescoping_error: float = Field(description="the largest |Σ d_link − d| of a token, nats")
    tokens: int = Field(description="that every score of the chain has")
    rollouts: int
    groups: int
    of_rollouts: int = Field(description="rollouts of the step")
    from_sample: bool = Field(description="not all rollouts of the step took part")
    scores: list[ScoreSource]
    computed_at_us: int

    @classmethod
    def of(
        cls,
        key: StepKey,
        attribution: Attribution,
        floors: Sequence[Floor],
        of_rollouts: int,
        scores: Sequence[ScoreSource],
        computed_at_us: int,
    ) -> Self:
        """The document of (run, attempt, step)."""
        of_scorer = {floor.scorer: floor.k3_kl for floor in floors}
        branch = attribution.side_branch
        return cls(
            run=key.run_id,
            attempt=key.attempt,
            step=key.step,
            chain=list(attribution.chain),
            missing=list(attribution.missing),
            links=[LinkRead.of(link, of_scorer) for link in attribution.links],
            whole=LinkRead.of(attribution.whole, of_scorer),
            side_branch=SideBranchRead.of(branch, of_scorer) if branch is not None else None,
            floors=[FloorRead.of(floor) for floor in floors],
            cancellation=finite_or_none(attribution.cancellation),
            telescoping_error=attribution.telescoping_error,
            tokens=attribution.tokens,
            rollouts=attribution.rollouts,
            groups=attribution.groups,
            of_rollouts=of_rollouts,
            from_sample=attribution.rollouts < of_rollouts,
            scores=list(scores),
            computed_at_us=computed_at_us,
        )

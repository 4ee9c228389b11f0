"""The stored document of an attribution, and its HTTP schema."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from pydantic import BaseModel, Field

from foreshock.api.runs import IncompleteStep
from foreshock.diagnosis.conclusion import Conclusion
from foreshock.environment import Environment
from foreshock.interval_names import INTERVAL, RANGE, RANGE_NOTE, interval_name
from foreshock.json_values import finite_or_none
from foreshock.measures.estimators.attribution import METHOD, OLD_METHOD, Attribution, Link, SideBranch
from foreshock_service.replay.attribution.compute import (
    AttributionResult,
    Floor,
    MeasuredEnvironmentLink,
    excess_over_floors,
)
from foreshock_service.replay.probes.environments import declared_precision, precision_in_words
from foreshock_service.replay.results.exact_schemas import ExactRead
from foreshock_service.replay.results.files import environment_of
from foreshock_service.replay.results.weights_search_schemas import WeightsSearchRead
from foreshock_service.runs.step_key import StepKey

CALLED = "a 95 % interval only if `interval` says so"
NAME_OF_INTERVAL = f"what the intervals are: `{INTERVAL}`, or `{RANGE}`. {RANGE_NOTE}"
_OF_LINK = ("tokens", "reliable")


class LinkRead(BaseModel):
    """A comparison `target/behaviour` of the chain, in nats per token; null if it cannot be estimated."""

    name: str
    cause: str = Field(description="what can differ between the two scores")
    k3_kl: float | None
    excess_k3_kl: float | None = Field(
        description="k3 less half the noise floor of each of its two ends; may be below 0; null if one is unknown"
    )
    mean_d: float | None
    rms_d: float | None
    max_abs_d: float | None
    share: float | None = Field(description="E[d_link·d]/E[d²]; the shares of the links add to 1")
    share_low: float | None = Field(description=f"bootstrap-t interval by prompt group, {CALLED}")
    share_high: float | None

    @classmethod
    def of(cls, link: Link, floors: Mapping[str, float]) -> Self:
        """Return the link as it is stored."""
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
    """Every score against the float32 forward pass: whether the engine or the trainer is nearer to it."""

    reference: str
    links: list[LinkRead]
    engine: str | None = Field(description="the engine's score that is compared")
    trainer: str | None = Field(description="the trainer's score that is compared")
    nearer: str | None = Field(description="the nearer of the two, `equal`, or null if the data does not tell")
    difference: float | None = Field(
        default=None, description="E[d²] of the engine's score less that of the trainer's, in nats²"
    )
    difference_low: float | None = Field(
        default=None, description=f"bootstrap-t interval, paired by prompt group, {CALLED}; null before it was measured"
    )
    difference_high: float | None = None
    tokens: int
    rollouts: int
    interval: str = Field(default=RANGE, description=NAME_OF_INTERVAL)

    @classmethod
    def of(cls, branch: SideBranch, floors: Mapping[str, float]) -> Self:
        """Return the branch as it is stored."""
        return cls(
            reference=branch.reference,
            links=[LinkRead.of(link, floors) for link in branch.links],
            engine=branch.engine,
            trainer=branch.trainer,
            nearer=branch.nearer,
            difference=finite_or_none(branch.difference),
            difference_low=finite_or_none(branch.difference_low),
            difference_high=finite_or_none(branch.difference_high),
            tokens=branch.tokens,
            rollouts=branch.rollouts,
            interval=interval_name(branch.reliable),
        )


class FloorRead(BaseModel):
    """The noise floor of a scorer: the scorer again with other batches. Half of its k3 is in each comparison of it."""

    scorer: str
    comparison: str
    k3_kl: float | None
    mean_abs_d: float | None
    max_abs_d: float | None
    rollouts: int
    tokens: int

    @classmethod
    def of(cls, floor: Floor) -> Self:
        """Return the floor as it is stored."""
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
    """A replayed score that the attribution uses, with its fingerprint."""

    scorer: str
    variant: str
    fingerprint_digest: str
    fingerprint: dict[str, Any]
    accelerator: str
    device_name: str
    rollouts: int


class EnvironmentRead(BaseModel):
    """Environment that computed a score; null: unknown. `words` describe the hardware."""

    words: str
    device: str | None
    instruction_set: str | None
    mkl_kernels: str | None
    driver: str | None
    engine: str | None
    engine_version: str | None
    torch_version: str | None
    dtype: str | None
    head_dtype: str | None
    quantization: str | None
    attention_backend: str | None
    settings: dict[str, str]

    @classmethod
    def of(cls, environment: Environment) -> Self:
        """Return the environment as it is stored."""
        return cls(words=environment.describe(), **asdict(environment))

    def environment(self) -> Environment:
        """Return the environment."""
        return Environment(**self.model_dump(exclude={"words"}))


class EnvironmentLinkRead(BaseModel):
    """A scorer in two environments, `second` against `first`, that of the chain; in nats per token."""

    scorer: str
    first: EnvironmentRead
    second: EnvironmentRead
    k3_kl: float | None
    rms_d: float | None
    max_abs_d: float | None
    share: float | None = Field(description="E[d_link·d]/E[d²] with d of the whole chain")
    share_low: float | None = Field(description=f"bootstrap-t interval by prompt group, {CALLED}")
    share_high: float | None
    logged: str | None = Field(description="the logged score of the same side")
    excess: float | None = Field(
        description="½{E[(r₁−a)(r₂−a)] − ½E[(r₁−r₂)²]}: the difference between the logged score a and the replays r₁, "
        "r₂ beyond that of their environments, if the run's is exchangeable with them; null if one of them is the run's"
    )
    excess_low: float | None = Field(description=f"bootstrap-t interval by prompt group, {CALLED}")
    excess_high: float | None
    interval: str = Field(default=RANGE, description=NAME_OF_INTERVAL)

    @classmethod
    def of(cls, measured: MeasuredEnvironmentLink) -> Self:
        """Return the link as it is stored."""
        link = {name: finite_or_none(value) for name, value in asdict(measured.link).items() if name not in _OF_LINK}
        excess, low, high = map(finite_or_none, measured.excess or (math.nan,) * 3)
        return cls(
            scorer=measured.scorer,
            first=EnvironmentRead.of(measured.first),
            second=EnvironmentRead.of(measured.second),
            **link,
            logged=measured.logged,
            excess=excess,
            excess_low=low,
            excess_high=high,
            interval=interval_name(measured.link.reliable),
        )


class AttributionDocument(BaseModel):
    """The causes of a step's mismatch: the chain of scores from the logged `rollout` to the logged `trainer`."""

    run: str
    step: int
    attempt: int
    chain: list[str]
    missing: list[str] = Field(
        description="scores of the full chain that are not available; the adjacent links are merged"
    )
    links: list[LinkRead]
    whole: LinkRead
    side_branch: SideBranchRead | None
    floors: list[FloorRead]
    cancellation: float | None = Field(description="Σ E[d_link²]/E[d²]: above 1 if links cancel")
    telescoping_error: float = Field(description="largest |Σ d_link − d| of a token, in nats")
    tokens: int = Field(description="tokens that every score of the chain has")
    rollouts: int = Field(description="rollouts that every score of the chain has")
    groups: int = Field(description="prompt groups of these rollouts")
    of_rollouts: int = Field(description="rollouts of the step when this was computed")
    from_sample: bool = Field(description="some rollouts of the step are not in it")
    scores: list[ScoreSource]
    environments: dict[str, EnvironmentRead | None] = Field(
        default_factory=dict, description="what computed each score of the chain; null: unknown"
    )
    environment_links: list[EnvironmentLinkRead] = Field(
        default_factory=list, description="scorers that were replayed in two environments"
    )
    interval: str = Field(default=RANGE, description=NAME_OF_INTERVAL)
    method: str | None = Field(
        default=None,
        description=f"how the ends of shares are computed; null: by {OLD_METHOD}",
    )
    declared_precision: str | None = Field(
        default=None, description="how the trainer's fingerprint says that it computes; null: not declared"
    )
    computed_at_us: int

    @classmethod
    def of(
        cls,
        key: StepKey,
        attribution: Attribution,
        result: AttributionResult,
        scores: Sequence[ScoreSource],
        computed_at_us: int,
    ) -> Self:
        """Return the document of a step."""
        floors, of_rollouts = result.floors, result.of_rollouts
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
            environments=_environments(attribution.chain, result),
            environment_links=[EnvironmentLinkRead.of(link) for link in result.environment_links],
            interval=interval_name(attribution.reliable),
            method=METHOD,
            declared_precision=precision_in_words(declared_precision(result.run_fingerprints.get("trainer"))),
            computed_at_us=computed_at_us,
        )


def _environments(chain: Sequence[str], result: AttributionResult) -> dict[str, EnvironmentRead | None]:
    made = {
        name: Environment.of_fingerprint(fingerprint)
        for name, fingerprint in result.run_fingerprints.items()
        if fingerprint is not None
    }
    made |= {score.name: environment_of(score) for score in result.used}
    return {name: EnvironmentRead.of(made[name]) if name in made else None for name in chain}


class ConclusionRead(BaseModel):
    """A sentence that the stored numbers support."""

    kind: str
    sentence: str
    link: str | None = Field(description="the comparison that it is about; null if it is about none")
    names_cause: bool = Field(description="true only if the sentence blames something")

    @classmethod
    def of(cls, conclusion: Conclusion) -> Self:
        """Return the conclusion as it is read."""
        return cls(
            kind=conclusion.kind,
            sentence=conclusion.sentence,
            link=conclusion.link,
            names_cause=conclusion.names_cause,
        )


class ExactOfLink(ExactRead):
    """The exact divergences of a link of the chain."""

    other_settings: list[str] = Field(
        description="fields of the fingerprints in which its scorers differ from the link's scores, except batches"
    )

    @classmethod
    def of_scores(cls, exact: ExactRead, scores: Sequence[ScoreSource]) -> Self:
        """Return the divergences with what differs from the scores of the same names."""
        plain = {score.scorer: score.fingerprint for score in scores if not score.variant}
        differing: set[str] = set()
        for name, own in ((exact.target, exact.target_fingerprint), (exact.behaviour, exact.behaviour_fingerprint)):
            other = plain.get(name, own)
            differing |= {field for field in own.keys() | other.keys() if own.get(field) != other.get(field)}
        return cls(**exact.model_dump(), other_settings=sorted(differing - {"batch_composition"}))


class AttributionRead(AttributionDocument):
    """The stored attribution of a step, and the conclusions from it."""

    exact: list[ExactOfLink] = Field(description="exact divergences of pairs of these scores, the newest of each pair")
    conclusions: list[ConclusionRead] = Field(description="computed when read; the first one is the headline")
    weights_search: WeightsSearchRead | None = Field(
        default=None, description="the newest search for the weights that the engine held; null if none is done"
    )
    incomplete: IncompleteStep | None = Field(
        default=None, description="the step closed without some of its shards; null: it has all, or is still open"
    )
    stale: bool = Field(description="scores or rollouts arrived since; a new attribution is being computed")

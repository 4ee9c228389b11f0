"""The evidence on a step's attribution, as plain numbers (NaN: not known), and a sentence that follows from it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from foreshock.environment import Environment


@dataclass(frozen=True, slots=True)
class LinkEvidence:
    """A link `target/behaviour` of the chain, in nats per token; see `measures.estimators.attribution.Link`."""

    name: str
    cause: str
    k3_kl: float
    rms_d: float
    share: float = math.nan
    share_low: float = math.nan
    share_high: float = math.nan

    @property
    def short_cause(self) -> str:
        """The cause up to its colon; the rest is an explanation."""
        return self.cause.partition(":")[0]


@dataclass(frozen=True, slots=True)
class ReferenceEvidence:
    """Scores against the same weights at float32. `links` are `torch.float32/<score>`.

    `difference` is E[d²] of `engine` less that of `trainer`, both against the reference, in nats², with the ends of its
    paired interval by prompt group: above 0 if the trainer's score is nearer.
    """

    reference: str
    links: tuple[LinkEvidence, ...]
    engine: str | None = None
    trainer: str | None = None
    difference: float = math.nan
    difference_low: float = math.nan
    difference_high: float = math.nan

    def k3_of(self, score: str) -> float:
        """Return the k3 of the reference against a score; NaN if it was not compared."""
        return next((link.k3_kl for link in self.links if link.name == f"{self.reference}/{score}"), math.nan)


@dataclass(frozen=True, slots=True)
class DriftPoint:
    """The k3 of a link at a probed step, in nats per token.

    `same_environment`: both scores of the link were made in the environments, and in the attempt, of this step's.
    """

    step: int
    k3_kl: float
    same_environment: bool = False


@dataclass(frozen=True, slots=True)
class EnvironmentLinkEvidence:
    """A scorer in two environments; see `foreshock.measures.estimators.attribution.EnvironmentLink`.

    `first` is the environment that the chain has. `logged` is the logged score of the same side; `excess` is NaN if one
    of the two environments is the run's own, because then the chain's link says it.
    """

    scorer: str
    first: Environment
    second: Environment
    k3_kl: float
    share: float = math.nan
    share_low: float = math.nan
    share_high: float = math.nan
    logged: str | None = None
    excess: float = math.nan
    excess_low: float = math.nan
    excess_high: float = math.nan


@dataclass(frozen=True, slots=True)
class ExactEvidence:
    """The exact divergences of the pair `link` = `target/behaviour`, token means with the ends of their intervals.

    `kl` is KL(μ‖π) in nats per token, with μ the behaviour and π the target; see `foreshock.measures.exact`. `k3_kl` is
    its sampled estimate from the same scores at the same tokens. `other_settings` names the fields of the fingerprints,
    except batches, in which the pair's scorers differ from the scores of the link.
    """

    link: str
    kl: float
    kl_low: float
    kl_high: float
    tv: float
    delta_max: float
    top1_flip: float
    k3_kl: float
    k3_low: float
    k3_high: float
    tokens: int
    prompt_groups: int
    non_finite: int = 0
    other_settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttributionEvidence:
    """Evidence on the attribution of one step.

    Args:
        chain: available scores, from `rollout` to `trainer`.
        whole: the comparison of the chain's two ends.
        prompt_groups, rollouts: of the rollouts that every score of the chain has.
        floors: the k3 of each scorer against itself in other batches, by scorer.
        reference: the side branch; None if the reference was not scored.
        drift: k3 of each link at the run's other probed steps, by link, in step order.
        declared_precision: how the trainer's fingerprint says that it computes, such as "float32"; None if it does
            not.
        environments: the environment that made each score, by score; None if unknown.
        environment_links: scorers that were replayed in two environments.
        exact: exact divergences of pairs of scores.
    """

    step: int
    chain: tuple[str, ...]
    links: tuple[LinkEvidence, ...]
    whole: LinkEvidence
    prompt_groups: int = 0
    rollouts: int = 0
    cancellation: float = math.nan
    floors: Mapping[str, float] = field(default_factory=dict)
    reference: ReferenceEvidence | None = None
    drift: Mapping[str, tuple[DriftPoint, ...]] = field(default_factory=dict)
    declared_precision: str | None = None
    environments: Mapping[str, Environment | None] = field(default_factory=dict)
    environment_links: tuple[EnvironmentLinkEvidence, ...] = ()
    exact: tuple[ExactEvidence, ...] = ()


ConclusionKind = Literal[
    "environment-differs",
    "environment-unknown",
    "environment-measured",
    "cause",
    "cannot-tell",
    "no-majority",
    "no-difference",
    "cancellation",
    "trainer-precision",
    "nearer-to-reference",
    "exact",
    "drift",
]

# A link with one of these conclusions is named a cause by no later rule.
_MARKS: frozenset[ConclusionKind] = frozenset({"environment-differs", "environment-unknown"})


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A sentence that the stored numbers support.

    `link` is the comparison `target/behaviour` that it is about, if it is about one. `names_cause` is True only if the
    sentence blames something.
    """

    kind: ConclusionKind
    sentence: str
    link: str | None = None
    names_cause: bool = False


def marked_links(so_far: Iterable[Conclusion]) -> frozenset[str]:
    """Return the links that may not be named a cause, because the environments of their ends differ or are unknown."""
    return frozenset(each.link for each in so_far if each.kind in _MARKS and each.link is not None)

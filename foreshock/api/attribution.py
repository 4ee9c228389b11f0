"""The attribution of a step: the links of its chain of scores, noise floors, environments and conclusions."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from foreshock.api.records import NAN, Measured, Record
from foreshock.api.replays import ExactRecord
from foreshock.api.runs import IncompleteStep
from foreshock.environment import Environment
from foreshock.interval_names import RANGE, RANGE_NOTE

_End = Annotated[Measured, f"bootstrap-t by prompt group: a {RANGE}. {RANGE_NOTE}"]


class LinkRecord(Record):
    """A comparison `target/behaviour` of the chain, in nats per token; null if it cannot be estimated."""

    name: str
    cause: Annotated[str, "what can differ between the two scores"]
    k3_kl: Measured
    excess_k3_kl: Annotated[Measured, "k3 less half the noise floor of each end; may be below 0; null if unknown"]
    mean_d: Measured
    rms_d: Measured
    max_abs_d: Measured
    share: Annotated[Measured, "E[d_link·d]/E[d²]; the shares of the links add to 1"]
    share_low: _End
    share_high: Measured

    @property
    def short_cause(self) -> str:
        """The cause up to its colon; the rest is an explanation."""
        return self.cause.partition(":")[0]


class SideBranchRecord(Record):
    """Every score against the float32 forward pass: whether the engine or the trainer is nearer to it."""

    reference: str
    links: tuple[LinkRecord, ...]
    engine: Annotated[str | None, "the engine's score that is compared"]
    trainer: Annotated[str | None, "the trainer's score that is compared"]
    nearer: Annotated[str | None, "the nearer of the two, `equal`, or null if the data does not tell"]
    difference: Annotated[Measured, "E[d²] of the engine's score less that of the trainer's, in nats²"] = NAN
    difference_low: Annotated[Measured, f"bootstrap-t, paired by prompt group: a {RANGE}; null if unknown"] = NAN
    difference_high: Measured = NAN
    tokens: int
    rollouts: int

    def k3_of(self, score: str) -> float:
        """Return the k3 of the reference against a score; NaN if it was not compared."""
        return next((link.k3_kl for link in self.links if link.name == f"{self.reference}/{score}"), NAN)


class NoiseFloorRecord(Record):
    """The noise floor of a scorer: the scorer again with other batches. Half of its k3 is in each comparison of it."""

    scorer: str
    comparison: str
    k3_kl: Measured
    mean_abs_d: Measured
    max_abs_d: Measured
    rollouts: int
    tokens: int


class ScoreSourceRecord(Record):
    """A replayed score that the attribution uses, with its fingerprint."""

    scorer: str
    variant: str
    fingerprint_digest: str
    fingerprint: Mapping[str, Any]
    accelerator: str
    device_name: str
    rollouts: int


class EnvironmentRecord(Environment):
    """Environment that computed a score; null: unknown. `words` describe the hardware."""

    words: str


class EnvironmentLinkRecord(Record):
    """A scorer in two environments, `second` against `first`, that of the chain; in nats per token."""

    scorer: str
    first: EnvironmentRecord
    second: EnvironmentRecord
    k3_kl: Measured
    rms_d: Measured
    max_abs_d: Measured
    share: Annotated[Measured, "E[d_link·d]/E[d²] with d of the whole chain"]
    share_low: _End
    share_high: Measured
    logged: Annotated[str | None, "the logged score of the same side"]
    excess: Annotated[
        Measured,
        "½{E[(r₁−a)(r₂−a)] − ½E[(r₁−r₂)²]}: what is between the logged score a and the replays r₁, r₂ beyond their "
        "environments, if the run's is exchangeable with them; null if one of them is the run's",
    ]
    excess_low: _End
    excess_high: Measured


class AttributionDocument(Record):
    """The causes of a step's mismatch: the chain of scores from the logged `rollout` to the logged `trainer`."""

    run: str
    step: int
    attempt: int
    chain: tuple[str, ...]
    missing: Annotated[tuple[str, ...], "scores of the full chain that are not available: the adjacent links are one"]
    links: tuple[LinkRecord, ...]
    whole: LinkRecord
    side_branch: SideBranchRecord | None
    floors: tuple[NoiseFloorRecord, ...]
    cancellation: Annotated[Measured, "Σ E[d_link²]/E[d²]: above 1 if links cancel"]
    telescoping_error: Annotated[float, "largest |Σ d_link − d| of a token, in nats"]
    tokens: Annotated[int, "tokens that every score of the chain has"]
    rollouts: Annotated[int, "rollouts that every score of the chain has"]
    groups: Annotated[int, "prompt groups of these rollouts"]
    of_rollouts: Annotated[int, "rollouts of the step when this was computed"]
    from_sample: Annotated[bool, "some rollouts of the step are not in it"]
    scores: tuple[ScoreSourceRecord, ...]
    environments: Annotated[
        Mapping[str, EnvironmentRecord | None], "what computed each score of the chain; null: unknown"
    ] = field(default_factory=dict)
    environment_links: Annotated[tuple[EnvironmentLinkRecord, ...], "scorers replayed in two environments"] = ()
    method: Annotated[str, "how the ends of shares are computed"]
    declared_precision: Annotated[str | None, "precision by the trainer's fingerprint; null: not declared"] = None
    computed_at_us: int


class ConclusionRecord(Record):
    """A sentence that the stored numbers support."""

    kind: str
    sentence: str
    link: Annotated[str | None, "the comparison that it is about; null if it is about none"]
    names_cause: Annotated[bool, "true only if the sentence blames something"]


class ExactOfLinkRecord(ExactRecord):
    """The exact divergences of a link of the chain."""

    other_settings: Annotated[
        tuple[str, ...], "fields of fingerprints that differ from the link's scores, except batches"
    ]


class AttributionRecord(AttributionDocument):
    """The stored attribution of a step, and the conclusions from it."""

    exact: Annotated[tuple[ExactOfLinkRecord, ...], "exact divergences of these scores, the newest of each pair"]
    conclusions: Annotated[tuple[ConclusionRecord, ...], "computed when read; the first one is the headline"]
    incomplete: Annotated[IncompleteStep | None, "how the step closed without some shards; null: not so"] = None
    stale: Annotated[bool, "scores or rollouts arrived since; a new attribution is being computed"]

    def exact_kl(self) -> dict[str, float]:
        """Return KL(μ‖π) over the whole vocabulary, in nats per token, of the links with the settings of their scores.

        A link's exact divergence with other settings is not among them.
        """
        return {each.pair: each.kl.mean for each in self.exact if not each.other_settings}

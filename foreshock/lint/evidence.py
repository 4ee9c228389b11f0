"""The evidence that the lint takes from a batch: small, mergeable over shards and steps, stored by the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.after_id import MismatchAfterIds, mismatch_after_ids
from foreshock.lint.alignment import count_alignment
from foreshock.lint.constants import constants_among
from foreshock.lint.counting import (
    COLUMNS,
    COUNTS,
    EXAMPLES_KEPT,
    EXTREMES,
    SUMS,
    EvidenceBuilder,
    GroupSums,
    Piece,
    iterate_pieces,
    keys_of_groups,
)
from foreshock.lint.missing_log_probs import MissingByTokenId, count_masked_values, missing_by_token_id
from foreshock.lint.pairs import count_pairs
from foreshock.lint.places import PlaceSums, sum_places
from foreshock.lint.report import Example
from foreshock.lint.sampling import count_sampling_parameters, sum_surprisals
from foreshock.lint.values import count_rounding, count_values
from foreshock.lint.whole_rollouts import (
    REWARD_COLUMNS,
    GroupRewards,
    RolloutHashes,
    count_learning_signal,
    hash_rollouts,
    learning_signal_of,
)
from foreshock.measures.statistics import blob
from foreshock.measures.statistics.compensated_sums import CompensatedSums
from foreshock.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    from foreshock.measures.comparison import StepMeasurement

# Raise the number whenever a stored value changes its meaning.
_KIND = "lint-6"
_LAYOUT: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "counts": ("<i8", (len(COUNTS),)),
    "sums": ("<f8", (2, len(SUMS))),
    "extremes": ("<f8", (len(EXTREMES),)),
    "group_keys": ("<u8", (None,)),
    "group_tokens": ("<i8", (None,)),
    "group_sums": ("<f8", (2, None, len(GroupSums.SUMS))),
    "reward_keys": ("<u8", (None,)),
    "rewards": ("<f8", (None, len(REWARD_COLUMNS))),
    "dropped_ids": ("<i8", (None,)),
    "dropped_counts": ("<i8", (None, 3)),
    "after_ids": ("<i8", (None,)),
    "after_counts": ("<i8", (None, len(MismatchAfterIds.COUNTS))),
    "after_sums": ("<f8", (2, None, len(MismatchAfterIds.SUMS))),
    "place_keys": ("<i8", (None,)),
    "place_counts": ("<i8", (None, len(PlaceSums.COUNTS))),
    "place_sums": ("<f8", (2, None, len(PlaceSums.SUMS))),
    "marks": ("<u8", (3, None)),
    "mark_log_probs": ("<f8", (None,)),
}

_COUNT_PLACES = {name: place for place, name in enumerate(COUNTS)}
_SUM_PLACES = {name: place for place, name in enumerate(SUMS)}

Examples = Mapping[str, tuple[Example, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class LintEvidence:
    """The evidence of some rollouts. Merging in any order gives the same; sums agree up to float64 rounding.

    It holds the counts, sums and extremes named in `counting.py`, sums and rewards by prompt group, missing log-probs
    by token id, sums after the first occurrence of an id, hashes of rollouts, and up to three examples of each check.
    """

    counts: NDArray[np.int64]
    sums: CompensatedSums
    extremes: NDArray[np.float64]
    groups: GroupSums
    rewards: GroupRewards
    missing: MissingByTokenId
    after_ids: MismatchAfterIds
    places: PlaceSums
    rollout_hashes: RolloutHashes
    examples: Examples

    def merge(self, other: LintEvidence) -> LintEvidence:
        """Return the evidence over the rollouts of both."""
        return LintEvidence(
            self.counts + other.counts,
            self.sums + other.sums,
            np.maximum(self.extremes, other.extremes),
            self.groups.merge(other.groups),
            self.rewards.merge(other.rewards),
            self.missing.merge(other.missing),
            self.after_ids.merge(other.after_ids),
            self.places.merge(other.places),
            self.rollout_hashes.merge(other.rollout_hashes),
            {
                name: tuple(sorted({*self.where(name), *other.where(name)})[:EXAMPLES_KEPT])
                for name in sorted({*self.examples, *other.examples})
            },
        )

    def across_steps(self) -> LintEvidence:
        """Return the evidence without what is compared only within a step: hashes, rewards and levels of rollouts."""
        return replace(
            self,
            rollout_hashes=RolloutHashes.empty(),
            rewards=GroupRewards.empty(),
            places=self.places.without("rollout"),
        )

    def of_sample(self, measured: StepMeasurement) -> LintEvidence:
        """Return this evidence of a sample, completed with what `measured` knows about all rollouts.

        It knows the truncated responses and, in the summaries of TRAINER_ROLLOUT, the rewards and advantages.
        """
        known, rewards = learning_signal_of(measured)
        counts = self.counts.copy()
        for name, count in known.items():
            counts[_COUNT_PLACES[name]] = count
        counts[_COUNT_PLACES["rollouts_unseen"]] = measured.step.rollouts - self.count("rollouts")
        return replace(self, counts=counts, rewards=rewards or self.rewards)

    def count(self, name: str) -> int:
        """Return one of COUNTS."""
        return int(self.counts[_COUNT_PLACES[name]])

    def sum(self, name: str) -> float:
        """Return one of SUMS."""
        return self.sums.at(_SUM_PLACES[name])

    def extreme(self, name: str) -> float:
        """Return one of EXTREMES; −inf if no value was seen."""
        return float(self.extremes[EXTREMES.index(name)])

    def where(self, check: str) -> tuple[Example, ...]:
        """Return the examples of a check."""
        return self.examples.get(check, ())

    def to_bytes(self) -> bytes:
        """Return everything except the examples as a blob for `from_bytes`: a JSON header and raw arrays."""
        hashes = self.rollout_hashes
        return blob.pack(
            _KIND,
            {
                "counts": self.counts,
                "sums": self.sums.to_array(),
                "extremes": self.extremes,
                "group_keys": self.groups.keys,
                "group_tokens": self.groups.counts[:, 0],
                "group_sums": self.groups.sums.to_array(),
                "reward_keys": self.rewards.keys,
                "rewards": self.rewards.values,
                "dropped_ids": self.missing.keys,
                "dropped_counts": self.missing.counts,
                "after_ids": self.after_ids.keys,
                "after_counts": self.after_ids.counts,
                "after_sums": self.after_ids.sums.to_array(),
                "place_keys": self.places.keys,
                "place_counts": self.places.counts,
                "place_sums": self.places.sums.to_array(),
                "marks": np.stack([hashes.prompts, hashes.contents, hashes.order]),
                "mark_log_probs": hashes.log_probs,
            },
        )

    def examples_to_json(self) -> dict[str, Any]:
        """Return the examples as JSON values, without NUL characters, which PostgreSQL refuses."""
        return {
            name: [
                {**asdict(example), "sample_id": _storable(example.sample_id), "text": _storable(example.text)}
                for example in examples
            ]
            for name, examples in self.examples.items()
        }

    @classmethod
    def from_bytes(cls, data: bytes, examples: Mapping[str, Any] | None = None) -> LintEvidence:
        """Restore the evidence from `to_bytes()` and `examples_to_json()`.

        Raises StatisticsError if the blob is damaged or of another version.
        """
        arrays = blob.unpack(_KIND, data, _LAYOUT)
        prompts, contents, order = arrays["marks"]
        sums = {name: CompensatedSums.from_array(values) for name, values in arrays.items() if name.endswith("sums")}
        return cls(
            arrays["counts"],
            sums["sums"],
            arrays["extremes"],
            GroupSums(arrays["group_keys"], arrays["group_tokens"][:, None], sums["group_sums"]),
            GroupRewards(arrays["reward_keys"], arrays["rewards"]),
            MissingByTokenId.of(arrays["dropped_ids"], arrays["dropped_counts"]),
            MismatchAfterIds(arrays["after_ids"], arrays["after_counts"], sums["after_sums"]),
            PlaceSums(arrays["place_keys"], arrays["place_counts"], sums["place_sums"]),
            RolloutHashes(prompts, contents, order, arrays["mark_log_probs"]),
            examples_from_json(examples or {}),
        )


def examples_from_json(values: Mapping[str, Any]) -> Examples:
    """Restore the examples from `examples_to_json()`."""
    return {name: tuple(Example(**example) for example in examples) for name, examples in values.items()}


def _storable(text: str) -> str:
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


# Invalid log-probs overflow in exponentials. The results are not finite, and the checks handle that.
@np.errstate(all="ignore")
def collect_evidence(batch: RolloutBatch) -> LintEvidence:
    """Return the evidence of a batch. Only the shape of the batch has to be valid, not its values."""
    columns = {"rollout": batch.rollout_log_probs, "trainer": batch.trainer_log_probs}
    builder = EvidenceBuilder(constants={name: constants_among(column, batch) for name, column in columns.items()})
    generated = int(batch.generated_lengths.sum())
    builder.count(rollouts=batch.num_rollouts, tokens=generated, tool_tokens=batch.num_tokens - generated)
    count_sampling_parameters(batch, builder)
    group_sums = np.zeros((batch.num_rollouts, len(GroupSums.SUMS)))
    group_tokens = np.zeros(batch.num_rollouts, np.int64)
    for piece in iterate_pieces(batch):
        rows = slice(piece.first_row, piece.first_row + piece.offsets.size - 1)
        finite = {name: count_values(batch, piece, name, builder) for name in COLUMNS}
        group_sums[rows, 0] = sum_surprisals(_finite_only(piece, finite["rollout"]), builder)
        pairs = _finite_only(piece, finite["rollout"], finite["trainer"])
        if pairs.rollout is not None and pairs.trainer is not None:
            group_sums[rows, 1], group_sums[rows, 2] = count_pairs(batch, pairs, builder)
            group_tokens[rows] = np.diff(pairs.offsets)
    for name in COLUMNS:
        count_rounding(batch, name, builder)
    count_alignment(batch, builder)
    masked_constant = count_masked_values(batch, builder)
    missing = missing_by_token_id(batch, builder, masked_constant)
    after_ids = mismatch_after_ids(batch, builder, any_large=builder.counts["large"] > 0)
    count_learning_signal(batch, builder)
    keys = keys_of_groups(batch.group_ids or [None] * batch.num_rollouts, batch.sample_ids)
    places = sum_places(batch, builder)
    hashes = hash_rollouts(batch, builder)
    sums = np.array([builder.sums[name] for name in SUMS])
    return LintEvidence(
        np.array([builder.counts[name] for name in COUNTS], dtype=np.int64),
        CompensatedSums(sums, np.zeros_like(sums)),
        np.array([builder.extremes[name] for name in EXTREMES]),
        GroupSums.of_rollouts(keys, group_tokens, group_sums),
        GroupRewards.of(keys, batch.reward),
        missing,
        after_ids,
        places,
        hashes,
        {name: tuple(examples) for name, examples in sorted(builder.examples.items())},
    )


def _finite_only(piece: Piece, *finite: NDArray[np.bool_] | None) -> Piece:
    """Return the piece without the tokens at which a mask is False; a mask of None keeps all."""
    masks = [mask for mask in finite if mask is not None]
    return piece.select(np.logical_and.reduce(masks)) if masks else piece

"""All that the lint needs to know of a batch: small, and the evidence of two shards merges into that of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.report import Example
from foreshock.lint.tables import DroppedIds, GroupSums, RolloutMarks
from foreshock.lint.tally import COUNTS, EXAMPLES_KEPT, EXTREMES, SUMS, Tally
from foreshock.measures.statistics import blob
from foreshock.measures.statistics.compensated_sums import CompensatedSums

__all__ = ["LintEvidence", "examples_from_json"]

# Raise the number whenever a stored number changes its meaning.
_KIND = "lint-2"
_LAYOUT: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "counts": ("<i8", (len(COUNTS),)),
    "sums": ("<f8", (2, len(SUMS))),
    "extremes": ("<f8", (len(EXTREMES),)),
    "group_keys": ("<u8", (None,)),
    "group_tokens": ("<i8", (None,)),
    "group_sums": ("<f8", (2, None, 2)),
    "dropped_ids": ("<i8", (None,)),
    "dropped_counts": ("<i8", (None, 3)),
    "marks": ("<u8", (3, None)),
    "mark_log_probs": ("<f8", (None,)),
}

Examples = Mapping[str, tuple[Example, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class LintEvidence:
    """Counts, sums and extremes by the names in `tally.py`, the tables of `tables.py`, and up to three examples of each
    finding. Merging in any order gives the same evidence (sums to the last bits that float64 shows)."""

    counts: NDArray[np.int64]
    sums: CompensatedSums
    extremes: NDArray[np.float64]
    groups: GroupSums
    dropped: DroppedIds
    marks: RolloutMarks
    examples: Examples

    @classmethod
    def of(cls, tally: Tally, groups: GroupSums, dropped: DroppedIds, marks: RolloutMarks) -> LintEvidence:
        """The evidence of one batch."""
        sums = np.array([tally.sums[name] for name in SUMS])
        return cls(
            np.array([tally.counts[name] for name in COUNTS], dtype=np.int64),
            CompensatedSums(sums, np.zeros_like(sums)),
            np.array([tally.extremes[name] for name in EXTREMES]),
            groups,
            dropped,
            marks,
            {name: tuple(examples) for name, examples in sorted(tally.examples.items())},
        )

    def merge(self, other: LintEvidence) -> LintEvidence:
        """The evidence over the rollouts of both."""
        return LintEvidence(
            self.counts + other.counts,
            self.sums + other.sums,
            np.maximum(self.extremes, other.extremes),
            self.groups.merge(other.groups),
            self.dropped.merge(other.dropped),
            self.marks.merge(other.marks),
            _merge_examples(self.examples, other.examples),
        )

    def without_marks(self) -> LintEvidence:
        """The same evidence without what duplicates are found by: steps may well share rollouts, shards may not."""
        nothing = np.zeros(0, np.uint64)
        return replace(self, marks=RolloutMarks(nothing, nothing, nothing, np.zeros(0)))

    def count(self, name: str) -> int:
        """One of COUNTS."""
        return int(self.counts[COUNTS.index(name)])

    def sum(self, name: str) -> float:
        """One of SUMS."""
        return float(self.sums.value[SUMS.index(name)])

    def extreme(self, name: str) -> float:
        """One of EXTREMES; −inf where nothing was seen."""
        return float(self.extremes[EXTREMES.index(name)])

    def where(self, check: str) -> tuple[Example, ...]:
        """Examples of a finding."""
        return self.examples.get(check, ())

    def to_bytes(self) -> bytes:
        """All but the examples as a blob that `from_bytes` reads: a JSON header and raw arrays."""
        return blob.pack(
            _KIND,
            {
                "counts": self.counts,
                "sums": self.sums.to_array(),
                "extremes": self.extremes,
                "group_keys": self.groups.keys,
                "group_tokens": self.groups.tokens,
                "group_sums": self.groups.sums.to_array(),
                "dropped_ids": self.dropped.ids,
                "dropped_counts": self.dropped.counts,
                "marks": np.stack([self.marks.prompts, self.marks.contents, self.marks.order]),
                "mark_log_probs": self.marks.log_probs,
            },
        )

    def examples_to_json(self) -> dict[str, Any]:
        """The examples as JSON holds them (no NUL, which PostgreSQL refuses)."""
        return {
            name: [
                {**asdict(example), "sample_id": _storable(example.sample_id), "text": _storable(example.text)}
                for example in examples
            ]
            for name, examples in self.examples.items()
        }

    @classmethod
    def from_bytes(cls, data: bytes, examples: Mapping[str, Any] | None = None) -> LintEvidence:
        """The evidence of `to_bytes()` and `examples_to_json()`.

        Raises StatisticsError where it is damaged or of another version.
        """
        arrays = blob.unpack(_KIND, data, _LAYOUT)
        prompts, contents, order = arrays["marks"]
        return cls(
            arrays["counts"],
            CompensatedSums.from_array(arrays["sums"]),
            arrays["extremes"],
            GroupSums(arrays["group_keys"], arrays["group_tokens"], CompensatedSums.from_array(arrays["group_sums"])),
            DroppedIds(arrays["dropped_ids"], arrays["dropped_counts"]),
            RolloutMarks(prompts, contents, order, arrays["mark_log_probs"]),
            examples_from_json(examples or {}),
        )


def examples_from_json(values: Mapping[str, Any]) -> Examples:
    """The examples of `examples_to_json()`."""
    return {name: tuple(Example(**example) for example in examples) for name, examples in values.items()}


def _merge_examples(one: Examples, other: Examples) -> Examples:
    return {
        name: tuple(sorted({*one.get(name, ()), *other.get(name, ())})[:EXAMPLES_KEPT])
        for name in sorted({*one, *other})
    }


def _storable(text: str) -> str:
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()

"""The evidence that the lint takes from a batch: small, mergeable over shards and steps, stored by the service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from foreshock.api.steps import LintExampleRecord
from foreshock.digests import digest_of_json
from foreshock.lint.counting import EXAMPLES_KEPT, Counting, Counts, Table
from foreshock.measures.statistics import blob
from foreshock.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    from foreshock.measures.comparison import StepMeasurement

# Raise the number if a stored value changes its meaning; new and other names change the kind by themselves.
_VERSION = 9
_Kind = TypeVar("_Kind", bound=Counts)

Examples = Mapping[str, tuple[LintExampleRecord, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class LintEvidence:
    """The evidence of some rollouts: the Counts of each kind, and up to three examples of each check.

    Merging in any order gives the same; sums agree up to float64 rounding.
    """

    parts: Mapping[type[Counts], Counts]
    examples: Examples

    def __getitem__(self, kind: type[_Kind]) -> _Kind:
        """Return the counts of a kind."""
        part = self.parts[kind]
        assert isinstance(part, kind)
        return part

    def merge(self, other: LintEvidence) -> LintEvidence:
        """Return the evidence over the rollouts of both."""
        return LintEvidence(
            {kind: part.merge(other.parts[kind]) for kind, part in self.parts.items()},
            {
                name: tuple(sorted({*self.where(name), *other.where(name)}, key=_in_order)[:EXAMPLES_KEPT])
                for name in sorted({*self.examples, *other.examples})
            },
        )

    def across_steps(self) -> LintEvidence:
        """Return the evidence without what is compared only within a step: hashes, rewards and levels of rollouts."""
        return replace(self, parts={kind: part.across_steps() for kind, part in self.parts.items()})

    def of_sample(self, measured: StepMeasurement) -> LintEvidence:
        """Return this evidence of a sample, completed with what `measured` knows about all rollouts."""
        return replace(self, parts={kind: part.of_sample(measured) for kind, part in self.parts.items()})

    def where(self, check: str) -> tuple[LintExampleRecord, ...]:
        """Return the examples of a check."""
        return self.examples.get(check, ())

    def to_bytes(self) -> bytes:
        """Return everything except the examples as a blob for `from_bytes`: a JSON header and raw arrays."""
        return blob.pack(_stored_kind(), _arrays(self.parts.values()))

    def examples_to_json(self) -> dict[str, Any]:
        """Return the examples as JSON values."""
        return {name: [asdict(example) for example in examples] for name, examples in self.examples.items()}

    @classmethod
    def from_bytes(cls, data: bytes, examples: Mapping[str, Any] | None = None) -> LintEvidence:
        """Restore the evidence from `to_bytes()` and `examples_to_json()`.

        Raises StatisticsError if the blob is damaged or of another version.
        """
        arrays = blob.unpack(_stored_kind(), data, _layout())
        parts = {kind: kind() for kind in Counts.kinds}
        for kind, part in parts.items():
            numbers = iter(arrays[kind.__name__].tolist())
            for name, empty in vars(part).items():
                stored = f"{kind.__name__}.{name}"
                if isinstance(empty, Table):
                    setattr(part, name, type(empty)(arrays[f"{stored}.keys"], arrays[stored]))
                else:
                    setattr(part, name, type(empty)(next(numbers)))
        kept = (examples or {}).items()
        return cls(parts, {name: tuple(LintExampleRecord(**each) for each in of) for name, of in kept})


def _arrays(parts: Iterable[Counts]) -> dict[str, NDArray[Any]]:
    """Return what is stored: the numbers of each kind of Counts as one array, and two arrays of each table."""
    arrays: dict[str, NDArray[Any]] = {}
    for part in parts:
        kind = type(part).__name__
        arrays[kind] = np.array([each for each in vars(part).values() if not isinstance(each, Table)], np.float64)
        for name, each in vars(part).items():
            if isinstance(each, Table):
                arrays |= {f"{kind}.{name}.keys": each.keys, f"{kind}.{name}": each.values}
    return arrays


def _in_order(example: LintExampleRecord) -> tuple[str, int, str]:
    return example.sample_id, -1 if example.token is None else example.token, example.text


@cache
def _layout() -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Return the dtype and the shape of each stored array."""
    nothing = _arrays(kind() for kind in Counts.kinds)
    return {
        name: (each.dtype.str, tuple(size or None for size in each.shape) if "." in name else each.shape)
        for name, each in nothing.items()
    }


@cache
def _stored_kind() -> str:
    """Return the kind of the blob; it changes with the names and the order of what is stored."""
    names = [
        [kind.__name__, *([name, *getattr(each, "COLUMNS", ())] for name, each in vars(kind()).items())]
        for kind in Counts.kinds
    ]
    return f"lint-{_VERSION}-{digest_of_json(names)[7:15]}"


# Invalid log-probs overflow in exponentials. The results are not finite, and the checks handle that.
@np.errstate(all="ignore")
def collect_evidence(batch: RolloutBatch) -> LintEvidence:
    """Return the evidence of a batch. Only the shape of the batch has to be valid, not its values."""
    counting = Counting(batch)
    parts = {kind: kind() for kind in Counts.kinds}
    for piece in counting.pieces():
        pairs = piece.pairs()
        for part in parts.values():
            part.add_piece(piece, counting)
            if pairs is not None:
                part.add_pairs(pairs, counting)
    for part in parts.values():
        part.add_batch(counting)
    return LintEvidence(parts, {name: tuple(examples) for name, examples in sorted(counting.examples.items())})

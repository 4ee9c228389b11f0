"""The evidence that the lint takes from a batch: small, mergeable over shards and steps, stored by the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from foreshock.digests import digest_of_json
from foreshock.lint.counting import EXAMPLES_KEPT, Counting, Counts, Example, Table
from foreshock.measures.statistics import blob
from foreshock.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    from foreshock.measures.comparison import StepMeasurement

# Raise the number if a stored value changes its meaning; new and other names change the kind by themselves.
_VERSION = 8
_Kind = TypeVar("_Kind", bound=Counts)

Examples = Mapping[str, tuple[Example, ...]]


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
                name: tuple(sorted({*self.where(name), *other.where(name)})[:EXAMPLES_KEPT])
                for name in sorted({*self.examples, *other.examples})
            },
        )

    def across_steps(self) -> LintEvidence:
        """Return the evidence without what is compared only within a step: hashes, rewards and levels of rollouts."""
        return replace(self, parts={kind: part.across_steps() for kind, part in self.parts.items()})

    def of_sample(self, measured: StepMeasurement) -> LintEvidence:
        """Return this evidence of a sample, completed with what `measured` knows about all rollouts."""
        return replace(self, parts={kind: part.of_sample(measured) for kind, part in self.parts.items()})

    def where(self, check: str) -> tuple[Example, ...]:
        """Return the examples of a check."""
        return self.examples.get(check, ())

    def to_bytes(self) -> bytes:
        """Return everything except the examples as a blob for `from_bytes`: a JSON header and raw arrays."""
        arrays: dict[str, Any] = {}
        for kind, (numbers, tables) in _stored_fields().items():
            part = self.parts[kind]
            arrays[kind.__name__] = np.array([getattr(part, name) for name in numbers], np.float64)
            for name in tables:
                table = getattr(part, name)
                arrays |= {f"{kind.__name__}.{name}.keys": table.keys, f"{kind.__name__}.{name}": table.values}
        return blob.pack(_stored_kind(), arrays)

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
        arrays = blob.unpack(_stored_kind(), data, _layout())
        parts: dict[type[Counts], Counts] = {}
        for kind, (numbers, tables) in _stored_fields().items():
            part = parts[kind] = kind()
            for (name, number), value in zip(numbers.items(), arrays[kind.__name__].tolist(), strict=True):
                setattr(part, name, number(value))
            for name, table in tables.items():
                stored = f"{kind.__name__}.{name}"
                setattr(part, name, table(arrays[f"{stored}.keys"], arrays[stored]))
        return cls(parts, examples_from_json(examples or {}))


@cache
def _stored_fields() -> dict[type[Counts], tuple[dict[str, type], dict[str, type[Table]]]]:
    """Return the numbers (int or float) and the tables of each kind of Counts, with their types."""
    found = {}
    for kind in Counts.kinds:
        empty = kind()
        types = {each.name: type(getattr(empty, each.name)) for each in fields(kind)}
        tables = {name: each for name, each in types.items() if issubclass(each, Table)}
        found[kind] = {name: each for name, each in types.items() if name not in tables}, tables
    return found


@cache
def _layout() -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Return the dtype and the shape of each stored array."""
    layout: dict[str, tuple[str, tuple[int | None, ...]]] = {}
    for kind, (numbers, tables) in _stored_fields().items():
        layout[kind.__name__] = "<f8", (len(numbers),)
        for name, table in tables.items():
            layout[f"{kind.__name__}.{name}.keys"] = "<u8", table.KEY_SHAPE
            layout[f"{kind.__name__}.{name}"] = "<f8", (None, len(table.COLUMNS))
    return layout


@cache
def _stored_kind() -> str:
    """Return the kind of the blob; it changes with the names and the order of what is stored."""
    names = [
        [kind.__name__, *numbers, *([name, *table.COLUMNS] for name, table in tables.items())]
        for kind, (numbers, tables) in _stored_fields().items()
    ]
    return f"lint-{_VERSION}-{digest_of_json(names)[7:15]}"


def examples_from_json(values: Mapping[str, Any]) -> Examples:
    """Restore the examples from `examples_to_json()`."""
    return {name: tuple(Example(**example) for example in examples) for name, examples in values.items()}


def _storable(text: str) -> str:
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


# Invalid log-probs overflow in exponentials. The results are not finite, and the checks handle that.
@np.errstate(all="ignore")
def collect_evidence(batch: RolloutBatch) -> LintEvidence:
    """Return the evidence of a batch. Only the shape of the batch has to be valid, not its values."""
    counting = Counting(batch)
    parts = {kind: kind() for kind in Counts.kinds}
    for piece in counting.pieces():
        for part in parts.values():
            part.add_piece(piece, counting)
    for part in parts.values():
        part.add_batch(counting)
    return LintEvidence(parts, {name: tuple(examples) for name, examples in sorted(counting.examples.items())})

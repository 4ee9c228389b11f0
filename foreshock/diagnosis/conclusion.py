"""A conclusion on a step's attribution: a sentence that follows from its numbers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ConclusionKind = Literal[
    "environment-differs",
    "environment-unknown",
    "environment-measured",
    "adapter-merged",
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

# No later rule names a link with one of these conclusions a cause.
_MARKS: frozenset[ConclusionKind] = frozenset({"environment-differs", "environment-unknown", "adapter-merged"})


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A sentence that the stored numbers support.

    `link` is the comparison `target/behaviour` that the sentence is about; None if it is about no single one.
    `names_cause` is True only if the sentence blames something.
    """

    kind: ConclusionKind
    sentence: str
    link: str | None = None
    names_cause: bool = False


def marked_links(so_far: Iterable[Conclusion]) -> frozenset[str]:
    """Return the links that may not be named a cause, because their ends differ in what a replay did not reproduce."""
    return frozenset(each.link for each in so_far if each.kind in _MARKS and each.link is not None)

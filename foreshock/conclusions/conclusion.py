"""One conclusion: a sentence, its kind, and the link that it is about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Conclusion", "ConclusionKind", "marked_links"]

ConclusionKind = Literal[
    "environment-differs",
    "environment-unknown",
    "environment-excluded",
    "environment-measured",
    "wrong-weights",
    "weights-held",
    "cause",
    "cannot-tell",
    "no-majority",
    "no-difference",
    "cancellation",
    "trainer-precision",
    "nearer-to-reference",
    "exact",
    "drift",
    "noise-floor",
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
